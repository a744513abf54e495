"""One writer per folder, whatever happened to those before."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentic_ring.errors import ConfigError, FolderInUseError
from agentic_ring.files.run_folder import enter_directory, only_writer


@dataclass(frozen=True)
class Settings:
    width: int


HOLD = """
import pathlib, sys
from agentic_ring.files.run_folder import only_writer
with only_writer(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path / "run" until its input is closed."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        if process.stdin:
            process.stdin.close()


def test_the_second_writer_is_told_who_the_first_is(holder, tmp_path):
    run = tmp_path / "run"
    (run / "a.1.partial").write_text("the holder's")
    message = rf"run is in use by process {holder.pid} on \S+ since 2\d\d\d-\S+ \S+ \(-c .*run\)"
    for resume in (True, False):
        with (
            pytest.raises(FolderInUseError, match=message),
            enter_directory(run, Settings(1), resume),
        ):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (run / "a.1.partial").exists()
    holder.stdin.close()
    holder.wait()
    with enter_directory(run, Settings(1), resume=True):
        assert not (run / "a.1.partial").exists()
    assert [path.name for path in run.iterdir()] == ["config.json"]


def test_a_killed_writer_stops_no_one(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / ".lock").exists()
    with only_writer(tmp_path / "run"):
        assert f'"process": {os.getpid()}' in (tmp_path / "run" / ".lock").read_text()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_patient_writer_says_whom_it_waits_for(holder, tmp_path, capsys, monkeypatch):
    def end_holder(_: float) -> None:
        holder.stdin.close()
        holder.wait()

    monkeypatch.setattr("time.sleep", end_holder)
    with only_writer(tmp_path / "run", wait=True):
        pass
    assert f"is in use by process {holder.pid}" in capsys.readouterr().err


def test_a_run_moved_aside_takes_no_lock_along(tmp_path):
    run = tmp_path / "run"
    with enter_directory(run, Settings(1), resume=True):
        assert (run / ".lock").exists()
    with (
        pytest.raises(ConfigError, match=r"other settings \(width\)"),
        enter_directory(run, Settings(2), True),
    ):
        pass
    with enter_directory(run, Settings(2), resume=False):
        pass
    contents = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert contents == ["run.1/config.json", "run/config.json"]


def test_an_unreadable_lock_file_still_locks(holder, tmp_path):
    (Path(tmp_path) / "run" / ".lock").write_text("?")
    with (
        pytest.raises(FolderInUseError, match="a process that has just started"),
        only_writer(tmp_path / "run"),
    ):
        pass
