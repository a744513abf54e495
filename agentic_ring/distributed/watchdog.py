"""Notices within a minute that another process of the job was killed, stopped or hangs, and ends this one.

Each process publishes a heartbeat and the training step that it is in, and reads the others'. JAX's own check
takes longer, ends a process by abort() with a C++ stack, and does not say which process was lost.
"""

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from jax.errors import JaxRuntimeError

from agentic_ring.distributed import coordination
from agentic_ring.errors import EXIT_PROCESS_LOST, EXIT_STOPPED, AgenticRingError

BEAT_SECONDS = 2.0
SILENCE_SECONDS = 35.0
"""A process without a heartbeat for this long is lost."""
HANG_SECONDS = float(os.environ.get("AGENTIC_RING_HANG_SECONDS", "900"))
"""A process hangs if others wait for it in a step for this long and ten times the longest step so far."""

_FOLDER = "agentic_ring/watchdog"
_GRACE_SECONDS = {0: float("inf"), EXIT_STOPPED: 60.0}  # for others to end as well; after an error:
_GRACE_AFTER_ERROR = 4 * BEAT_SECONDS


@dataclass(frozen=True)
class _State:
    """What a process says of itself."""

    beat: int = 0
    step: int | None = None
    """The training step whose batch is ready; None outside training."""
    entered: int = 0
    """Number of such steps so far. The program compiles in the first."""
    status: int | None = None
    """Its exit status, once it has one."""
    message: str = ""


@dataclass
class _Peer:
    """What is known of a process: its state, and when its heartbeat and its step last changed."""

    state: _State
    heard: float
    moved: float
    longest: float = 0.0

    def hear(self, state: _State, now: float) -> None:
        """Takes in what the process says now."""
        if state.beat != self.state.beat:
            self.heard = now
        if state.step != self.state.step:
            if self.state.entered > 1:
                self.longest = max(self.longest, now - self.moved)
            self.moved = now
        self.state = state


class Watchdog:
    """Watches the other processes from two threads, one of which waits for the coordination service.

    Args:
      process: number of this process.
      processes: number of all.
      closed: is set when the first process closes its connection to this one.
    """

    def __init__(self, process: int, processes: int, closed: threading.Event):
        now = time.monotonic()
        self._process = process
        self._own = _State()
        self._peers = {number: _Peer(_State(), now, now) for number in range(processes)}
        self._answered = now
        self._verdict: str | None = None
        self._closed = closed
        self._over = False
        self._leaving = threading.Event()
        self.reason = ""
        """Why this process ends, if it ends early; the others say so."""

    def start(self) -> None:
        """Starts both threads; the processes have joined."""
        for thread in (self._exchange, self._judge):
            threading.Thread(target=thread, daemon=True, name=f"watchdog{thread.__name__}").start()

    def enter_step(self, step: int | None) -> None:
        """This process has the batch of a step ready; None: it is outside training."""
        entered = self._own.entered + (step is not None)
        self._own = replace(self._own, step=step, entered=entered)

    def await_verdict(self) -> None:
        """Waits until a lost process would have been named, which ends this one."""
        time.sleep(SILENCE_SECONDS + 5 * BEAT_SECONDS)

    def leave(self, status: int) -> None:
        """Says that this process is done, and waits for the others; ends it unless all have ended well."""
        self._own = replace(self._own, step=None, status=status, message=self.reason)
        self._leaving.set()
        grace = _GRACE_SECONDS.get(status, _GRACE_AFTER_ERROR)
        started = time.monotonic()
        while time.monotonic() - started < grace:
            statuses = {peer.state.status for peer in self._peers.values()}
            if None not in statuses:
                break
            time.sleep(0.1)
        self._over = True
        if status or any(peer.state.status for peer in self._peers.values()):
            # JAX's shutdown would wait minutes for processes that are gone, and abort this one.
            time.sleep(2 * BEAT_SECONDS)
            _exit(status)

    def _exchange(self) -> None:
        """Publishes the own state and reads the others', again and again."""
        while not self._over:
            self._own = replace(self._own, beat=self._own.beat + 1)
            try:
                coordination.publish(f"{_FOLDER}/{self._process}", json.dumps(asdict(self._own)))
                states = coordination.published(_FOLDER)
            except (
                Exception
            ):  # whatever JAX raises: the service does not answer, which the other thread judges
                time.sleep(BEAT_SECONDS)
                continue
            now = time.monotonic()
            self._verdict = states.pop("verdict", None)
            for number, text in states.items():
                self._peers[int(number)].hear(_State(**json.loads(text)), now)
            self._answered = now
            if self._leaving.wait(BEAT_SECONDS):
                time.sleep(BEAT_SECONDS / 10)

    def _judge(self) -> None:
        """Ends this process when another one is lost."""
        last = time.monotonic()
        while not self._over:
            time.sleep(1)
            now = time.monotonic()
            if now - last > SILENCE_SECONDS / 4:  # this process was stopped itself: nothing is known now
                self._answered = now
                for peer in self._peers.values():
                    peer.heard = peer.moved = now
            last = now
            if self._own.status is None:
                self._follow_ended_peer()
            verdict = self._verdict or self._lost(now)
            if verdict is not None and not self._over and not self._own.status:
                self._end(verdict)

    def _follow_ended_peer(self) -> None:
        """Where another process has ended with an error, ends this one too, unless it does so itself."""
        for number, peer in self._peers.items():
            if peer.state.status:
                time.sleep(_GRACE_SECONDS.get(peer.state.status, _GRACE_AFTER_ERROR) / 2)
                if self._own.status is None:
                    ended = f"process {number} ended{self._where(peer.state.step)}"
                    print(f"error: {ended}: {peer.state.message}", file=sys.stderr)
                    _exit(peer.state.status)

    def _lost(self, now: float) -> str | None:
        """What to say of a lost process, or None."""
        where = self._where(self._own.step)
        if self._closed.is_set():
            return f"process 0 was lost{where}: its connection closed"
        if now - self._answered > SILENCE_SECONDS:
            return f"process 0 was lost{where}: no sign of life for {SILENCE_SECONDS:.0f} s"
        for number, peer in self._peers.items():
            if number != self._process and peer.state.status is None and now - peer.heard > SILENCE_SECONDS:
                return f"process {number} was lost{where}: no sign of life for {SILENCE_SECONDS:.0f} s"
        return self._hanging(now)

    def _hanging(self, now: float) -> str | None:
        """What to say of a process whose step does not move although the others wait for it, or None."""
        steps = [peer.state.step for peer in self._peers.values()]
        if None in steps or min(peer.state.entered for peer in self._peers.values()) < 3:
            return None
        limit = max(HANG_SECONDS, 10 * max(peer.longest for peer in self._peers.values()))
        newest = max(step for step in steps if step is not None)
        waited = now - max(peer.moved for peer in self._peers.values())
        behind = [number for number, peer in self._peers.items() if peer.state.step != newest]
        if behind and waited > limit:
            names = ", ".join(map(str, behind))
            return f"process {names} hangs{self._where(newest)}: the others wait for {waited:.0f} s"
        if waited > 2 * limit:  # all devices wait for each other, or all for the file system
            return f"no process has passed step {newest} for {waited:.0f} s"
        return None

    def _where(self, step: int | None) -> str:
        return " outside training" if step is None else f" at step {step}"

    def _end(self, verdict: str) -> None:
        """Tells the other processes, and ends this one."""
        print(f"error: {verdict}; run the same command again to continue", file=sys.stderr)
        if not self._closed.is_set():
            # The service may not answer.
            tell = threading.Thread(target=self._tell, args=(verdict,), daemon=True)
            tell.start()
            tell.join(BEAT_SECONDS)
            if self._process == 0:  # the service ends with this process
                time.sleep(3 * BEAT_SECONDS)
        _exit(EXIT_PROCESS_LOST)

    def _tell(self, verdict: str) -> None:
        try:
            coordination.publish(f"{_FOLDER}/verdict", verdict)
        except Exception:
            return  # they find out themselves


