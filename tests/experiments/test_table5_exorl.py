"""Table 5 from flags to files, on real cartpole episodes, with learners that train in seconds."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest

from agentic_ring.errors import ConfigError
from agentic_ring.results.results_file import Figure, Results
from agentic_ring.results.rows import read_rows
from agentic_ring.training.forward_backward import ForwardBackwardConfig
from evals.compile.llama_step import Method
from evals.compile.machines import CompilerMissingError
from evals.compile.maximum_context import Finding
from experiments import paper, table5_exorl
from experiments.exorl import pipeline
from experiments.table5 import domain_methods, methods, presets
from experiments.table5.cells import TableCell, chain_program, memory_cells
from experiments.table5.methods import METHODS
from experiments.table5.presets import TABLE_PRESETS
from experiments.table5.returns_table import ReturnsTable, write_table
from tests.experiments.conftest import TINY, TINY_TOLD, has_compiler

DOMAIN = ("cartpole", 50)
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
TASK = "cartpole_swingup"
LAST = "return/last_trial"


@pytest.fixture
def tiny_demo(monkeypatch) -> None:
    """The demo preset with models, lengths and rollouts for tests."""
    demo = TABLE_PRESETS["demo"]
    windows = {"steps": 4, "batch_size": 4, "checkpoint_every": 2}
    learner = replace(demo.values.learner, hidden=8, batch=8)
    repeat = {DOMAIN[0]: DOMAIN[1]}
    tiny = replace(
        demo,
        chains=replace(demo.chains, **TINY, updates=2, checkpoint_every=1, action_repeat=repeat),
        cloning=replace(demo.cloning, **windows),
        decision=replace(demo.decision, **windows),
        values=replace(demo.values, learner=learner, updates=4, updates_per_call=2, checkpoint_every=2),
        told=replace(demo.told, **TINY_TOLD, updates=2, action_repeat=repeat),
        encoding=replace(
            demo.encoding, updates=4, encoding_updates=2, checkpoint_every=2, hidden=8, functions=2
        ),
        forward_backward=ForwardBackwardConfig(4, 2, 2, latent=4, hidden=8, batch=4, pairs=8),
        seeds=1,
    )
    monkeypatch.setitem(presets.TABLE_PRESETS, "demo", tiny)
    devices = methods.Agentic.devices
    monkeypatch.setattr(methods.Agentic, "devices", lambda self: devices(self)[:2])
    two_environments = partial(methods.EvaluationConfig, environments=2)
    for module in (methods, domain_methods, pipeline):
        monkeypatch.setattr(module, "EvaluationConfig", two_environments)


@pytest.mark.slow
def test_every_method_fills_its_cell_and_a_second_run_fills_none(
    data, tiny_demo, cells_run, tmp_path, capsys
):
    def run(*names: str, **flags) -> str:
        flags = {"data": data, "output": tmp_path, "hardware": "8xH100", "methods": names, **flags}
        table5_exorl.main(tasks=(TASK,), **flags)
        return capsys.readouterr().out

    learners = ("dt", "bc10", "td3_bc", "at_ring_4")
    printed = run(*learners)
    assert [cell.method for cell in cells_run] == ["random", *learners]
    assert "67.56" in printed, "the paper's DT"
    rows = read_rows(tmp_path / "table.csv")
    assert list(rows[0])[:6] == ["task", "method", "trajectories", "seed", "trial", "return"]
    assert {(row["method"], row["trial"]) for row in rows} == {
        (method, trial) for method in ("random", *learners) for trial in ("1", "2", "best_of_trials")
    }
    assert "| cartpole_swingup |" in (tmp_path / "table.md").read_text()
    curves = read_rows(tmp_path / "learning_curves.csv")
    assert [(row["method"], row["share"]) for row in curves] == [
        (method, share) for method in learners for share in ("0.5", "1.0")
    ]
    for row in curves[1::2]:
        (last,) = (r for r in rows if r["method"] == row["method"] and r["trial"] == "2")
        assert float(row["normalised"]) == pytest.approx(float(last["normalised"]))
    for plot in ("table.png", "learning_curves.png"):
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")

    cells_run.clear()
    # A cell that lost its results goes on from its checkpoint; the others stay.
    lost = TableCell(TASK, "dt", 0)
    before = lost.results(tmp_path)
    (lost.folder(tmp_path) / "results.json").unlink()
    run(*learners)
    assert cells_run == [lost]
    assert lost.results(tmp_path).figures == before.figures
    with pytest.raises(ConfigError, match="other settings"):
        run("dt", preset="small")


def test_methods_of_a_domain_train_once_for_all_its_tasks(
    data, tiny_demo, cells_run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(METHODS, "told_2", domain_methods.Told(2))

    methods = ("fre", "fb", "told_2")

    def run() -> None:
        flags = {"data": data, "output": tmp_path, "hardware": "8xH100", "methods": methods}
        table5_exorl.main(tasks=(TASK,), **flags)

    run()
    trained = [TableCell("cartpole", model, 0) for model in ("fre", "fb", "told")]
    assert cells_run == [*trained, *(TableCell(TASK, name, 0) for name in ("random", *methods))]
    assert TableCell("cartpole_swingup_sparse", "told_32", 0).training == trained[2]
    rows = read_rows(tmp_path / "table.csv")
    assert {row["method"] for row in rows} == {"random", *methods}

    cells_run.clear()
    # Training that lost its results goes on from its checkpoint; what it trained stays.
    lost = [*trained[1:], TableCell(TASK, "fb", 0), TableCell(TASK, "told_2", 0)]
    before = [cell.results(tmp_path).figures for cell in lost[2:]]
    for cell in lost:
        (cell.folder(tmp_path) / "results.json").unlink()
    run()
    assert cells_run == lost
    assert [cell.results(tmp_path).figures for cell in lost[2:]] == before


def test_the_registry_holds_every_method_of_the_paper_and_of_the_presets():
    columns = {method.paper for method in METHODS.values()} - {None}
    assert columns == set(paper.tables()["table5_exorl_return"]["columns"][1:])
    assert {method for preset in TABLE_PRESETS.values() for method in preset.methods} <= set(METHODS)


def test_ways_to_attend_differ_in_memory_alone():
    stack = TABLE_PRESETS["demo"].chains.transformer
    ways = {way: METHODS[f"at_{way}_4"].transformer(stack, devices=8) for way in get_args(Method)}
    devices = {way: METHODS[f"at_{way}_4"].devices() for way in ways}
    assert [len(each) for each in devices.values()] == [1, 1, 1, 8], "simulated ones share a CPU"
    meshes = [METHODS[f"at_{way}_4"].mesh(jax.devices()).shape for way in ways]
    assert [(mesh["fsdp"], mesh["ring"]) for mesh in meshes] == [(8, 1)] * 3 + [(1, 8)]
    assert [way for way, each in ways.items() if each.ffn_chunk] == ["blockwise", "ring"]
    assert [way for way, each in ways.items() if each.attention_kernel == "vanilla"] == ["vanilla"]
    assert [way for way, each in ways.items() if each.attention_strategy == "ring"] == ["ring"]
    plain = {"ffn_chunk": None, "attention_kernel": "auto", "attention_strategy": "auto"}
    assert len({replace(each, **plain) for each in ways.values()}) == 1


def test_the_table_of_the_docs_is_rendered_again_from_its_rows_and_its_scores_follow(tmp_path):
    found = {}
    for row in read_rows(RESULTS / "table5_demo.csv"):
        name = f"trial_{row['trial']}" if row["trial"].isdigit() else row["trial"]
        value, low, high = (float(row[column]) for column in ("return", "low", "high"))
        cell = TableCell(row["task"], row["method"], int(row["seed"]))
        figures = found.setdefault(cell, (row, []))[1]
        figures.append(Figure(f"return/{name}", value, "return", low, high, int(row["environments"])))
    cells = {}
    for cell, (row, figures) in found.items():
        last = next(f for f in reversed(figures) if f.name.startswith("return/trial_"))
        origin = {name: row[name] for name in ("command", "commit")}
        origin |= {name: json.loads(row[name]) for name in ("hardware", "versions")}
        config, figures = {"data": {"target": float(row["reference"])}}, (*figures, replace(last, name=LAST))
        cells[cell] = Results(**origin, config=config, wall_seconds={}, figures=figures)
    tasks, names = (list(dict.fromkeys(getattr(cell, of) for cell in cells)) for of in ("task", "method"))
    demo_table = ReturnsTable(tasks, names, 3, cells)
    write_table(tmp_path, demo_table, {}, "8xA100")
    for kind in ("md", "csv"):
        assert (tmp_path / f"table.{kind}").read_bytes() == (RESULTS / f"table5_demo.{kind}").read_bytes()

    trials = [(seed, f"return/trial_{n}") for seed in range(3) for n in range(1, 5)]
    random = np.mean([cells[TableCell(TASK, "random", seed)].figure(name).value for seed, name in trials])
    reference = cells[TableCell(TASK, "random", 2)].config["data"]["target"]
    expected = 100 * (cells[TableCell(TASK, "dt", 2)].figure(LAST).value - random) / (reference - random)
    assert demo_table.scores("dt")[2, tasks.index(TASK)] == pytest.approx(expected)
    means = [mean.value for _, mean in demo_table.order]
    assert means == sorted(means, reverse=True)

    first = {cell: results for cell, results in cells.items() if cell.seed == 0}
    one_seed = replace(demo_table, seeds=1, results=first)
    texts = write_table(tmp_path, one_seed, {"at_vanilla_128": "oom"}, "8xA100")
    assert texts[0].rows[0]["BC"] == f"{one_seed.scores('bc')[0, 0]:.1f}", "no interval"
    fits = {row["method"]: row for row in texts[3].rows}
    assert fits["AT vanilla, 128"]["8xA100"] == "oom"
    assert fits["AT ring, 128"]["8xA100"] == "not asked"
    assert fits["AT blockwise, 128"]["paper"] == "oom"


def test_the_papers_model_is_compiled_or_its_memory_read_and_put_in_words(tmp_path):
    ring, whole = (chain_program("8xH100", f"at_{method}_128") for method in ("ring", "vanilla"))
    assert ring.context == whole.context == 512_000
    assert "attention_strategy='ring'" in ring.configuration
    assert [each.configuration[-4:] for each in (ring, whole)] == [", 1)", ", 8)"], "chains"
    if has_compiler("8xH100"):
        pytest.skip("the compiler would be asked")
    fits = Finding(512_000, "fits", 7.6e9, 8e10)
    ring.keep(tmp_path, fits)
    whole.keep(tmp_path, replace(fits, verdict="does not fit"))
    assert memory_cells("8xH100", tmp_path) == {"at_vanilla_128": "oom", "at_ring_128": "7.6 GB"}
    with pytest.raises(CompilerMissingError, match=r"agentic_ring\[cuda13\]"):
        table5_exorl.main(fit=("at_ring_4", "8xH100"), output=tmp_path)
