"""Policies by name, folder and file: the same actions as in the run, and errors that say what is wrong."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from agentic_ring import Policy, load_policy, play
from agentic_ring.data.domains import parse_task
from agentic_ring.data.rewards.features import compute_features
from agentic_ring.data.rewards.tasks import task_reward
from agentic_ring.data.spans import middle_decisions
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.told_decisions import KEPT_FILE
from agentic_ring.data.trajectories import Trajectory
from agentic_ring.errors import ArgumentError, CheckpointError, ConfigError, DataError, UnknownNameError
from agentic_ring.files.run_folder import write_config
from agentic_ring.policies.policy import SHIPPED, TASKS, WEIGHTS, shipped_policies
from agentic_ring.results.results_file import read_results
from agentic_ring.results.rows import read_rows
from agentic_ring.rollouts.returns import read_record
from agentic_ring.run import load_config, load_told_config
from evals import dmc_returns, export_policy, told_tasks
from tests.commands import exit_status
from tests.data.synthetic import DOMAIN


@pytest.fixture(scope="module")
def run(small_run, tmp_path_factory) -> Path:
    """The small run as one without a prompt; its record is still that of trials after one."""
    folder = Path(shutil.copytree(small_run.directory, tmp_path_factory.mktemp("runs") / "run"))
    config = small_run.config
    write_config(folder, replace(config, evaluation=replace(config.evaluation, prompt_trajectories=0)))
    return folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    """The run's policy, rolled out again: the folder that is written is a policy and a run for a report."""
    folder = tmp_path_factory.mktemp("policies")
    export_policy.main(run, folder / "first")
    dmc_returns.main(folder / "first", output=folder / "again")
    export_policy.main(folder / "again", folder / "cartpole")
    return folder / "cartpole"


@pytest.fixture(scope="module")
def policy(exported) -> Policy:
    """It compiles again when the number of environments changes: tests with one of them come first."""
    return load_policy(exported)


def refused(error, message, call, *arguments, **options) -> None:
    with pytest.raises(error, match=message):
        call(*arguments, **options)


def actions_on_record(policy: Policy, folder: Path, decisions: int) -> tuple[np.ndarray, np.ndarray]:
    """Actions in the recorded trials, observation by observation, and the recorded ones: [K, T, A]."""
    rollout = read_record(folder).rollout
    policy.reset()
    found = np.zeros_like(rollout.action[:, :decisions])
    for trial in range(len(found)):
        for step in range(decisions):
            for held in range(policy.action_repeat):
                action = policy.act(rollout.observation[trial, step] + held)  # only the first one counts
                ends = step == decisions - 1 and held == policy.action_repeat - 1
                policy.receive(rollout.reward[trial, step] if held == 0 else 0.0, ends)
            found[trial, step] = action
    return found, rollout.action[:, :decisions]


def test_run_folder_policy_folder_and_file_act_alike(run, exported, policy):
    first, recorded = actions_on_record(policy, exported, 20)
    for other in (load_policy(run), load_policy(str(exported / WEIGHTS))):
        jax.tree.map(np.testing.assert_array_equal, other._params, policy._params)
    np.testing.assert_array_equal(actions_on_record(other, exported, 1)[0][0], first[0, :1])
    np.testing.assert_allclose(first, recorded, atol=2e-5)  # which were taken in two environments at once
    assert np.ptp(recorded) > 0.01


def test_trials_and_episodes_end(exported, policy):
    policy.reset()
    for _ in range(policy.trials):
        policy.act(np.zeros(5))
        policy.receive(1.0, True)
    refused(ArgumentError, "all 3 trials have ended; call reset", policy.act, np.zeros(5))
    config = load_config(exported)
    cut_short = replace(config, chains=replace(config.chains, action_repeat=300))  # the last decision
    for each in (policy, Policy(cut_short, policy._params)):
        each.reset()
        for _ in range(1000):
            each.act(np.zeros(5))
            each.receive(1.0, False)
        refused(ArgumentError, r"ends after 1000 steps.*as gymnasium\.make_vec", each.act, np.zeros(5))


