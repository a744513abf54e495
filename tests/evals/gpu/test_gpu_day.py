"""A day with a GPU: what is measured again, what a row becomes, the table, and how few packages it needs."""

import importlib
import inspect
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agentic_ring.attention.kernels import registry
from agentic_ring.attention.kernels.interface import Saved
from agentic_ring.attention.kernels.xla import XlaKernel
from agentic_ring.device_memory import DoesNotFitError
from agentic_ring.errors import ArgumentError, DataError, UnknownNameError
from evals import gpu_day as script
from evals.compile.llama_step import LlamaStep
from evals.gpu.exactness import exactness
from evals.gpu.processes import measure, measure_rows
from evals.gpu.records import Outcome, Record, read_records, record_table
from evals.gpu.rows import Found, Goal, Row, all_rows, choose_rows
from evals.gpu.train_step import largest_that_fits
from evals.utilisation.running_step import RunningStep
from tests.commands import run_python

ROOT = Path(__file__).parents[3]
ORIGIN = {"commit": "abc", "hardware": {"device_kind": "cpu"}, "versions": {}, "command": "python"}
HERE = "tests.evals.gpu.test_gpu_day"


def count(path: str, value: float) -> Found:
    """A row that leaves a line behind each time it is measured."""
    with Path(path).open("a") as file:
        file.write("measured\n")
    return Found(value, "TFLOP/s", value - 1, value + 1, {"peer_ratio": 0.9})


def fail_without(path: str) -> Found:
    assert Path(path).exists(), "the file is not there\nand a second line"
    return Found(1.0, "x", 1.0, 1.0)


def lack_a_package() -> Found:
    importlib.import_module("no_such_package.inner")
    raise AssertionError


def crash() -> Found:
    os.abort()


def sleep() -> Found:
    time.sleep(600)
    raise AssertionError


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(script, "find_provenance", lambda: ORIGIN)
    monkeypatch.setattr(script, "measure_rows", lambda rows: ((row, measure(row)) for row in rows))


@pytest.mark.usefixtures("in_this_process")
def test_rows_that_are_done_are_not_measured_again(tmp_path, capsys):
    measured, needed = tmp_path / "measured", tmp_path / "needed"
    rows = [
        Row("speed/a", f"{HERE}:count", {"path": str(measured), "value": 5.0}, Goal(4.0, at_least=True)),
        Row("speed/b", f"{HERE}:fail_without", {"path": str(needed)}),
        Row("speed/c", f"{HERE}:lack_a_package", {}),
    ]
    output = tmp_path / "day"
    assert script.gpu_day(rows, output) == 1
    records = {record.row: record for record in read_records(output / "rows.json")}
    assert [record.status for record in records.values()] == ["done", "failed", "skipped"]
    assert records["speed/b"].message == "AssertionError: the file is not there"
    assert records["speed/c"].message == "needs the package no_such_package, which is not installed"
    assert records["speed/a"].met
    assert records["speed/a"].origin == ORIGIN
    table = (output / "table.md").read_text()
    assert "| speed/a | >= 4 | 5 TFLOP/s | 4 to 6 | 0.90 | yes |" in table
    assert "speed/b failed: AssertionError: the file is not there" in table

    needed.touch()
    assert script.gpu_day(rows, output) == 0
    assert measured.read_text() == "measured\n"
    assert "1/2 speed/b: done" in capsys.readouterr().out

    other = replace(rows[0], settings={"path": str(measured), "value": 3.0})
    assert script.gpu_day([other], output) == 1, "a goal that is not met"
    assert measured.read_text() == "measured\n" * 2
    assert len(read_records(output / "rows.json")) == 3


