"""A run's folder: what may change when it continues, and what may not."""

from dataclasses import dataclass, replace

import pytest

from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import earlier_config, enter_directory, read_config
from agentic_ring.mesh import MeshShape
from agentic_ring.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Config:
    seed: int
    mesh: MeshShape
    optimizer: OptimizerConfig


FIRST = Config(0, MeshShape(ring=8), OptimizerConfig(accumulation=4))


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
    changed = replace(FIRST, seed=3, mesh=MeshShape(ring=4))
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
