"""Table 5 from flags to files, on real cartpole episodes, with learners that train in seconds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentic_ring.errors import ConfigError, DataError, UnknownNameError
from agentic_ring.provenance import provenance
from agentic_ring.results.intervals import Interval
from agentic_ring.results.results_file import Figure, Results
from agentic_ring.results.rows import read_rows
from evals.compile.machines import CompilerMissingError
from experiments import paper, table5_exorl
from experiments.table5 import methods, presets
from experiments.table5.cells import TableCell, run_cell
from experiments.table5.chain_memory import ChainCell
from experiments.table5.methods import METHODS, Agentic
from experiments.table5.presets import TABLE_PRESETS
from experiments.table5.returns_table import ReturnsTable, write_table
from tests.commands import run_python
from tests.experiments.conftest import TINY, has_compiler

DOMAIN = ("cartpole", None)
ROOT = Path(__file__).resolve().parents[2]
TASK = "cartpole_swingup"
ORIGIN = provenance()


@pytest.fixture
def tiny_demo(monkeypatch) -> None:
    """The demo preset with models, lengths and rollouts for tests."""
    demo = TABLE_PRESETS["demo"]
    tiny = replace(
        demo,
        chains=replace(demo.chains, **TINY, updates=2, checkpoint_every=1),
        cloning=replace(demo.cloning, steps=4, batch_size=4, checkpoint_every=2),
        decision=replace(demo.decision, steps=4, batch_size=4, checkpoint_every=2),
        values=replace(
            demo.values,
            learner=replace(demo.values.learner, hidden=8, batch=8),
            updates=4,
            updates_per_call=2,
            checkpoint_every=2,
        ),
        seeds=1,
    )
    monkeypatch.setitem(presets.TABLE_PRESETS, "demo", tiny)
    evaluation = methods.EvaluationConfig
    monkeypatch.setattr(
        methods, "EvaluationConfig", lambda **given: evaluation(**given | {"environments": 4})
    )


@pytest.fixture
def cells_run(monkeypatch) -> list[TableCell]:
    """The cells that ran: in this process, as others would not see the tiny preset."""
    ran: list[TableCell] = []

    def run_here(cells, output, workers, environment):
        for cell in cells:
            if cell.results(output) is None:
                run_cell(cell, output)
                ran.append(cell)
            yield cell

    monkeypatch.setattr("experiments.common.cells.run_cells", run_here)
    return ran


@pytest.mark.slow
def test_every_method_fills_its_cell_and_a_second_run_fills_none(
    data, tiny_demo, cells_run, tmp_path, capsys
):
    def run(**flags) -> str:
        table5_exorl.main(tasks=(TASK,), data=data, output=tmp_path, hardware="8xH100", **flags)
        return capsys.readouterr().out

    printed = run(methods=("dt", "td3_bc"))
    assert [cell.method for cell in cells_run] == ["random", "dt", "td3_bc"]
    assert "67.56" in printed, "the paper's DT"
    assert "not this quantity" in printed
    rows = read_rows(tmp_path / "table.csv")
    assert list(rows[0])[:6] == ["task", "method", "trajectories", "seed", "trial", "return"]
    assert {(row["method"], row["trial"]) for row in rows} == {
        (method, trial) for method in ("random", "dt", "td3_bc") for trial in ("1", "2", "best_of_trials")
    }
    assert 0 < float(rows[0]["return"]) < 300
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    assert "| cartpole_swingup |" in (tmp_path / "table.md").read_text()
    curves = read_rows(tmp_path / "learning_curves.csv")
    assert [(row["method"], row["share"]) for row in curves] == [
        (method, share) for method in ("dt", "td3_bc") for share in ("0.5", "1.0")
    ]
    for row in curves[1::2]:
        (last,) = (r for r in rows if r["method"] == row["method"] and r["trial"] == "2")
        assert float(row["normalised"]) == pytest.approx(float(last["normalised"]))
    assert (tmp_path / "learning_curves.png").read_bytes().startswith(b"\x89PNG")

    cells_run.clear()
    # A cell that lost its results goes on from its checkpoint; the others stay.
    lost = TableCell(TASK, "dt", 0)
    before = lost.results(tmp_path)
    (lost.folder(tmp_path) / "results.json").unlink()
    left = tmp_path / "table.png.7.partial"  # by a process that was killed
    left.write_bytes(b"")
    run(methods=("dt", "td3_bc"))
    assert not left.exists()
    assert cells_run == [lost]
    after = lost.results(tmp_path)
    assert before is not None
    assert after is not None
    assert after.figures == before.figures

    with pytest.raises(ConfigError, match="other settings"):
        run(methods=("dt",), preset="small")


@pytest.mark.slow
def test_cloning_and_rings_fill_their_cells_too(data, tiny_demo, cells_run, tmp_path):
    table5_exorl.main(
        tasks=(TASK,),
        methods=("bc10", "at_ring_4", "at_blockwise_4"),
        data=data,
        output=tmp_path,
        hardware="8xH100",
    )
    assert [cell.method for cell in cells_run] == ["random", "bc10", "at_ring_4", "at_blockwise_4"]


def test_the_registry_holds_every_method_of_the_paper_and_the_td_baselines():
    expected = {"random", "bc", "bc10", "dt", "td3", "td3_bc"} | {
        f"at_{attention}_{count}"
        for attention in ("vanilla", "memory_efficient", "blockwise", "ring")
        for count in (4, 32, 128)
    }
    assert set(METHODS) == expected
    columns = {method.paper for method in METHODS.values()} - {None}
    assert columns == set(paper.tables()["table5_exorl_return"]["columns"][1:])
    for name, preset in TABLE_PRESETS.items():
        assert set(preset.methods) <= set(METHODS), name


def test_ways_to_attend_differ_in_memory_alone():
    stack = TABLE_PRESETS["demo"].chains.transformer
    stacks = {}
    for method in METHODS.values():
        if isinstance(method, Agentic) and method.trajectories == 4:
            stacks[method.attention] = method.transformer(stack, devices=8)
    assert [name for name, each in stacks.items() if each.ffn_chunk] == ["blockwise", "ring"]
    assert [name for name, each in stacks.items() if each.attention_kernel == "vanilla"] == ["vanilla"]
    assert [name for name, each in stacks.items() if each.attention_strategy == "ring"] == ["ring"]
    same = {
        replace(each, ffn_chunk=None, attention_kernel="auto", attention_strategy="auto")
        for each in stacks.values()
    }
    assert len(same) == 1


def test_every_column_has_as_many_trials():
    for preset in TABLE_PRESETS.values():
        for count in methods.TRAJECTORIES:
            chains = preset.chains.with_trajectories(count)
            assert (chains.trials, chains.trials + chains.prompt_trajectories) == (4, count)


def table_of(
    scores: dict[str, list[list[float]]], references: tuple[float, ...] = (60.0, 60.0)
) -> ReturnsTable:
    """Returns [seeds, tasks] by method, under a random policy of 10 and a reference of each seed."""

    def results(value: float, seed: int) -> Results:
        interval = Interval(value, value - 1, value + 1, 16)
        figures = [
            Figure.from_interval(f"return/{name}", interval, "return")
            for name in ("trial_1", "last_trial", "best_of_trials")
        ]
        origin = {**ORIGIN, "commit": f"of seed {seed}"}
        config = {"data": {"target": references[seed]}}
        return Results(**origin, config=config, wall_seconds={}, figures=tuple(figures))

    tasks, seeds = ("walker_run", TASK), len(scores["bc"])
    scores = {"random": [[10.0, 10.0]] * seeds, **scores}
    cells = {
        TableCell(task, method, seed): results(values[seed][column], seed)
        for method, values in scores.items()
        for seed in range(seeds)
        for column, task in enumerate(tasks)
    }
    return ReturnsTable(tasks, tuple(scores), seeds, cells)


def test_normalised_returns_and_the_order(tmp_path):
    table = table_of({"bc": [[35.0, 60.0], [35.0, 60.0]], "dt": [[60.0, 110.0], [35.0, 110.0]]})
    np.testing.assert_allclose(table.scores("bc"), [[50, 100], [50, 100]])
    np.testing.assert_allclose(table.scores("dt"), [[100, 200], [50, 200]])
    assert [name for name, _ in table.order] == ["dt", "bc", "random"]
    texts = write_table(tmp_path, table, {"at_vanilla_128": "oom"}, "8xA100")
    markdown = (tmp_path / "table.md").read_text()
    assert (
        "| walker_run | 0.0 (0.0 to 0.0) | 50.0 (50.0 to 50.0) | 75.0 (50.0 to 100.0) / 49.82 |" in markdown
    )
    assert "| DT | 150.0 " in markdown
    # On one task DT wins, on the other it wins with one of its two seeds and ties with the other.
    dt, bc, random = texts[2].rows
    assert dt["over BC"] == "**0.88 (0.75 to 1.00)**"
    assert (dt["over random"], bc["over random"]) == ("**1.00 (1.00 to 1.00)**",) * 2
    assert (bc["over BC"], random["over random"]) == ("", "")
    fits = {row["method"]: row for row in texts[3].rows}
    assert fits["AT vanilla, 128"]["8xA100"] == "oom"
    assert fits["AT ring, 128"]["8xA100"] == "not asked"
    assert fits["AT blockwise, 128"]["paper"] == "oom"


def test_seeds_trained_on_data_of_their_own(tmp_path):
    table = table_of({"bc": [[35.0, 60.0], [35.0, 60.0]]}, references=(60.0, 110.0))
    np.testing.assert_allclose(table.scores("bc"), [[50, 100], [25, 50]])
    texts = write_table(tmp_path, table, {}, "8xA100")
    assert texts[1].rows[0]["reference"] == "85"
    rows = [row for row in read_rows(tmp_path / "table.csv") if row["method"] == "bc"]
    kept = {(row["seed"], row["commit"], row["reference"], row["normalised"]) for row in rows}
    assert kept == {
        ("0", "of seed 0", "60.0", "50.0"),
        ("0", "of seed 0", "60.0", "100.0"),
        ("1", "of seed 1", "110.0", "25.0"),
        ("1", "of seed 1", "110.0", "50.0"),
    }


def test_one_seed_has_no_interval(tmp_path):
    texts = write_table(tmp_path, table_of({"bc": [[35.0, 60.0]]}), {}, "8xA100")
    assert texts[0].rows[0]["BC"] == "50.0"
    assert "One training seed" in texts[0].notes[1]
    assert texts[2].rows[0]["over random"] == "1.00"
    assert "none of these orders is certain" in texts[2].notes[2]


def test_the_papers_model_at_a_context():
    cell = ChainCell("8xA100", "at_ring_128")
    assert cell.context == 512_000
    step = cell.step(cell.context, tuple(range(8)))
    assert step.batch == 1
    assert step.config.transformer.attention_strategy == "ring"
    assert ChainCell("8xA100", "at_blockwise_32").step(128_000, tuple(range(8))).batch == 8


def test_a_machine_that_is_not_here_is_asked_where_its_compiler_is(tmp_path, capsys):
    fit = ("at_ring_4", "8xH100")
    if has_compiler("8xH100"):
        table5_exorl.main(fit=fit, output=tmp_path)
        assert "GB" in capsys.readouterr().out
    else:
        with pytest.raises(CompilerMissingError, match=r"agentic_ring\[cuda13\]"):
            table5_exorl.main(fit=fit, output=tmp_path)


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ({"tasks": ("walker_jump",)}, UnknownNameError, "walker_jump"),
        ({"methods": ("ppo",)}, UnknownNameError, "unknown method 'ppo'; choose one of: random, bc"),
        ({"tasks": ()}, ConfigError, "no task was given"),
        ({"seeds": 0}, ConfigError, "seeds 0"),
        ({"workers": 0}, ConfigError, "workers is 0"),
        ({"hardware": "8xB300"}, UnknownNameError, "8xB300"),
        ({"cell": (TASK, "bc", 0)}, DataError, r"config\.json does not exist"),
        ({"cell": (TASK, "ppo", 0)}, UnknownNameError, "ppo"),
    ],
)
def test_mistakes_are_named_before_anything_is_collected(tmp_path, flags, error, message):
    with pytest.raises(error, match=message):
        table5_exorl.main(output=tmp_path / "run", data=tmp_path / "data", **flags)
    assert not (tmp_path / "data").exists()


def test_a_mistake_ends_in_one_message(tmp_path):
    ended = run_python(ROOT / "experiments" / "table5_exorl.py", "--methods", "ppo", cwd=tmp_path)
    assert ended.returncode == 1
    assert "error: unknown method 'ppo'" in ended.stderr
    assert "Traceback" not in ended.stderr
