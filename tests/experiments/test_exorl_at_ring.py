"""The main job from flags to files, on real cartpole episodes, with a model that trains in seconds."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.device_memory import PlannedMemory
from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import write_config
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Model
from agentic_ring.policies.policy import load_params
from agentic_ring.results.results_file import read_results
from agentic_ring.rollouts import told_returns
from agentic_ring.rollouts.returns import read_record
from agentic_ring.run import load_config, load_told_config
from agentic_ring.training.loop import read_metrics
from evals.compile.machines import CompilerMissingError
from evals.compile.step_memory import TrainStep
from experiments import exorl_at_ring
from experiments.common.launch import LaunchOptions
from experiments.exorl import pipeline, presets, told_pipeline, told_presets
from tests.commands import exit_status
from tests.experiments.conftest import TINY, TINY_TOLD, has_compiler

DOMAIN = ("cartpole", 40)  # 25 decisions an episode

run_main = partial(exorl_at_ring.main, "cartpole_swingup", conditioning="return")
run_told = partial(exorl_at_ring.main, "cartpole_swingup")


@pytest.fixture
def tiny_demo(monkeypatch) -> None:
    """The demo preset with a model and a length for tests."""
    tiny = replace(presets.PRESETS["demo"], **TINY, updates=4, checkpoint_every=2, trajectories=2)
    tiny = replace(tiny, action_repeat={"cartpole": 40})
    monkeypatch.setattr(pipeline, "EvaluationConfig", partial(pipeline.EvaluationConfig, environments=2))
    monkeypatch.setitem(presets.PRESETS, "demo", tiny)
    monkeypatch.setattr(jax, "devices", partial(list, jax.devices()[:4]))


@pytest.fixture
def tiny_told(monkeypatch) -> None:
    """The same of runs in which trajectories tell the task."""
    tiny = replace(told_presets.TOLD_PRESETS["demo"], **TINY_TOLD, updates=4, action_repeat={"cartpole": 40})
    monkeypatch.setitem(told_presets.TOLD_PRESETS, "demo", tiny)
    few = partial(told_presets.ToldEvaluation, environments=2, trials=2)
    monkeypatch.setattr(told_presets, "ToldEvaluation", few)
    monkeypatch.setattr(jax, "devices", partial(list, jax.devices()[:4]))
    monkeypatch.setattr(told_returns, "usable_cores", lambda: 1)  # no processes


class Interruption(Exception):
    """Ends a session in the middle, with what it had come to."""


def end_at_evaluation(config, model, params, mesh) -> None:
    raise Interruption(jax.tree.map(np.asarray, params))


def test_it_leaves_a_run_and_goes_on_with_it(data, tiny_demo, tmp_path, capsys, monkeypatch):
    run, compiled = tmp_path / "run", []
    monkeypatch.setattr(TrainStep, "memory", lambda step: compiled.append(step) or PlannedMemory(5, 3))
    run_main(LaunchOptions(output=run, ring=2), data=data)
    assert "return/last_trial" in capsys.readouterr().out
    results = read_results(run / "results.json")
    for name in ("data_median", "data_best", "trial_1", "best_of_trials"):
        assert results.figure(f"return/{name}").value >= 0
    last = results.figure("return/last_trial")
    assert (last.paper, last.n) == (123.45, 2)
    assert results.figure("tokens_per_second").value > 0
    assert results.figure("bytes_per_device").value == 8
    assert 0 < results.figure("return/random_policy").value < 300
    (step,), config = compiled, load_config(run)
    assert (step.model.config, step.optimizer) == (config.model, config.training.optimizer)
    assert dict(step.mesh.shape) == vars(config.mesh)
    assert config.chains.trajectories == 2
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert len(read_record(run).rollout.physics) == 2  # trials
    for plot in ("loss.png", "trial_returns.png", "data_returns.png"):
        assert (run / plot).read_bytes().startswith(b"\x89PNG")

    # The same command again trains no further and evaluates the same weights.
    weights, _ = load_params(run, config, make_mesh(MeshShape(), jax.devices()[:1]))
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
        run_main(longer, data=data, start=run, num_trajectories=4)
    jax.tree.map(np.testing.assert_array_equal, begun.value.args[0], weights)
    config = load_config(tmp_path / "longer")
    for rate in ("learning_rate", "muon_learning_rate"):
        expected = 0.1 * getattr(presets.PRESETS["demo"].optimizer, rate)
        assert getattr(config.training.optimizer, rate) == expected
    assert (config.chains.trajectories, config.evaluation.prompt_trajectories) == (4, 2)
    assert config.start == str(run)

    # With weights that do not fit nothing is begun; a dry run says so too.
    def refused(message, *, dry_run=False):
        flags = LaunchOptions(output=tmp_path / "refused", dry_run=dry_run)
        with pytest.raises(ConfigError, match=message):
            run_main(flags, data=data, start=run)
        assert not flags.output.exists()

    write_config(run, replace(load_config(run), training=replace(config.training, steps=5)))
    refused("is not trained to its end")
    wider = replace(presets.PRESETS["demo"].transformer, width=32)
    monkeypatch.setitem(presets.PRESETS, "demo", replace(presets.PRESETS["demo"], transformer=wider))
    for dry_run in (False, True):
        refused(r"transformer\.width is 16 there, 32 here", dry_run=dry_run)


def test_trajectories_tell_the_task(data, tiny_told, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setattr(TrainStep, "memory", lambda step, target=None: PlannedMemory(5, 3))
    run_told(LaunchOptions(output=run, ring=2), data=data, num_trajectories=3)
    printed = capsys.readouterr()
    assert "3 relabelled trajectories add" in printed.out
    assert "reward functions; left out:" in printed.err
    results, config = read_results(run / "results.json"), load_told_config(run)
    names = {figure.name: figure for figure in results.figures}
    told = ("return/n0", "return/n3", "control/zeroed", "control/shuffled", "control/another_task")
    told += ("own_trials/trial_1", "own_trials/trial_2", "behind_3/trial_1", "behind_3/trial_2", "cloned")
    for name in (*told, "return/random_policy", "return/best_in_context"):
        assert (names[name].n, names[name].unit) == (2, "return")
        assert names[name].low <= names[name].value <= names[name].high
    assert names["return/n0"] == replace(names["own_trials/trial_1"], name="return/n0")
    assert names["return/n3"] == replace(names["behind_3/trial_1"], name="return/n3")
    span = names["return/data_p95"].value - names["return/random_policy"].value
    gain = (names["return/n3"].value - names["return/n0"].value) / span
    assert names["gain/n3"].value == pytest.approx(gain)
    assert config.evaluation.contexts == (0, 3)
    with TrajectoryStore.open(config.store) as store:
        assert names["return/data_best"].value == pytest.approx(store.returns("swingup").max(), rel=1e-5)
    assert read_record(run).rollout.physics.shape == (2, 26, 4)
    for plot in ("loss.png", "returns.png"):
        assert (run / plot).read_bytes().startswith(b"\x89PNG")

    # The same command again trains no further, neither this model nor that of one task.
    def evaluated(config, params, cloned, *_):
        raise Interruption(jax.tree.map(np.asarray, (params, cloned)))

    weights = [
        load_params(folder, replace(config, training=training), make_mesh(MeshShape(), jax.devices()[:1]))
        for folder, training in ((run, config.training), (run / "cloned", config.clone_training))
    ]
    monkeypatch.setattr(told_pipeline, "evaluate_told", evaluated)
    with pytest.raises(Interruption) as again:
        run_told(LaunchOptions(output=run, ring=2), data=data, num_trajectories=3)
    jax.tree.map(np.testing.assert_array_equal, again.value.args[0], tuple(params for params, _ in weights))
    assert [step for _, step in weights] == [4, 2]

    with pytest.raises(ConfigError, match="has 4 episodes"):
        run_told(LaunchOptions(output=tmp_path / "more"), data=data, num_trajectories=5)
    with pytest.raises(ConfigError, match="--start and --loss-extent belong to --conditioning return"):
        run_told(LaunchOptions(output=tmp_path / "more"), data=data, start=run)
    run_told(LaunchOptions(dry_run=True, ring=2), data=tmp_path)
    assert "tokens per sequence 28: 4 trajectories x 5 known steps, 8 decisions" in capsys.readouterr().out


def test_dry_run_counts_without_data(tiny_demo, tmp_path, capsys):
    flags = LaunchOptions(dry_run=True, ring=2)
    run_main(flags, data=tmp_path, action_repeat=50)
    printed = capsys.readouterr().out
    assert "tokens per sequence 160 = 2 trajectories x 20 steps x 4 tokens" in printed
    assert "bytes per device" in printed
    elsewhere = partial(run_main, LaunchOptions(dry_run=True, hardware="8xH100"), data=tmp_path)
    if has_compiler("8xH100"):
        elsewhere()
        assert "fits 8xH100" in capsys.readouterr().out
    else:
        with pytest.raises(CompilerMissingError, match=r"agentic_ring\[cuda13\]"):
            elsewhere()
    assert not list(tmp_path.iterdir())


def test_the_paper_preset_has_the_papers_size():
    model = presets.PRESETS["paper"].model(DOMAINS["walker"], max_timestep=1000)
    assert Model(model).parameter_count() == pytest.approx(350e6, rel=0.02)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--collector rnd", "walker/rnd.zip"),
        ("--collector dqn", "error: unknown collector 'dqn'; choose one of: aps"),
        ("--hardware 8xH100", "add --dry-run"),
        ("--ring 3 --dry-run", "error: a ring of 3 does not divide 8 devices; choose one of 1"),
        ("--action-repeat 0", "'walker': 0"),
        ("--updates 0", "updates is 0"),
        ("--num-trajectories 0", "trajectories is 0"),
        ("--task-share 1", "task_share': 1.0"),
        ("--task-share 0.3 --conditioning return", "--task-share belongs to --conditioning context"),
    ],
)
def test_mistakes_end_in_one_message(tmp_path, capsys, flags, message):
    task = "--task", "walker_run", "--data", tmp_path
    assert exit_status(exorl_at_ring.main, *task, *flags.split()) == 1
    assert message in capsys.readouterr().err


def test_learned_observations_have_less_noise_where_there_are_more_of_them():
    demo, goals = told_presets.told_preset("demo", DOMAINS["walker"]), told_presets.GOAL_PRESETS["demo"]
    assert [demo.noise_for(count) for count in (100, 432, 4 * 432)] == [0.15, 0.15, 0.075]
    assert goals.noise_for(4000) == goals.chains.noise == 0.012
