"""Jobs of every kind are killed or told to stop at random moments, and started again.

They end as if nothing had happened. AGENTIC_RING_TRUST_KILLS sets the number of kills of each job.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest

from agentic_ring.errors import EXIT_STOPPED
from agentic_ring.stopping import SIGNALS
from tests.trust import jobs
from tests.trust.daily_seed import daily_seed

KILLS = int(os.environ.get("AGENTIC_RING_TRUST_KILLS", "2"))
INTERRUPTIONS_OF_A_RUN = 4
"""A run is killed or stopped at most this often before it may end."""
SHARE_OF_STOPS = 0.25
"""Share of the interruptions that are signals to stop instead of kills."""
TIME_UNITS = {"s", "tokens/s"}
"""Units of figures that each session measures anew."""
TIME_COLUMNS = {"tokens_per_second", "seconds", "reading_seconds", "digest"}
"""Columns of logs, likewise, and the digest of the whole row."""
UNCOMPARED = {"stages.json", "log.txt", ".png", ".html", ".md", ".csv", ".txt"}
"""Names and suffixes of files of times, and of pictures and tables of what other files hold."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    jobs.write_inputs(folder)
    return folder


@dataclass(frozen=True)
class Attempt:
    """One process of a job."""

    process: multiprocessing.process.BaseProcess

    def wait(self, seconds: float) -> int | None:
        """The exit status, or None if the process is still running after so many seconds."""
        self.process.join(seconds)
        return self.process.exitcode

    def kill(self) -> bool:
        """Kills the process alone, not those that it started; returns whether it was still running."""
        self.process.kill()
        self.process.join()
        return self.process.exitcode == -signal.SIGKILL

    def stop(self, number: signal.Signals) -> bool:
        """Sends a signal once the command handles it; returns whether the process stopped because of it.

        It must end within a minute, with the status that says so, or well if it was at its end.
        """
        assert self.process.pid is not None
        while not catches(self.process.pid, number) and self.process.is_alive():
            time.sleep(0.01)
        if self.process.is_alive():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.process.pid, number)
        status = self.wait(60)
        if status is None:
            self.kill()
        assert status in (0, EXIT_STOPPED), f"exit status {status} after {number.name}"
        return status == EXIT_STOPPED

    def assert_nothing_runs_on(self) -> None:
        """Processes that a killed job had started end by themselves."""
        deadline = time.monotonic() + 30
        while group := list(members(self.process.pid)):
            assert time.monotonic() < deadline, f"still running: {[each.cmdline() for each in group]}"
            time.sleep(0.05)


def catches(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal (Linux; elsewhere it is taken for granted)."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return True
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def members(group: int | None) -> Iterator[psutil.Process]:
    """The living processes of a process group."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def begin(name: str, inputs: Path, run: Path) -> Attempt:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trust.jobs"])
    process = context.Process(target=jobs.start, args=(name, inputs, run, run.with_suffix(".log")))
    process.start()
    return Attempt(process)


def finish(name: str, inputs: Path, run: Path) -> float:
    """Runs a job to its end, which must be a good one; returns the seconds it took."""
    started = time.monotonic()
    attempt = begin(name, inputs, run)
    status = attempt.wait(300)
    if status is None:
        attempt.kill()
    assert status == 0, run.with_suffix(".log").read_text()
    attempt.assert_nothing_runs_on()
    return time.monotonic() - started


def fingerprint(run: Path) -> dict[str, object]:
    """What a finished run holds, by file, without the times that each session measures anew.

    A file that should have been removed, such as a partial one, is an additional name.
    """
    found: dict[str, object] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.is_dir():
            continue
        if "checkpoints" in path.parts:  # their bytes hold times; all other files follow from them
            checkpoints = Path(*path.parts[: path.parts.index("checkpoints") + 1])
            found[str(checkpoints.relative_to(run))] = sorted(each.name for each in checkpoints.iterdir())
        elif {path.name, path.suffix} & UNCOMPARED:
            found[name] = "present"
        elif path.name == "results.json":
            figures = json.loads(path.read_text())["figures"]
            found[name] = [figure for figure in figures if figure["unit"] not in TIME_UNITS]
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: row[key] for key in row.keys() - TIME_COLUMNS} for row in rows]
        elif path.suffix == ".h5":
            found[name] = datasets(path)
        elif path.suffix == ".npz":
            found[name] = {key: digest(array) for key, array in np.load(path).items()}
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def datasets(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}

    def add(name: str, node: object) -> None:
        if isinstance(node, h5py.Dataset):
            found[name] = digest(node[()])

    with h5py.File(path) as file:
        file.visititems(add)
    return found


def digest(array) -> str:
    array = np.asarray(array)
    contents = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    return f"{array.dtype} {array.shape} {hashlib.sha256(contents).hexdigest()}"


def prepared(name: str, inputs: Path, folder: Path) -> Path:
    """A new folder of a run, in a folder of its own, with copies of the inputs that the job changes."""
    run = folder / "run"
    run.mkdir(parents=True)
    for path in jobs.JOBS[name].inputs:
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (inputs / path).is_dir() else shutil.copy2
        copy(inputs / path, run / path)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", jobs.JOBS)
def test_a_killed_job_ends_as_one_that_was_not(name, inputs, tmp_path, record_property):
    random = np.random.default_rng([daily_seed(), *name.encode()])
    whole = prepared(name, inputs, tmp_path / "whole")
    seconds = finish(name, inputs, whole)
    expected = fingerprint(whole)
    kills = stops = runs = 0
    while kills < KILLS:
        run = prepared(name, inputs, tmp_path / f"killed{runs}")
        interruptions = 0
        while kills < KILLS and interruptions < INTERRUPTIONS_OF_A_RUN:
            interruptions += 1
            attempt = begin(name, inputs, run)
            # What is left after an interruption takes less time.
            if attempt.wait(random.uniform(0, seconds / interruptions)) is not None:
                break
            if random.random() < SHARE_OF_STOPS:
                stops += attempt.stop(SIGNALS[random.integers(len(SIGNALS))])
            else:
                kills += attempt.kill()
            attempt.assert_nothing_runs_on()
        finish(name, inputs, run)
        assert "Traceback" not in run.with_suffix(".log").read_text()
        assert fingerprint(run) == expected
        shutil.rmtree(run.parent)
        runs += 1
    record_property("trust", f"| {name} | {kills} | {stops} | {runs} |")
