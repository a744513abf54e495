"""Policies by name, folder and file: the same actions as in the run, and errors that say what is wrong."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import agentic_ring
from agentic_ring import Policy, load_policy, play
from agentic_ring.data.domains import parse_task
from agentic_ring.errors import ArgumentError, CheckpointError, ConfigError, DataError, UnknownNameError
from agentic_ring.files.run_folder import write_config
from agentic_ring.policies.policy import SHIPPED, WEIGHTS, shipped_policies
from agentic_ring.results.results_file import read_results
from agentic_ring.rollouts.returns import read_record
from agentic_ring.run import load_config
from evals import dmc_returns, export_policy
from tests.commands import exit_status


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policies") / "cartpole"
    export_policy.main(finished_run, folder)
    return folder


@pytest.fixture
def copied(exported, tmp_path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copied"))


@pytest.fixture(scope="module")
def loaded(exported) -> Policy:
    return load_policy(exported)


@pytest.fixture
def policy(loaded) -> Policy:
    loaded.reset()
    return loaded


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


def test_run_folder_policy_folder_and_file_act_alike(finished_run, exported, policy):
    policies = [policy, *(load_policy(path) for path in (finished_run, str(exported / WEIGHTS)))]
    first, recorded = actions_on_record(policy, exported, 20)
    for other in policies[1:]:
        jax.tree.map(np.testing.assert_array_equal, other._params, policy._params)
        np.testing.assert_array_equal(actions_on_record(other, exported, 1)[0][0], first[0, :1])
    np.testing.assert_allclose(first, recorded, atol=2e-5)  # which were taken in two environments at once
    assert np.ptp(recorded) > 0.01


def test_a_reset_forgets_and_a_target_is_obeyed(exported, policy):
    observation = np.full((2, 5), 0.3)

    def rollout(policy: Policy, steps: int) -> list[np.ndarray]:
        policy.reset()
        chosen = []
        for _ in range(steps):
            chosen.append(policy.act(observation))
            policy.receive([1.0, 2.0], [False, False])
        return chosen

    first = rollout(policy, 100)
    np.testing.assert_array_equal(first, rollout(policy, 100))
    assert first[0].shape == (2, 1)
    np.testing.assert_array_equal(first[0], first[49])  # held
    assert (first[0] != first[50]).all()
    assert (rollout(load_policy(exported, target=1e4), 1)[0] != first[0]).all()
    with pytest.raises(ArgumentError, match="target is nan"):
        load_policy(exported, target=float("nan"))
    policy.reset()
    assert policy.act(observation[0]).shape == (1,)  # another number of environments


@pytest.mark.parametrize("name", shipped_policies())
def test_a_shipped_policy_acts_as_its_card_says(name):
    folder = SHIPPED / name
    policy = load_policy(name)
    assert policy.task == name
    found, recorded = actions_on_record(policy, folder, 12)
    np.testing.assert_allclose(found[0], recorded[0], atol=1e-4)
    card = (folder / "README.md").read_text()
    results = read_results(folder / "results.json")
    last = results.figure("return/last_trial")
    for shown in (
        f"| last trial, earlier ones in context | {last.value:.4g} |",
        f"| commit | {results.commit} |",
        f"`{results.command}`",
        f'load_policy("{name}")',
    ):
        assert shown in card
    row = f"| {name} | {last.value:.0f} ({last.low:.0f} to {last.high:.0f}) |"
    assert row in (SHIPPED.parents[1] / "docs/in-context-rl.md").read_text()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 3e6


def test_walker_run_is_shipped_and_all_are_tasks():
    assert [parse_task(name).full_name for name in shipped_policies()] == list(shipped_policies())
    assert agentic_ring.load_policy is load_policy
    with pytest.raises(UnknownNameError, match=r"'walker_flip'; choose one of: .*walker_run"):
        load_policy("walker_flip")


@pytest.mark.parametrize("place", [-1, 300])
def test_a_damaged_file_is_named(copied, place):
    content = bytearray((copied / WEIGHTS).read_bytes())
    content[place] ^= 1
    (copied / WEIGHTS).write_bytes(content)
    with pytest.raises(DataError, match=WEIGHTS):
        load_policy(copied)


def test_short_absent_or_other_weights_are_refused(copied, exported):
    whole = (copied / WEIGHTS).read_bytes()
    (copied / WEIGHTS).write_bytes(whole[:-8])
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        load_policy(copied)
    (copied / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_policy(copied)
    with pytest.raises(CheckpointError, match="one set of weights"):
        dmc_returns.main(exported, checkpoint="best")
    (copied / WEIGHTS).write_bytes(whole)
    config = json.loads((copied / "config.json").read_text())
    config.pop("digest")
    config["model"]["transformer"]["ffn_width"] = 32
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"does not fit .*config.json: .* is float32"):
        load_policy(copied)


@pytest.mark.parametrize("observation", [np.zeros(4), np.zeros((2, 3, 5)), np.zeros((0, 5)), 1.0])
def test_observations_of_another_shape_are_refused(policy, observation):
    with pytest.raises(ArgumentError, match=r"needs shape \[5\] or \[E, 5\]"):
        policy.act(observation)


def test_calls_out_of_order_are_refused(policy):
    with pytest.raises(ArgumentError, match="not finite"):
        policy.act([0, 0, 0, 0, np.nan])
    with pytest.raises(ArgumentError, match="call act first"):
        policy.receive(0.0, False)
    policy.act(np.zeros((2, 5)))
    with pytest.raises(ArgumentError, match="call receive"):
        policy.act(np.zeros((2, 5)))
    with pytest.raises(ArgumentError, match=r"of shape \(2,\)"):
        policy.receive(0.0, False)
    with pytest.raises(ArgumentError, match="end together"):
        policy.receive([0.0, 1.0], [True, False])
    policy.receive([0.0, 1.0], False)
    with pytest.raises(ArgumentError, match=r"needs shape \[2, 5\]"):
        policy.act(np.zeros((3, 5)))


def test_trials_and_episodes_end(exported, policy):
    for _ in range(policy.trials):
        policy.act(np.zeros(5))
        policy.receive(1.0, True)
    with pytest.raises(ArgumentError, match="all 2 trials have ended; call reset"):
        policy.act(np.zeros(5))
    config = load_config(exported)
    cut_short = replace(config, chains=replace(config.chains, action_repeat=300))  # the last decision
    for each in (policy, Policy(cut_short, policy._params)):
        each.reset()
        for _ in range(1000):
            each.act(np.zeros(5))
            each.receive(1.0, False)
        with pytest.raises(ArgumentError, match=r"ends after 1000 steps.*SAME_STEP"):
            each.act(np.zeros(5))


def test_existing_folders_and_runs_with_a_prompt_are_not_exported(finished_run, exported, tmp_path):
    with pytest.raises(ConfigError, match="exists"):
        export_policy.main(finished_run, exported)
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    config = load_config(run)
    write_config(run, replace(config, evaluation=replace(config.evaluation, prompt_trajectories=2)))
    with pytest.raises(ConfigError, match="a prompt of 2 stored trajectories"):
        export_policy.main(run, tmp_path / "new")
    with pytest.raises(ConfigError, match="a prompt of 2 stored trajectories"):
        load_policy(run)


def test_trials_are_played_and_printed(exported, policy, capsys):
    assert exit_status(play.main, exported, "--environments", 2) == 0
    printed = capsys.readouterr().out.splitlines()
    returns = list(play.play(policy, 2, seed=0))
    assert len(returns) == 2
    assert all(trial.shape == (2,) and (trial > 0).all() and (trial < 1000).all() for trial in returns)
    for number, (line, trial) in enumerate(zip(printed[1:], returns, strict=True), start=1):
        assert line.startswith(f"trial {number}: mean return {trial.mean():6.1f}")


def test_play_says_which_package_is_missing(exported, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert exit_status(play.main, exported) == 1
    assert "gymnasium is not installed; run: pip install 'agentic_ring[rl]'" in capsys.readouterr().err
    assert exit_status(play.main, "walker_flip", "--environments", 0) == 1


def test_returns_of_a_policy_are_those_of_its_run(finished_run, exported, tmp_path):
    """The folder that is written is a policy and a run for a report, without the store of the run."""
    dmc_returns.main(exported, output=tmp_path / "again")
    found, expected = (read_results(folder / "results.json") for folder in (tmp_path / "again", finished_run))
    for name in ("return/last_trial", "return/random_policy", "return/data_median"):
        assert found.figure(name).value == pytest.approx(expected.figure(name).value, rel=1e-5)
    assert read_record(tmp_path / "again").data_algorithms.tolist() == ["td3"] * 6
    assert load_policy(tmp_path / "again").trials == 2
    export_policy.main(tmp_path / "again", tmp_path / "policy")
    assert load_policy(tmp_path / "policy").trials == 2
    with pytest.raises(ConfigError, match="is the folder of the policy"):
        dmc_returns.main(exported, output=exported)
    with pytest.raises(ConfigError, match="holds a trained run"):
        dmc_returns.main(exported, output=finished_run)
