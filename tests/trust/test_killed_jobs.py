"""Jobs of every kind are killed or told to stop at random moments, and started again.

They end as if nothing had happened. AGENTIC_RING_TRUST_KILLS sets the number of kills of each job.
"""

import json
import multiprocessing
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def begin(name: str, inputs: Path, run: Path) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trust.jobs"])
    process = context.Process(target=jobs.start, args=(name, inputs, run, run.with_suffix(".log")))
    process.start()
    return process


def kill(process: Any) -> bool:
    """Kills the process alone, not those that it started; returns whether it was still running."""
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def stop(process: Any, number: signal.Signals) -> bool:
    """Sends a signal once the command handles it; returns whether the process stopped because of it.

    It must end within a minute, with the status that says so, or well if it was at its end.
    """
    with suppress(FileNotFoundError, ProcessLookupError):  # no /proc, or it has just ended
        caught = 0
        while process.is_alive() and not caught >> (number - 1) & 1:
            time.sleep(0.01)
            status = Path(f"/proc/{process.pid}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    if process.is_alive():
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
    process.join(60)
    status = process.exitcode
    if status is None:
        kill(process)
    assert status in (0, EXIT_STOPPED), f"exit status {status} after {number.name}"
    return status == EXIT_STOPPED


def assert_nothing_runs_on(group: int) -> None:
    """The processes of its group, which a killed job had started, end by themselves."""
    deadline = time.monotonic() + 30
    alive = [group]
    while alive:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)
        alive = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process.cmdline())


def finish(name: str, inputs: Path, run: Path) -> float:
    """Runs a job to its end, which must be a good one; returns the seconds it took."""
    started = time.monotonic()
    process = begin(name, inputs, run)
    process.join(300)
    status = process.exitcode
    if status is None:
        kill(process)
    assert status == 0, run.with_suffix(".log").read_text()
    assert_nothing_runs_on(process.pid)
    return time.monotonic() - started


def fingerprint(run: Path) -> dict[str, object]:
    """What a finished run holds, by file, without the times that each session measures anew.

    A file that should have been removed, such as a partial one, is an additional name.
    """
    found: dict[str, object] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(run))
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
            with h5py.File(path) as file:
                nodes: list[tuple[str, Any]] = []
                file.visititems(lambda key, node, nodes=nodes: nodes.append((key, node)))
                found[name] = {key: contents(node) for key, node in nodes if isinstance(node, h5py.Dataset)}
        elif path.suffix == ".npz":
            found[name] = {key: contents(array) for key, array in np.load(path).items()}
        else:
            found[name] = path.read_bytes()
    return found


def contents(array: Any) -> tuple[Any, ...]:
    array = np.asarray(array)
    return str(array.dtype), array.shape, array.tolist() if array.dtype == object else array.tobytes()


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
            process = begin(name, inputs, run)
            # What is left after an interruption takes less time.
            process.join(random.uniform(0, seconds / interruptions))
            if process.exitcode is not None:
                break
            if random.random() < SHARE_OF_STOPS:
                stops += stop(process, SIGNALS[random.integers(len(SIGNALS))])
            else:
                kills += kill(process)
            assert_nothing_runs_on(process.pid)
        finish(name, inputs, run)
        assert "Traceback" not in run.with_suffix(".log").read_text()
        assert fingerprint(run) == expected
        shutil.rmtree(run.parent)
        runs += 1
    record_property("trust", f"| {name} | {kills} | {stops} | {runs} |")