@pytest.mark.usefixtures("in_this_process")
def test_rows_of_other_hardware_and_damaged_files_are_refused(tmp_path, monkeypatch):
    row = Row("speed/a", f"{HERE}:count", {"path": str(tmp_path / "m"), "value": 5.0})
    script.gpu_day([row], tmp_path / "day")
    h100 = {**ORIGIN, "hardware": {"device_kind": "NVIDIA H100 80GB HBM3"}}
    monkeypatch.setattr(script, "find_provenance", lambda: h100)
    with pytest.raises(ArgumentError, match=r"holds rows of cpu, and this machine has NVIDIA H100.*--output"):
        script.gpu_day([replace(row, name="speed/b")], tmp_path / "day")
    file = tmp_path / "day" / "rows.json"
    whole = json.loads(file.read_text())
    for damage in ([{**whole[0], "value": "fast"}], [{**whole[0], "value": None}], [{}], {}, [1], whole[0]):
        file.write_text(json.dumps(damage))
        if damage == {}:
            continue  # no rows
        with pytest.raises(DataError, match="delete it"):
            script.gpu_day([row], tmp_path / "day")
    file.write_text(json.dumps(whole)[:50])
    with pytest.raises(DataError, match="delete it"):
        script.gpu_day([row], tmp_path / "day")


def test_goals_are_of_their_hardware_and_nan_meets_none():
    row = Row("hop/a", f"{HERE}:count", {}, Goal(600, at_least=True, hardware=("h100",)))

    def met(value, hardware, chosen=row):
        found = Found(value, "TFLOP/s", value, value)
        return Record.of(chosen, Outcome("done", found), hardware, ORIGIN).met

    assert met(600.0, "h100") is True
    assert met(599.0, "h100") is False
    assert met(599.0, None) is None
    nothing = replace(row, goal=Goal(1.0, at_least=False))
    assert met(float("nan"), None, nothing) is False
    failed = Record.of(row, Outcome("failed", message="took long"), "h100", ORIGIN)
    assert failed.met is None
    assert record_table([failed]).notes[0] == "hop/a failed: took long"


@pytest.mark.parametrize("tiny", [False, True])
def test_every_row_has_a_name_of_its_own_and_calls_its_function_rightly(tiny):
    rows = all_rows(tiny)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        module, name = row.function.split(":")
        inspect.signature(getattr(importlib.import_module(module), name)).bind(**row.settings)
        assert json.loads(json.dumps(row.settings)) == row.settings, "what a file gives back is equal"
    assert [row.group for row in choose_rows(rows, ["decode", "main_job"])][-1] == "main_job"
    with pytest.raises(UnknownNameError, match=r"'hops'.*exactness, hop, ring_of_1, train_step"):
        choose_rows(rows, ["hops"])


def test_goals_of_the_full_rows():
    goals = {row.name: str(row.goal) for row in all_rows() if row.goal and row.group != "exactness"}
    assert goals["hop/16384/16x4x128/causal/forward"] == ">= 600"
    assert goals["hop/16384/16x16x128/causal/forward+backward"] == ">= 450"
    assert goals["ring_of_1/131072/forward"] == "<= 1.03"
    assert goals["train_step/8B/131072"] == ">= 50"
    assert goals["decode/524288/bfloat16"] == "<= 1.3"
    tokens = {row.settings["tokens"] for row in all_rows() if row.group == "hop"}
    assert tokens == {4096, 8192, 16384, 32768, 65536, 131072}


def test_layers_are_left_out_until_the_step_fits(monkeypatch):
    def updates(running):
        layers = running.step.config.transformer.layers
        tried.append(layers)
        if layers > 9:
            raise DoesNotFitError("too large")
        return lambda: layers

    tried: list[int] = []
    monkeypatch.setattr(RunningStep, "updates", updates)
    monkeypatch.setattr("evals.gpu.train_step.memory_limit", lambda *_: 60e9)
    step = LlamaStep("8B", "blockwise", 16_384, (None,), "bfloat16", remat="attention")
    running, _ = largest_that_fits(step, most_layers=32)
    assert tried[0] < 32, "the formula knows that 32 layers do not fit 60 GB"
    assert tried == sorted(tried, reverse=True)
    assert 6 < running.step.config.transformer.layers <= 9
    running, _ = largest_that_fits(step, most_layers=2)
    assert running.step.config.transformer.layers == 2


