"""Access to JAX's coordination service, through which the processes of a job exchange short texts.

The only place that uses private parts of JAX for this: no public function reaches the key-value store.
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jax._src import distributed
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]


def process_number() -> int:
    """The number of this process in its job, known before JAX has devices; 0 in a job of one."""
    return distributed.global_state.process_id


def process_count() -> int:
    """The number of processes of the job."""
    return distributed.global_state.num_processes


def publish(key: str, value: str) -> None:
    """Stores a text under a key, in place of what was there; waits for the service."""
    _client().key_value_set(key, value, allow_overwrite=True)


def published(folder: str) -> dict[str, str]:
    """All texts under ``folder/``, by what their keys have after it; waits for the service."""
    return {key.rpartition("/")[2]: value for key, value in _client().key_value_dir_get(f"{folder}/")}


def _client() -> Any:
    client = distributed.global_state.client
    assert client is not None, "join_processes comes first"
    return client


@contextmanager
def relayed(on_closed: Callable[[], None]) -> Iterator[None]:
    """Lets ``jax.distributed.initialize`` reach the service by a relay, except in the process that hosts it.

    Args:
      on_closed: called, in a thread, when the service closes a connection, where JAX would abort the process.
    """
    connect = _jax.get_distributed_runtime_client

    def connect_by_relay(address: str, process: int, **options: Any) -> Any:
        if process != 0:
            address = f"127.0.0.1:{_start_relay(address, on_closed)}"
        return connect(address, process, **options)

    _jax.get_distributed_runtime_client = connect_by_relay
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = connect


def _start_relay(address: str, on_closed: Callable[[], None]) -> int:
    """Starts the relay to HOST:PORT; returns its port on this machine."""
    host, _, port = address.rpartition(":")
    program = str(Path(__file__).with_name("coordination_relay.py"))
    relay = subprocess.Popen(
        [sys.executable, "-I", "-S", program, host.strip("[]"), port],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C on a terminal is for the process only
    )
    assert relay.stdout is not None
    own_port = int(relay.stdout.readline())

    def listen() -> None:
        assert relay.stdout is not None
        if relay.stdout.readline():
            on_closed()

    threading.Thread(target=listen, daemon=True, name="relay").start()
    return own_port