def test_returns_of_a_policy_are_those_of_its_run_but_for_the_prompt(small_run, exported, tmp_path):
    found, expected = (read_results(folder / "results.json") for folder in (exported, small_run.directory))
    for name in ("return/random_policy", "return/data_median"):
        assert found.figure(name).value == pytest.approx(expected.figure(name).value, rel=1e-5)
    records = [read_record(folder) for folder in (exported, small_run.directory)]
    starts = [record.rollout.observation[:, 0] for record in records]
    np.testing.assert_array_equal(*starts)
    assert records[0].data_algorithms.tolist() == ["td3"] * 8 + ["ou"] * 4
    refused(ConfigError, "is the folder of the policy", dmc_returns.main, exported, output=exported)
    refused(ConfigError, "holds a trained run", dmc_returns.main, exported, output=small_run.directory)
    refused(ConfigError, "exists", export_policy.main, small_run.directory, exported)
    for refuse in (load_policy, lambda folder: export_policy.main(folder, tmp_path / "new")):
        refused(ConfigError, "a prompt of 2 stored trajectories", refuse, small_run.directory)


def test_calls_out_of_order_and_other_shapes_are_refused(policy):
    policy.reset()
    for observation in (np.zeros(4), np.zeros((2, 3, 5)), np.zeros((0, 5)), 1.0):
        refused(ArgumentError, r"needs shape \[5\] or \[E, 5\]", policy.act, observation)
    refused(ArgumentError, "not finite", policy.act, [0, 0, 0, 0, np.nan])
    refused(ArgumentError, "call act first", policy.receive, 0.0, False)
    policy.act(np.zeros((2, 5)))
    refused(ArgumentError, "call receive", policy.act, np.zeros((2, 5)))
    refused(ArgumentError, r"of shape \(2,\)", policy.receive, 0.0, False)
    refused(ArgumentError, "end together", policy.receive, [0.0, 1.0], [True, False])
    policy.receive([0.0, 1.0], False)
    refused(ArgumentError, r"needs shape \[2, 5\]", policy.act, np.zeros((3, 5)))


def test_a_reset_forgets_and_a_target_is_obeyed(exported, policy):
    observation = np.full((2, 5), 0.3)

    def rollout() -> list[np.ndarray]:
        policy.reset()
        chosen = []
        for _ in range(100):
            chosen.append(policy.act(observation))
            policy.receive([1.0, 2.0], [False, False])
        return chosen

    first = rollout()
    np.testing.assert_array_equal(first, rollout())
    assert first[0].shape == (2, 1)
    np.testing.assert_array_equal(first[0], first[49])  # held
    assert (first[0] != first[50]).all()
    assert (load_policy(exported, target=1e4).act(observation) != first[0]).all()
    refused(ArgumentError, "target is nan", load_policy, exported, target=float("nan"))
    policy.reset()
    assert policy.act(observation[0]).shape == (1,)  # another number of environments


def right(features) -> np.ndarray:
    return 1.0 * (features["cart_x"] > 0)


