"""The main job from flags to files, on real cartpole episodes, with a model that trains in seconds."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from agentic_ring.errors import ConfigError, MeshError, StoreError
from agentic_ring.files.run_folder import write_config
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.policies.policy import load_params
from agentic_ring.results.results_file import read_results
from agentic_ring.rollouts.returns import read_record
from agentic_ring.run import RunConfig, load_config
from agentic_ring.training.loop import MetricsLog, read_metrics
from data_prep.conversion import ConvertConfig, convert
from evals import dmc_returns
from evals.compile.machines import CompilerMissingError
from experiments import exorl_at_ring
from experiments.common.launch import LaunchOptions
from experiments.exorl import pipeline, presets
from tests.commands import exit_status, run_python
from tests.experiments.conftest import TINY, has_compiler

DOMAIN = ("cartpole", 40)  # 25 decisions an episode
ROOT = Path(__file__).resolve().parents[2]
FIGURES = {
    "return/random_policy",
    "return/data_median",
    "return/data_best",
    "return/trial_1",
    "return/trial_2",
    "return/last_trial",
    "return/best_of_trials",
    "loss/final",
    "tokens_per_second",
    "bytes_per_device",
}
run_main = partial(exorl_at_ring.main, "cartpole_swingup")


@pytest.fixture
def tiny_demo(monkeypatch) -> None:
    """The demo preset with a model and a length for tests."""
    tiny = replace(presets.PRESETS["demo"], **TINY, updates=4, checkpoint_every=2, trajectories=2)
    tiny = replace(tiny, action_repeat={"cartpole": 40})
    monkeypatch.setattr(pipeline, "EvaluationConfig", partial(pipeline.EvaluationConfig, environments=2))
    monkeypatch.setitem(presets.PRESETS, "demo", tiny)


@pytest.fixture
def two_layers(tiny_demo, monkeypatch) -> None:
    """The same with a layer for each of two stages."""
    tiny = presets.PRESETS["demo"]
    monkeypatch.setitem(
        presets.PRESETS, "demo", replace(tiny, transformer=replace(tiny.transformer, layers=2))
    )


class Interruption(Exception):
    """Ends a session in the middle, with what it had come to."""


def end_at_evaluation(config, model, params, mesh) -> None:
    raise Interruption(jax.tree.map(np.asarray, params))


def test_it_leaves_a_run_and_goes_on_with_it(data, tiny_demo, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    run_main(LaunchOptions(output=run, ring=2), data=data)
    printed = capsys.readouterr().out
    assert "return/last_trial" in printed
    assert "not this quantity" in printed
    results = read_results(run / "results.json")
    assert {figure.name for figure in results.figures} >= FIGURES
    assert results.figure("return/last_trial").paper == 123.45
    assert results.figure("return/last_trial").n == 2
    assert 0 < results.figure("return/random_policy").value < 300
    assert json.loads((run / "config.json").read_text())["chains"]["trajectories"] == 2
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert len(read_record(run).rollout.physics) == 2  # trials
    for plot in ("loss.png", "trial_returns.png", "data_returns.png"):
        assert (run / plot).read_bytes().startswith(b"\x89PNG")

    # The same command again trains no further and evaluates the same weights.
    weights, _ = load_params(run, load_config(run), make_mesh(MeshShape(), jax.devices()[:1]))
    monkeypatch.setattr(exorl_at_ring, "evaluate_returns", end_at_evaluation)
    with pytest.raises(Interruption) as again:
        run_main(LaunchOptions(output=run, ring=2), data=data)
    jax.tree.map(np.testing.assert_array_equal, again.value.args[0], weights)
    assert len(read_metrics(run / "metrics.jsonl")) == 4

    with pytest.raises(ConfigError, match=r"other settings \(.*seed"):
        run_main(LaunchOptions(output=run, ring=2, seed=1), data=data)
    with pytest.raises(ConfigError, match=r"other settings \(training.steps\)"):
        run_main(LaunchOptions(output=run, ring=2), data=data, updates=5)
    assert read_results(run / "results.json") == results

    # Longer chains can begin with its weights.
    def begin(*_, start, **__):
        raise Interruption(start())

    monkeypatch.setattr(pipeline, "train", begin)
    longer = LaunchOptions(output=tmp_path / "longer", ring=2)
    with pytest.raises(Interruption) as begun:
        run_main(longer, data=data, start=run, num_trajectories=5)
    jax.tree.map(np.testing.assert_array_equal, begun.value.args[0], weights)
    config = load_config(tmp_path / "longer")
    optimizer = presets.PRESETS["demo"].optimizer
    assert config.training.optimizer.learning_rate == 0.1 * optimizer.learning_rate
    assert optimizer.muon_learning_rate is not None
    assert config.training.optimizer.muon_learning_rate == 0.1 * optimizer.muon_learning_rate
    assert (config.chains.trajectories, config.evaluation.prompt_trajectories) == (5, 3)
    assert config.start == str(run)

    # With weights that do not fit nothing is begun; a dry run says so too.
    def refused(message, *, dry_run=False):
        flags = LaunchOptions(output=tmp_path / "refused", dry_run=dry_run)
        with pytest.raises(ConfigError, match=message):
            run_main(flags, data=data, start=run)
        assert not flags.output.exists()

    write_config(run, replace(load_config(run), training=replace(config.training, steps=5)))
    refused("is not trained to its end; run its command again")
    wider = replace(presets.PRESETS["demo"].transformer, width=32)
    monkeypatch.setitem(presets.PRESETS, "demo", replace(presets.PRESETS["demo"], transformer=wider))
    refused(r"do not fit .*: transformer\.width is 16 there, 32 here")
    refused(r"do not fit .*: transformer\.width is 16 there, 32 here", dry_run=True)


@pytest.mark.slow
def test_a_run_keeps_its_batch_and_losses_on_another_ring(data, tiny_demo, tmp_path, monkeypatch):
    monkeypatch.setitem(presets.PRESETS, "demo", replace(presets.PRESETS["demo"], tokens_per_update=1_200))
    write = MetricsLog.write

    def end_at_step_3(self, step, values):
        write(self, step, values)
        if step == 3:
            raise Interruption

    def session(name: str, ring: int) -> tuple[RunConfig, list[float]]:
        with pytest.raises(Interruption):
            run_main(LaunchOptions(output=tmp_path / name, ring=ring), data=data)
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        return load_config(tmp_path / name), [row["loss"] for row in rows]

    monkeypatch.setattr(exorl_at_ring, "evaluate_returns", end_at_evaluation)
    _, undisturbed = session("undisturbed", ring=2)
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", end_at_step_3)
        config, _ = session("moved", ring=2)
    assert (config.training.batch_size, config.mesh) == (8, MeshShape(data=4, ring=2))
    config, losses = session("moved", ring=4)  # which would start a run with 6 chains
    assert (config.training.batch_size, config.mesh) == (8, MeshShape(data=2, ring=4))
    np.testing.assert_allclose(losses, undisturbed, rtol=1e-5)

    write_config(tmp_path / "moved", replace(config, training=replace(config.training, batch_size=6)))
    with pytest.raises(MeshError, match=r"a batch of 6 rows .* over 4 parts .* choose a ring of 4 or 8"):
        session("moved", ring=2)


@pytest.mark.slow
def test_a_pipeline_trains_the_same_model(data, two_layers, tmp_path, capsys, monkeypatch):
    """Two stages of a ring of 4 against one ring of 8; what it trained can be rolled out without stages."""
    monkeypatch.setattr(exorl_at_ring, "evaluate_returns", end_at_evaluation)
    folders = tmp_path / "staged", tmp_path / "unstaged"
    # The same command without stages restores the first folder's checkpoint and trains no further.
    for folder, stages in zip((*folders, folders[0]), (2, 1, 1), strict=True):
        with pytest.raises(Interruption):
            run_main(LaunchOptions(output=folder, stages=stages), data=data)
        if stages == 2:
            capsys.readouterr()
            dmc_returns.main(folder, checkpoint="best")
            assert "return/last_trial" in capsys.readouterr().out
    found, expected = ([row["loss"] for row in read_metrics(folder / "metrics.jsonl")] for folder in folders)
    assert len(found) == 4
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_damaged_store_is_named(data, tiny_demo, tmp_path):
    path = convert(ConvertConfig("cartpole", "rnd", data=data)).store
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(bytes(damaged))
    try:
        with pytest.raises(StoreError, match="cartpole-rnd"):
            run_main(LaunchOptions(output=tmp_path / "other"), data=data)
    finally:
        path.write_bytes(whole)


def test_dry_run_counts_without_data(two_layers, tmp_path, capsys):
    run_main(LaunchOptions(dry_run=True, stages=2, ring=2), data=tmp_path)
    printed = capsys.readouterr().out
    assert "tokens per sequence 200 = 2 trajectories x 25 steps x 4 tokens" in printed
    assert "pipeline            2 stages, 4 microbatches, bubble 20.0% of 5 ticks" in printed
    assert "bytes per device" in printed
    assert not list(tmp_path.iterdir())


def test_an_action_repeat_of_1_gives_whole_trajectories(tiny_demo, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(exorl_at_ring, "print_memory", lambda *_: None)  # compiled above
    run_main(LaunchOptions(dry_run=True, ring=1), data=tmp_path, action_repeat=1)
    assert "tokens per sequence 8,000 = 2 trajectories x 1000 steps x 4 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"action_repeat": 0}, "'cartpole': 0"),
        ({"updates": 0}, "updates is 0"),
        ({"num_trajectories": 0}, "trajectories is 0"),
    ],
)
def test_numbers_below_1_are_refused(tmp_path, flags, named):
    with pytest.raises(ConfigError, match=named):
        run_main(LaunchOptions(dry_run=True), data=tmp_path, **flags)


def test_dry_run_for_a_machine_that_is_not_here(tmp_path, capsys):
    flags = LaunchOptions(dry_run=True, hardware="8xH100")
    if has_compiler("8xH100"):
        run_main(flags, data=tmp_path)
        assert "fits 8xH100" in capsys.readouterr().out
    else:
        with pytest.raises(CompilerMissingError, match=r"agentic_ring\[cuda13\]"):
            run_main(flags, data=tmp_path)


def test_the_paper_preset_has_the_papers_size():
    paper = presets.PRESETS["paper"]
    model = exorl_at_ring.Model(paper.model(exorl_at_ring.parse_task("walker_run").domain, max_timestep=1000))
    assert model.parameter_count() == pytest.approx(350e6, rel=0.02)
    assert paper.trajectories * 1000 * exorl_at_ring.TOKENS_PER_STEP == 512_000


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["walker_jump"], 2, "walker_jump"),
        (["walker_run", "--collector", "rnd"], 1, "walker/rnd.zip"),
        (["walker_run", "--collector", "dqn"], 1, "error: unknown collector 'dqn'; choose one of: aps"),
        (["walker_run", "--hardware", "8xH100"], 1, "add --dry-run"),
        (["walker_run", "--hardware", "8xB300", "--dry-run"], 2, "8xB300"),
    ],
)
def test_mistakes_end_in_one_message(tmp_path, capsys, flags, status, message):
    assert exit_status(exorl_at_ring.main, "--task", *flags, "--data", tmp_path) == status
    assert message in capsys.readouterr().err


def test_the_script_ends_in_one_message():
    script = ROOT / "experiments" / "exorl_at_ring.py"
    ended = run_python(script, "--task", "walker_run", "--ring", "3", "--dry-run")
    assert ended.returncode == 1
    assert "error: a ring of 3 does not divide 8 devices; choose one of 1, 2, 4, 8" in ended.stderr
    assert "Traceback" not in ended.stderr
