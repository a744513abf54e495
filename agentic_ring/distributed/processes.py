"""Jobs of several processes: joining them, waiting for each other, and work that the first one does alone."""

import importlib.util
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from agentic_ring.distributed.coordination import process_count, process_number, publish, published, relayed
from agentic_ring.distributed.watchdog import Watchdog, start_watchdog
from agentic_ring.errors import AgenticRingError, ConfigError

_FIRST_LINE_SECONDS, _LINE_SECONDS = 10.0, 60.0
_DAY_SECONDS = 24 * 60 * 60
_FAILED = "failed: "
_meetings: Counter[str] = Counter()


class FirstProcessError(AgenticRingError, RuntimeError):
    """The first process of the job failed in work that it does for all."""


def join_processes() -> None:
    """Joins the other processes of the job; call before anything asks JAX for its devices.

    Slurm, Kubernetes, Open MPI and Cloud TPU tell JAX all it needs. Elsewhere each process needs
    JAX_COORDINATOR_ADDRESS (HOST:PORT of the first one), JAX_NUM_PROCESSES and JAX_PROCESS_ID. From then on a
    watchdog ends this process, with exit status 76, when another one is lost.

    Raises:
      ConfigError: the processes of the job are not known.
    """
    # JAX's own notice of preemption would replace the handler of SIGTERM; see ``agentic_ring.stopping``.
    jax.config.update("jax_enable_preemption_service", False)
    processes, number = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
    _wait_long_in_cpu_collectives()
    closed = threading.Event()
    try:
        with relayed(closed.set):
            jax.distributed.initialize(
                num_processes=None if processes is None else int(processes),
                process_id=None if number is None else int(number),
                heartbeat_timeout_seconds=_DAY_SECONDS,  # the watchdog comes first, and names the process
            )
    except ValueError as error:
        raise ConfigError(
            f"the processes of this job cannot find each other ({error}); set JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID in each, or leave --distributed out"
        ) from error
    start_watchdog(Watchdog(process_number(), process_count(), closed))


@contextmanager
def first_process_first(name: str) -> Iterator[None]:
    """Runs the block on the first process, then on all others, which then go on together.

    For work on files that all processes share: the others find what the first has written. The block has the
    same ``name`` on every process, and may take the first one hours.

    Raises:
      FirstProcessError: on the others, if the block failed on the first.
    """
    jax.devices()  # no process has devices before all ask for them, as the block may
    if process_count() == 1:
        yield
        return
    key = _key(f"{name} by process 0")
    if process_number() == 0:
        try:
            yield
        except Exception as error:
            publish(f"{key}/0", f"{_FAILED}{error}")
            raise
        publish(f"{key}/0", "done")
    else:
        outcome = _wait_for(key, [0])[0]
        if outcome.startswith(_FAILED):
            raise FirstProcessError(
                f"process 0 failed in stage {name!r}: {outcome.removeprefix(_FAILED)}; its output says more"
            )
        yield
    wait_for_all(name)


def wait_for_all(name: str) -> None:
    """Waits until all processes of the job have come to the point of this name; says what it waits for."""
    if process_count() > 1:
        key = _key(name)
        publish(f"{key}/{process_number()}", "here")
        _wait_for(key, range(process_count()))


def compile_together(function: Any) -> Callable[..., Any]:
    """Returns a jitted function that compiles at its first call, and waits for all processes before it runs.

    The first collectives of a program fail on CPUs if processes come to them more than 30 s apart.
    """
    if process_count() == 1:
        return function
    compiled = False

    def call(*arguments: Any) -> Any:
        nonlocal compiled
        if not compiled:
            function.lower(*arguments).compile()  # the call below finds it
            wait_for_all("compilation")
            compiled = True
        return function(*arguments)

    return call


def _key(name: str) -> str:
    """The folder of one meeting: the same name may be met at again."""
    _meetings[name] += 1
    return f"agentic_ring/meetings/{name} {_meetings[name]}"


def _wait_for(key: str, processes: range | list[int]) -> dict[int, str]:
    """Waits until these processes have published a text in the folder; returns the texts.

    There is no limit of time: the watchdog ends this process where another one is lost.
    """
    started = time.monotonic()
    next_line = _FIRST_LINE_SECONDS
    while True:
        texts = {int(number): text for number, text in published(key).items()}
        missing = [number for number in processes if number not in texts]
        if not missing:
            return texts
        waited = time.monotonic() - started
        if waited > next_line:
            next_line += _LINE_SECONDS
            numbers = ", ".join(map(str, missing))
            name = key.rpartition("/")[2].rpartition(" ")[0]
            print(
                f"process {process_number()} has waited {waited:.0f} s for process {numbers}: {name}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(min(1.0, 0.05 + waited / 10))


def _wait_long_in_cpu_collectives() -> None:
    """Lets collectives of CPUs wait for a slow process; whether it hangs, the watchdog decides.

    Their limit is 30 s otherwise. The TPU's own library reads the same variable and need not know the flag.
    """
    flag = "--xla_cpu_collective_timeout_seconds"
    flags = os.environ.get("XLA_FLAGS", "")
    on_cpu = jax.config.values["jax_platforms"] == "cpu" or importlib.util.find_spec("libtpu") is None
    if on_cpu and flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={_DAY_SECONDS}"
