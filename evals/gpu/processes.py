"""Measurement of rows in processes of their own.

A process holds the GPU's memory, and an illegal access or a failed check ends it or leaves it unusable. Rows
of one function share a process, since starting JAX takes seconds; after a row that failed a new one starts.
"""

import gc
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any

import jax

from agentic_ring.errors import AgenticRingError
from agentic_ring.provenance import provenance
from evals.compile.hardware import GPU_MEMORY_FRACTION
from evals.gpu.records import Outcome
from evals.gpu.rows import Row
from evals.speed.attention_benchmark import UnsupportedError

OURS = ("agentic_ring", "evals", "experiments")
START_SECONDS = 120.0
"""Longest time in which JAX finds its devices."""
_SPAWN = multiprocessing.get_context("spawn")


class NoDeviceError(AgenticRingError, RuntimeError):
    """JAX does not start on this machine."""


class _Child:
    """A process that calls ``target`` with its arguments and a connection to this one."""

    def __init__(self, target: Any, *arguments: Any):
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_FRACTION))
        self._receiver, sender = _SPAWN.Pipe(duplex=False)
        self._process = _SPAWN.Process(target=target, args=(*arguments, sender), daemon=True)
        self._process.start()
        sender.close()

    def receive(self, limit_seconds: float) -> Any:
        """Returns what it sends next.

        Raises:
          TimeoutError: it sent nothing within the time.
          EOFError: it has ended.
        """
        if not self._receiver.poll(limit_seconds):
            raise TimeoutError
        return self._receiver.recv()

    def ending(self) -> str:
        """Waits until it has ended, after the last that it sends, and says how."""
        self._process.join(10)
        code = self._process.exitcode or 0
        with suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
        return f"exit status {code}"

    def stop(self) -> None:
        """Ends it and the processes that it started, if it has not ended."""
        group = self._process.pid
        assert group is not None, "it was started"
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.exitcode is None:
                # It leads a group once it runs; before, it has started nothing.
                with suppress(ProcessLookupError):
                    os.killpg(group, number)
                self._process.join(10)
        self._process.kill()
        self._process.join()
        self._receiver.close()


def find_provenance() -> dict[str, Any]:
    """Returns ``provenance``, with the devices as a process of its own sees them.

    Raises:
      NoDeviceError: JAX does not start.
    """
    child = _Child(_send_provenance)
    try:
        hardware = child.receive(START_SECONDS)
    except (EOFError, TimeoutError) as error:
        raise NoDeviceError(
            "JAX found no devices, see the messages above; check the driver and the installed jax plugin, or "
            "set JAX_PLATFORMS=cpu and give --tiny"
        ) from error
    finally:
        child.stop()
    return hardware


def measure_rows(rows: Sequence[Row]) -> Iterator[tuple[Row, Outcome]]:
    """Measures rows one after another; yields each with its outcome as soon as it is known."""
    for _, group in groupby(rows, key=lambda row: row.function):
        remaining = list(group)
        while remaining:
            child = _Child(_send_outcomes, remaining)
            try:
                for row in tuple(remaining):
                    outcome = _received(child, row)
                    remaining.remove(row)
                    yield row, outcome
                    if outcome.status == "failed":
                        break
                child.ending()
            finally:
                child.stop()


def _received(child: _Child, row: Row) -> Outcome:
    try:
        return child.receive(START_SECONDS + row.limit_seconds)
    except TimeoutError:
        seconds = START_SECONDS + row.limit_seconds
        return Outcome("failed", message=f"took longer than {seconds:.0f} s", seconds=seconds)
    except EOFError:
        return Outcome("failed", message=f"its process ended with {child.ending()}")


def _send_provenance(sender: Connection) -> None:
    os.setpgrp()
    sender.send(provenance())


def _send_outcomes(rows: Sequence[Row], sender: Connection) -> None:
    os.setpgrp()  # whoever started it ends it, also after Ctrl-C, with the processes that it starts
    for row in rows:
        outcome = measure(row)
        sender.send(outcome)
        if outcome.status == "failed":
            return
        # The next row may need all memory.
        jax.clear_caches()
        gc.collect()


def measure(row: Row) -> Outcome:
    """Measures a row in this process; an error is an outcome."""
    started = time.perf_counter()

    def outcome(status: Any, **result: Any) -> Outcome:
        return Outcome(status, seconds=time.perf_counter() - started, **result)

    try:
        module, _, function = row.function.partition(":")
        settings: Mapping[str, Any] = row.settings
        return outcome("done", found=getattr(importlib.import_module(module), function)(**settings))
    except UnsupportedError as reason:
        return outcome("skipped", message=str(reason))
    except Exception as error:
        package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package and package not in OURS:
            return outcome("skipped", message=f"needs the package {package}, which is not installed")
        traceback.print_exc()
        first = str(error).partition("\n")[0]
        return outcome("failed", message=f"{type(error).__name__}: {first}")
