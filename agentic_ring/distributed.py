"""Jobs of several processes: how they join, wait for the first one, and end where one of them is lost.

JAX watches the processes: where one sends no heartbeat for ``HEARTBEAT_SECONDS``, it aborts the others with a
message that says so. What it does not do is here: an exit status after a failed collective that tells a
scheduler to start the job again, and an end of steps that do not move although every heartbeat goes on.
"""

import importlib.util
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from agentic_ring.errors import EXIT_PROCESS_LOST, EXIT_STOPPED, AgenticRingError, ConfigError
from agentic_ring.extras import needs_extra

HEARTBEAT_SECONDS = 30
JOIN_SECONDS = 300
"""Time for all processes of a job to come."""
HANG_SECONDS = float(os.environ.get("AGENTIC_RING_HANG_SECONDS", "1800"))
"""A step hangs after this long, and ten times the longest step so far."""
_GRACE_SECONDS = 60.0
_DAY_SECONDS = 24 * 60 * 60
_FAILED_COLLECTIVE = re.compile("(UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED|UNKNOWN): ")
_meetings = itertools.count()


class FirstProcessError(AgenticRingError, RuntimeError):
    """The first process of the job failed in work that it does for all."""


def join_processes() -> None:
    """Joins the other processes of the job; call before anything asks JAX for its devices.

    Slurm, Kubernetes, Open MPI and Cloud TPU tell JAX all it needs. Elsewhere each process needs
    JAX_COORDINATOR_ADDRESS (HOST:PORT of the first one), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Where some do not come within ``JOIN_SECONDS``, this one ends with a message and status 76.

    Raises:
      ConfigError: the processes of the job are not known.
    """
    # JAX's own notice of preemption knows only SIGTERM, and replaces its handler (``agentic_ring.stopping``).
    jax.config.update("jax_enable_preemption_service", False)
    # On CPUs a collective fails after 30 s, which a busy machine exceeds. The TPU's own library reads the
    # same variable and need not know the flag.
    if jax.config.values["jax_platforms"] == "cpu" or importlib.util.find_spec("libtpu") is None:
        flag = f"--xla_cpu_collective_timeout_seconds={_DAY_SECONDS}"
        os.environ["XLA_FLAGS"] = f"{flag} {os.environ.get('XLA_FLAGS', '')}"
    processes, number = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
    address = os.environ.get("JAX_COORDINATOR_ADDRESS", "host:0")
    timer = _started(JOIN_SECONDS, _end_incomplete)  # JAX would abort, with its stack
    try:
        if not re.fullmatch(r".+:\d+", address):
            raise ValueError(f"JAX_COORDINATOR_ADDRESS is {address!r}, expected HOST:PORT")
        jax.distributed.initialize(
            num_processes=None if processes is None else int(processes),
            process_id=None if number is None else int(number),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_DAY_SECONDS,  # the first process may write results for long
            initialization_timeout=2 * JOIN_SECONDS,
        )
    except ValueError as error:
        raise ConfigError(
            f"the processes of this job cannot find each other ({error}); set JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID in each, or leave --distributed out"
        ) from error
    finally:
        timer.cancel()


@contextmanager
def first_process_first(name: str) -> Iterator[None]:
    """Runs the block on the first process, then on all others, which then go on together.

    For work on files that all processes share: the others find what the first has written, which may take it
    hours. If it fails there, they get a ``FirstProcessError`` with the block's ``name``.
    """
    jax.devices()  # no process has devices before all ask for them, as the block may
    if jax.process_index() == 0:
        try:
            yield
        except Exception:
            _meet(failed=True)
            raise
        _meet()
    else:
        if _meet():
            raise FirstProcessError(f"process 0 failed in stage {name!r}; its output says why")
        yield
    _meet()


def _meet(failed: bool = False) -> bool:
    """Waits for all processes of a job; returns whether the first one has ``failed``."""
    if jax.process_count() == 1:
        return False
    with needs_extra("models"):  # slow to import, and only jobs of several processes need it
        from orbax.checkpoint import multihost

    # A collective may have a limit of time, and its wait cannot be interrupted by a signal.
    barrier, key = multihost.get_barrier_sync_fn(), f"agentic_ring {next(_meetings)}"
    met: Future[None] = Future()

    def wait() -> None:
        try:
            met.set_result(barrier(key=key, timeout_ms=1000 * _DAY_SECONDS))
        except Exception as error:
            met.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    met.result()
    return bool(multihost_utils.broadcast_one_to_all(np.array(failed)))


def compile_together(function: Any) -> Callable[..., Any]:
    """Returns a jitted function that compiles at its first call, and waits for all processes before it runs.

    The first collectives of a program fail on CPUs if processes come to them more than 30 s apart.
    """
    compiled = jax.process_count() == 1

    def call(*arguments: Any) -> Any:
        nonlocal compiled
        if not compiled:
            function.lower(*arguments).compile()  # the call below finds it
            _meet()
            compiled = True
        return function(*arguments)

    return call


@contextmanager
def watched_steps() -> Iterator[Callable[[], None]]:
    """Yields what a training loop calls before each step, so that a job whose steps hang ends.

    Where one process hangs, the steps of all stop: each process needs to watch only its own.
    """
    steps, moved, longest, timer = 0, 0.0, 0.0, threading.Timer(0, _end_hanging)

    def step() -> None:
        nonlocal steps, moved, longest, timer
        timer.cancel()
        now = time.monotonic()
        if steps > 1:  # the program compiles in the first step
            longest = max(longest, now - moved)
            timer = _started(max(HANG_SECONDS, 10 * longest), _end_hanging)
        steps, moved = steps + 1, now

    try:
        yield step if jax.process_count() > 1 else lambda: None
    finally:
        timer.cancel()


def _started(seconds: float, function: Callable[..., object], *arguments: object) -> threading.Timer:
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()
    return timer


def _end_hanging() -> None:
    hung = "error: no training step has ended for too long: a process of the job hangs"
    print(f"{hung}; run the same command again to continue", file=sys.stderr, flush=True)
    os._exit(EXIT_PROCESS_LOST)


def _end_incomplete() -> None:
    late = f"error: not all processes of the job have come within {JOIN_SECONDS} s"
    remedy = "see that each was started, and reaches the first one's address and port; run the command again"
    print(f"{late}; {remedy}", file=sys.stderr, flush=True)
    os._exit(EXIT_PROCESS_LOST)


def is_lost_process(error: BaseException | None) -> bool:
    """Whether an error stems from a collective, or a message to the first process, that failed in a job."""
    while jax.distributed.is_initialized() and error is not None:
        if isinstance(error, JaxRuntimeError | ValueError) and _FAILED_COLLECTIVE.match(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def end_job(status: int) -> None:
    """Ends this process of a job after an error; does nothing in a job of one process.

    JAX's shutdown would wait for processes that are gone. After a request to stop, or without an error, all
    processes come to it.
    """
    if status == 0 or not jax.distributed.is_initialized():
        return
    sys.stderr.flush()
    sys.stdout.flush()
    if status == EXIT_STOPPED:
        _started(_GRACE_SECONDS, os._exit, status)
        return
    time.sleep(5)  # JAX aborts the others once the first process is gone: let them end with their own message
    os._exit(status)
