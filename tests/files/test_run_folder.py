"""A run's folder: what may change when it continues, and one writer at a time."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from agentic_ring.errors import ConfigError, FolderInUseError
from agentic_ring.files.run_folder import earlier_config, enter_directory, only_writer, read_config
from agentic_ring.mesh import MeshShape
from agentic_ring.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Config:
    seed: int
    mesh: MeshShape
    optimizer: OptimizerConfig


FIRST = Config(0, MeshShape(ring=8), OptimizerConfig(accumulation=4))
OTHER = replace(FIRST, seed=3)


def test_a_run_continues_on_other_hardware_and_records_it(tmp_path, capsys):
    with enter_directory(tmp_path / "run", FIRST, resume=True):
        pass
    other = replace(FIRST, mesh=MeshShape(data=2, ring=2), optimizer=OptimizerConfig(accumulation=2))
    with enter_directory(tmp_path / "run", other, resume=True):
        pass
    assert "continues on other hardware" in capsys.readouterr().err
    assert read_config(tmp_path / "run", Config) == other
    assert earlier_config(tmp_path / "run", Config, resume=True) == other
    assert earlier_config(tmp_path / "run", Config, resume=False) is None
    assert earlier_config(tmp_path / "none", Config, resume=True) is None


def test_what_may_change_is_said_where_something_else_did(tmp_path):
    with enter_directory(tmp_path / "run", FIRST, resume=True):
        pass
    changed = replace(OTHER, mesh=MeshShape(ring=4))
    message = (
        r"other settings \(seed\): seed is 0 there, 3 here\. A run may continue on other devices, with "
        r"another ring or another number of processes; all other settings stay"
    )
    with (
        pytest.raises(ConfigError, match=message),
        enter_directory(tmp_path / "run", changed, resume=True),
    ):
        pass
    assert read_config(tmp_path / "run", Config) == FIRST


@dataclass(frozen=True)
class Stages:
    stages: tuple[Config, ...]


def test_stages_may_change_hardware_too(tmp_path):
    three = Stages((FIRST, FIRST, FIRST))
    with enter_directory(tmp_path / "run", three, resume=True):
        pass
    moved = replace(FIRST, optimizer=OptimizerConfig(accumulation=1))
    with enter_directory(tmp_path / "run", Stages((FIRST, moved, moved)), resume=True):
        pass
    for stages, field in (((FIRST, replace(moved, seed=3), moved), r"stages\.1\.seed"), ((FIRST,), "stages")):
        with (
            pytest.raises(ConfigError, match=rf"other settings \({field}\)"),
            enter_directory(tmp_path / "run", Stages(stages), resume=True),
        ):
            pass
    assert read_config(tmp_path / "run", Stages) == Stages((FIRST, moved, moved))


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
            enter_directory(run, FIRST, resume),
        ):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (run / "a.1.partial").exists()
    holder.stdin.close()
    holder.wait()
    with enter_directory(run, FIRST, resume=True):
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
    with enter_directory(run, FIRST, resume=True):
        assert (run / ".lock").exists()
    with (
        pytest.raises(ConfigError, match=r"other settings \(seed\)"),
        enter_directory(run, OTHER, True),
    ):
        pass
    with enter_directory(run, OTHER, resume=False):
        pass
    contents = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert contents == ["run.1/config.json", "run/config.json"]


def test_an_unreadable_lock_file_still_locks(holder, tmp_path):
    (tmp_path / "run" / ".lock").write_text("?")
    with (
        pytest.raises(FolderInUseError, match="a process that has just started"),
        only_writer(tmp_path / "run"),
    ):
        pass