def test_relabelled_trajectories_tell_as_those_of_a_user_do(told_run):
    config, policy = load_told_config(told_run), load_policy(told_run)

    def action() -> np.ndarray:
        chosen = policy.act(np.full((2, 5), 0.3))
        policy.receive([1.0, 0.0], False)
        return chosen

    untold = action()
    policy.tell(reward=right, count=3, seed=1)
    prompt, scale = policy._prompt, policy._reward_scale
    assert policy._in_context.reward_scale == scale
    told = action()
    assert told.shape == (2, 1)
    assert (told != untold).all()
    np.testing.assert_array_equal(told, action())  # held
    with TrajectoryStore.open(config.store) as store:
        drawn = np.random.default_rng(1).permutation(store.num_episodes)[:3]
        episodes = [store.episode(number).episode for number in drawn]
    own = [
        Trajectory(
            each.observation[:-1],
            each.action[1:],
            right(compute_features(DOMAIN, each.physics[1:], each.action[1:])),
        )
        for each in episodes
    ]
    policy.tell(own)
    jax.tree.map(np.testing.assert_array_equal, policy._prompt, prompt)
    assert policy._reward_scale == scale
    policy.tell(task="cartpole_swingup")
    assert policy._prompt.position.shape == (1, 4 * config.chains.spans)
    assert policy.act(np.zeros(5)).shape == (1,)  # another number of environments

    short = [Trajectory(np.zeros((999, 5)), np.zeros((999, 1)), np.zeros(999))]
    for error, message, arguments, options in (
        (ArgumentError, "one of trajectories, task and reward", (), {}),
        (ArgumentError, "one of trajectories, task and reward", (own,), {"reward": right}),
        (ArgumentError, "trajectory 0 is a str", ("cartpole_swingup",), {}),
        (
            ArgumentError,
            r"trajectory 0 has shapes \(\(999, 5\), \(999, 1\)\); .*whole episodes",
            (short,),
            {},
        ),
        (ArgumentError, "number of trajectories is 0", ([],), {}),
        (ArgumentError, "is 5, but .* chains of 4", (), {"reward": right, "count": 5}),
        (UnknownNameError, "task of cartpole 'walker_run'", (), {"task": "walker_run"}),
        (UnknownNameError, "feature 'head'", (), {"reward": lambda features: features["head"]}),
        (
            DataError,
            "reward is 0 in all 100 decisions",
            (),
            {"reward": lambda features: 0 * features["cart_x"]},
        ),
    ):
        refused(error, message, policy.tell, *arguments, **options)


def test_an_exported_policy_is_told_rewards_without_the_store(told_again, exported, tmp_path):
    folder = tmp_path / "cartpole"
    table = SHIPPED.parents[1] / "experiments/results/table5_demo.csv"
    export_policy.main(told_again, folder, table=table)
    measured = [
        float(row["return"])
        for row in read_rows(table)
        if (row["task"], row["method"], row["trial"]) == ("cartpole_swingup", "td3", "4")
    ]
    told, card = read_results(folder / TASKS).figure("told/swingup"), (folder / "README.md").read_text()
    assert len(measured) == 3
    assert re.search(rf"\| swingup \| {told.value:.4g} .*\| {np.mean(measured):.4g} \|\n", card)
    refused(ConfigError, "--table is for", export_policy.main, exported, tmp_path / "new", table=table)
    none = tmp_path / "table.csv"
    none.write_text("task,method,seed,trial,return\nwalker_run,td3,0,4,100\n")
    refused(
        DataError,
        "no TD3 in a task of cartpole",
        export_policy.main,
        told_again,
        tmp_path / "new",
        table=none,
    )
    config = load_told_config(folder)
    write_config(folder, replace(config, store="gone.h5"))
    assert 'policy.tell(task="cartpole_swingup")' in (folder / "README.md").read_text()
    policy = load_policy(folder)
    policy.tell(reward=right)
    assert policy.act(np.zeros(5)).shape == (1,)
    shown, seen, paid = middle_decisions(25, 5) * 40, [], []
    with TrajectoryStore.open(told_again.with_name("s.h5")) as store:
        for episode in (store.episode(number).episode for number in range(store.num_episodes)):
            seen.append(config.scaling.observation(episode.observation[shown]))
            # Each decision of 40 control steps is rewarded by its middle.
            paid.append(episode.physics[shown + 21, 0] > 0)
    told, scale = policy._prompt, policy._reward_scale
    kept = told.observation[0].reshape(4, 5, 5)
    numbers = [np.abs(np.stack(seen) - each).max((1, 2)).argmin() for each in kept]
    assert len({*numbers}) == 4
    np.testing.assert_allclose(kept, np.stack(seen)[numbers], atol=2e-3)
    rewards = told.reward[0].reshape(4, 5) * scale.deviation + scale.mean
    np.testing.assert_allclose(rewards, np.stack(paid)[numbers], atol=1e-6)
    refused(ArgumentError, "is 5, but .* chains of 4", policy.tell, reward=right, count=5)
    (folder / KEPT_FILE).write_bytes(b"nothing")
    refused(DataError, "trajectories.npz is damaged: .*export the policy again", load_policy, folder)