_watchdog: Watchdog | None = None


def start_watchdog(watchdog: Watchdog) -> None:
    """Watches the job that this process has joined, until it ends."""
    global _watchdog
    _watchdog = watchdog
    watchdog.start()


@contextmanager
def watched_steps() -> Iterator[Callable[[int], None]]:
    """Yields what a training loop calls with each step whose batch is ready.

    In a job of several processes, one that hangs in a step is then noticed.
    """
    if _watchdog is None:
        yield lambda step: None
        return
    yield _watchdog.enter_step
    _watchdog.enter_step(None)  # after an error it stays in its step, which is then named


@contextmanager
def kept_reason() -> Iterator[None]:
    """Keeps what an error of the block says, for the other processes of the job.

    One that stems from JAX, such as a checkpoint that failed with a collective, first waits for the watchdog
    to name a lost process.
    """
    try:
        yield
    except BaseException as error:
        if _watchdog is not None:
            _watchdog.reason = str(error) or type(error).__name__
            if isinstance(error, AgenticRingError) and _stems_from_jax(error):
                _watchdog.await_verdict()
        raise


def _stems_from_jax(error: BaseException | None) -> bool:
    """Whether the error, or one before it, is JAX's; of a failed collective it may be a ``ValueError``."""
    while error is not None:
        if isinstance(error, JaxRuntimeError) or re.match(r"[A-Z_]+: ", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def await_lost_process(error: BaseException) -> None:
    """Waits, after an unexpected error, until the watchdog names a lost process and ends this one.

    A collective fails before the process that is gone is known. If there is none, prints the traceback and
    ends all processes of the job. Returns only in a job of one process.
    """
    if _watchdog is not None and isinstance(error, Exception):
        _watchdog.await_verdict()
        traceback.print_exception(error)
        _watchdog.leave(1)


def leave_job(status: int) -> None:
    """Waits for the other processes of the job to end as well; does nothing in a job of one process.

    Ends this process with its exit status at once where some process has ended with an error.
    """
    if _watchdog is not None:
        _watchdog.leave(status)


def _exit(status: int) -> None:
    """Ends the process without the clean-up of libraries, which would wait for lost processes."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
