"""A run's folder: what may change when it continues, and one writer at a time."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from agentic_ring.errors import ConfigError, FolderInUseError
from agentic_ring.files.run_folder import enter_directory, only_writer, read_config
from agentic_ring.mesh import MeshShape
from agentic_ring.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Config:
    seed: int
    mesh: MeshShape
    optimizer: OptimizerConfig


FIRST = Config(0, MeshShape(ring=8), OptimizerConfig(accumulation=4))
OTHER = replace(FIRST, seed=3)


def enter(run: Path, config: Any, resume: bool = True) -> None:
    with enter_directory(run, config, resume):
        assert (run / ".lock").exists()


def test_a_run_continues_on_other_hardware_and_records_it(tmp_path, capsys):
    run = tmp_path / "run"
    enter(run, FIRST)
    other = replace(FIRST, mesh=MeshShape(data=2, ring=2), optimizer=OptimizerConfig(accumulation=2))
    enter(run, other)
    assert "continues on other hardware" in capsys.readouterr().err
    assert read_config(run, Config) == other
    with pytest.raises(ConfigError, match=r"other settings \(seed\): seed is 0 there, 3 here"):
        enter(run, replace(OTHER, mesh=MeshShape(ring=4)))
    assert read_config(run, Config) == other


@dataclass(frozen=True)
class Stages:
    stages: tuple[Config, ...]


def test_stages_may_change_hardware_too(tmp_path):
    moved = replace(FIRST, optimizer=OptimizerConfig(accumulation=1))
    for stages in ((FIRST, FIRST, FIRST), (FIRST, moved, moved)):
        enter(tmp_path / "run", Stages(stages))
    for stages, field in (((FIRST, replace(moved, seed=3), moved), r"stages\.1\.seed"), ((FIRST,), "stages")):
        with pytest.raises(ConfigError, match=rf"other settings \({field}\)"):
            enter(tmp_path / "run", Stages(stages))
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
        process.kill()


def test_the_second_writer_is_told_who_the_first_is(holder, tmp_path):
    run = tmp_path / "run"
    (run / "a.1.partial").write_text("the holder's")
    message = rf"run is in use by process {holder.pid} on \S+ since 2\d\d\d-\S+ \S+ \(-c .*run\)"
    for resume in (True, False):
        with pytest.raises(FolderInUseError, match=message):
            enter(run, FIRST, resume)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (run / "a.1.partial").exists()
    (run / ".lock").write_text("?")
    with pytest.raises(FolderInUseError, match="a process that has just started"):
        enter(run, FIRST)
    holder.stdin.close()
    holder.wait()
    with enter_directory(run, FIRST, resume=True):
        assert not (run / "a.1.partial").exists()
    assert [path.name for path in run.iterdir()] == ["config.json"]


def test_a_patient_writer_says_whom_it_waits_for_and_a_killed_one_stops_no_one(
    holder, tmp_path, capsys, monkeypatch
):
    def kill_holder(_: float) -> None:
        holder.kill()
        holder.wait()

    run = tmp_path / "run"
    monkeypatch.setattr("time.sleep", kill_holder)
    with only_writer(run, wait=True):
        assert f'"process": {os.getpid()}' in (run / ".lock").read_text()
    assert f"is in use by process {holder.pid}" in capsys.readouterr().err
    assert list(run.iterdir()) == []


def test_a_run_moved_aside_takes_no_lock_along(tmp_path):
    enter(tmp_path / "run", FIRST)
    with pytest.raises(ConfigError, match=r"other settings \(seed\)"):
        enter(tmp_path / "run", OTHER)
    enter(tmp_path / "run", OTHER, resume=False)
    contents = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert contents == ["run.1/config.json", "run/config.json"]