def test_one_set_of_weights_is_told_each_task(told_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(told_tasks, "usable_cores", lambda: 1)
    told_tasks.main(told_run, environments=2, output=tmp_path)
    shown, results = capsys.readouterr().out, read_results(tmp_path / "results.json")
    for task in DOMAIN.tasks:
        names = [f"{kind}/{task}" for kind in ("random_policy", "nothing_told", "told", "kept")]
        means = [results.figure(name).value for name in names]
        assert re.search(rf"{task} +" + " +".join(f"{mean:.0f}" for mean in means), shown)
    # The same random actions from the same states; only the rewards differ.
    assert (
        results.figure("random_policy/swingup").value > results.figure("random_policy/swingup_sparse").value
    )
    with TrajectoryStore.open(load_told_config(told_run).store) as store:
        drawn = np.random.default_rng(0).permutation(store.num_episodes)[:4]
        episodes = [store.episode(number).episode for number in drawn]
    features = (compute_features(DOMAIN, each.physics[1:], each.action[1:]) for each in episodes)
    returns = [task_reward(parse_task("cartpole_swingup"))(each).sum() for each in features]
    np.testing.assert_allclose(results.figure("kept/swingup").value, np.mean(returns), rtol=1e-4)
    if (tmp_path / "tasks.png").exists():  # not every machine can draw
        assert (tmp_path / "tasks.png").read_bytes().startswith(b"\x89PNG")
    refused(ArgumentError, "--environments is 0", told_tasks.main, told_run, environments=0)


def test_a_run_is_told_a_reward_without_training(told_run, told_again, exported, tmp_path):
    results = read_results(told_again / "results.json")
    assert results.config["reward"].endswith("mine.py:right")
    names = ("return/n0", "return/n4", "control/another_task", "behind_4/trial_2", "return/random_policy")
    for name in names:
        assert 0 <= results.figure(name).value <= 1000
        assert results.figure(name).n == 2
    assert (told_again / "returns.png").read_bytes().startswith(b"\x89PNG")
    load_policy(told_again).tell(task="cartpole_swingup")
    rewards = told_again / "mine.py"
    for error, message, folder, options in (
        (UnknownNameError, "task of cartpole 'walker_run'", told_run, {"task": "walker_run"}),
        (ConfigError, "both say what to do", told_run, {"task": "cartpole_swingup", "reward": "x.py:f"}),
        (ConfigError, "leave --task out", exported, {"task": "cartpole_swingup"}),
        (DataError, "nowhere is 0 in all 12000 rows", told_run, {"reward": f"{rewards}:nowhere"}),
        (UnknownNameError, "feature 'head'", told_run, {"reward": f"{rewards}:headless"}),
    ):
        refused(error, message, dmc_returns.main, folder, **options)
    config = load_told_config(told_again)
    longer = Path(shutil.copytree(told_again, tmp_path / "longer"))
    write_config(longer, replace(config, evaluation=replace(config.evaluation, contexts=(0, 13))))
    refused(DataError, "holds 12 trajectories, .* has 13", dmc_returns.main, longer)


def test_a_run_of_the_other_kind_is_named(told_run, exported, tmp_path):
    context = "holds a run of --conditioning context, but one of --conditioning return is needed"
    refused(DataError, context, load_config, told_run)
    refused(DataError, "a run of --conditioning return, but", load_told_config, exported)
    refused(ConfigError, "leave the target out", load_policy, told_run, target=5.0)


@pytest.mark.parametrize("name", shipped_policies())
def test_a_shipped_policy_acts_as_its_card_says(name):
    folder, policy = SHIPPED / name, load_policy(name)
    results, card = read_results(folder / "results.json"), (folder / "README.md").read_text()
    if isinstance(policy, Policy):
        assert policy.task == name
        found, recorded = actions_on_record(policy, folder, 12)
        np.testing.assert_allclose(found[0], recorded[0], atol=1e-4)
        label, shown = "last trial, earlier ones in context", results.figure("return/last_trial")
    else:
        assert policy.task.startswith(name)
        seen = np.zeros((2, parse_task(policy.task).domain.observation_dim))
        actions = []
        for task in parse_task(policy.task).domain.tasks[:2]:
            policy.tell(task=f"{name}_{task}")
            actions.append(policy.act(seen))
        assert (actions[0] != actions[1]).any()
        label, shown = "told by 128 relabelled trajectories", results.figure("return/n128")
    assert f"| {label} | {shown.value:.4g} |" in card
    for part in (f"| commit | {results.commit} |", f"`{results.command}`", f'load_policy("{name}")'):
        assert part in card
    row = f"| {name} | {shown.value:.0f} ({shown.low:.0f} to {shown.high:.0f}) |"
    assert row in (SHIPPED.parents[1] / "docs/in-context-rl.md").read_text()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4e6


def test_damaged_absent_or_other_weights_are_refused(exported, tmp_path):
    copied = Path(shutil.copytree(exported, tmp_path / "copied"))
    weights = copied / WEIGHTS
    whole = weights.read_bytes()
    for place in (-1, 300):
        content = bytearray(whole)
        content[place] ^= 1
        weights.write_bytes(content)
        refused(DataError, WEIGHTS, load_policy, copied)
    weights.write_bytes(whole[:-8])
    refused(DataError, "cannot be read as safetensors", load_policy, copied)
    weights.unlink()
    refused(CheckpointError, "no checkpoint", load_policy, copied)
    weights.write_bytes(whole)
    refused(CheckpointError, "one set of weights", dmc_returns.main, copied, checkpoint="best")
    config = json.loads((copied / "config.json").read_text())
    config.pop("digest")
    config["model"]["transformer"]["ffn_width"] = 32
    (copied / "config.json").write_text(json.dumps(config))
    refused(CheckpointError, r"does not fit .*config.json: .* is float32", load_policy, copied)
    refused(UnknownNameError, r"'walker_flip'; choose one of: .*walker", load_policy, "walker_flip")


def test_trials_are_played_and_printed_or_the_missing_package_named(exported, told_run, monkeypatch, capsys):
    returns, rolled_out = [], play.play
    monkeypatch.setattr(play, "play", lambda *args: (returns.append(x) or x for x in rolled_out(*args)))
    assert exit_status(play.main, exported, "--environments", 2) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(returns) == 3
    assert all(trial.shape == (2,) and (trial > 0).all() and (trial < 1000).all() for trial in returns)
    for number, (line, trial) in enumerate(zip(printed[1:], returns, strict=True), start=1):
        assert line.startswith(f"trial {number}: mean return {trial.mean():6.1f}")
    assert exit_status(play.main, told_run, "--environments", 1) == 0
    assert "1 environments, told by stored trajectories\ntrial 1:" in capsys.readouterr().out
    sparse = ("--task", "cartpole_swingup_sparse", "--environments", 1)
    assert exit_status(play.main, told_run, *sparse) == 0
    assert capsys.readouterr().out.startswith("cartpole_swingup_sparse, 1 environments, told")
    assert exit_status(play.main, exported, *sparse) == 1
    assert "knows the task cartpole_swingup only; leave --task out" in capsys.readouterr().err
    assert exit_status(play.main, exported, "--environments", 0) == 1
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert exit_status(play.main, exported) == 1
    assert "gymnasium is not installed; run: pip install 'agentic_ring[rl]'" in capsys.readouterr().err