ON_A_BARE_MACHINE = """
import importlib, importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    packages = set(sys.argv[1].split(","))
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import evals.gpu_day
from evals.gpu.processes import measure
from evals.gpu.rows import all_rows

rows = {row.group: row for row in all_rows(tiny=True)}
for module in ("exactness", "kernel_speed", "decode", "main_job"):
    importlib.import_module(f"evals.gpu.{module}")
found = [measure(rows["train_step"]).message, measure(rows["main_job"]).message]
Absent.packages -= {"flax", "optax", "rich"}
importlib.import_module("evals.gpu.train_step")
importlib.import_module("experiments.exorl_speed")
print(json.dumps(found))
"""

OTHER_PACKAGES = (
    "flax,optax,rich,tyro,pydantic,orbax,grain,h5py,safetensors,tokenizers,huggingface_hub,jinja2,dm_control,"
    "mujoco,gymnasium,shimmy,wandb,matplotlib,httpx,markdownify,bs4,wonderwords,pandas"
)


def test_a_machine_with_only_jax_measures_attention_and_with_flax_and_optax_everything():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = run_python("-c", ON_A_BARE_MACHINE, OTHER_PACKAGES, cwd=ROOT, env=environment)
    assert ended.returncode == 0, ended.stderr
    message = "needs the package flax, which is not installed"
    assert json.loads(ended.stdout) == [message, message]


@pytest.mark.slow
def test_a_crash_and_a_row_without_end_are_recorded_and_the_others_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("evals.gpu.processes.START_SECONDS", 60.0)
    measured = {"path": str(tmp_path / "measured"), "value": 1.0}
    rows = [
        Row("a", f"{HERE}:crash", {}),
        Row("b", f"{HERE}:sleep", {}, limit_seconds=-30.0),
        *(Row(name, f"{HERE}:count", measured) for name in "cd"),
    ]
    outcomes = {row.name: outcome for row, outcome in measure_rows(rows)}
    assert outcomes["a"].message == "its process ended with signal SIGABRT"
    assert outcomes["b"].message == "took longer than 30 s"
    assert [outcomes[name].status for name in "cd"] == ["done", "done"]


@pytest.mark.slow
def test_every_row_runs_on_a_cpu(tmp_path):
    command = ("evals/gpu_day.py", "--tiny", "--output", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AGENTIC_RING_DATA": str(tmp_path / "none")}
    ended = run_python(*command, cwd=ROOT, env=environment, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records = read_records(tmp_path / "rows.json")
    assert [record.row for record in records] == [row.name for row in all_rows(tiny=True)]
    for record in records:
        elsewhere = record.row.startswith(("exactness/cudnn", "exactness/splash"))
        assert record.status == ("skipped" if elsewhere else "done"), record
        if record.row.startswith("exactness") and not elsewhere:
            assert record.met
    assert records[-1].details["data"].startswith("synthetic")
    written = (tmp_path / "rows.json").stat().st_mtime_ns
    assert run_python(*command, "--rows", "hop", "decode", cwd=ROOT, env=environment).returncode == 0
    assert (tmp_path / "rows.json").stat().st_mtime_ns == written


class OwnOutputKernel(XlaKernel):
    """A plausible wrong backward: the output of this hop's keys in the place of the global one."""

    def backward(self, tile, saved):
        own = Saved.of(self.forward(tile).output, saved.logsumexp, saved.d_output)
        return super().backward(tile, own)


@pytest.mark.slow
def test_a_wrong_gradient_of_a_hop_is_beyond_the_tolerance(monkeypatch):
    sizes = {"dtype": "float32", "causal": True, "tokens": 64, "head_dims": [8], "kv_heads": [2]}
    right = exactness("xla", **sizes)
    monkeypatch.setitem(registry._KERNELS, "own output", OwnOutputKernel)
    wrong = exactness("own output", **sizes)
    assert right.value < 1 < wrong.value
    assert wrong.details["output"] == right.details["output"]
