"""Goals from the collection to returns: random actions, a tiny model, its evaluation and the oracle."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from agentic_ring import load_policy
from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.rewards.family import goal_reward
from agentic_ring.data.rewards.features import Features
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.told_rewards import hidden_goals
from agentic_ring.device_memory import PlannedMemory
from agentic_ring.errors import DataError
from agentic_ring.policies.acting import TellablePolicy
from agentic_ring.results.results_file import read_results
from agentic_ring.rollouts import told_returns
from agentic_ring.run import load_told_config
from data_prep.collect import PLANS
from evals import unseen_returns
from evals.compile.step_memory import TrainStep
from experiments import exorl_at_ring
from experiments.common.launch import LaunchOptions
from experiments.exorl import told_presets
from tests.experiments.conftest import TINY_TOLD

MAZE = DOMAINS["point_mass_maze"]


def test_a_model_is_told_goals(tmp_path, monkeypatch, capsys):
    plan = replace(PLANS["point_mass_maze"], family_episodes=40, action_repeat=20)
    monkeypatch.setitem(PLANS, "point_mass_maze", plan)
    monkeypatch.setattr("data_prep.stores.usable_cores", lambda: 1)
    for module in (told_returns, unseen_returns):
        monkeypatch.setattr(module, "usable_cores", lambda: 1)
    tiny = {"updates": 2, "action_repeat": {"point_mass_maze": 20}, "held_back": 8}
    tiny |= TINY_TOLD | {"chains": replace(TINY_TOLD["chains"], goals=True)}
    demo = replace(told_presets.GOAL_PRESETS["demo"], **tiny)
    monkeypatch.setitem(told_presets.GOAL_PRESETS, "demo", demo)
    few = partial(told_presets.ToldEvaluation, environments=2, trials=1)
    monkeypatch.setattr(told_presets, "ToldEvaluation", few)
    monkeypatch.setattr(unseen_returns, "OWN_TRIALS", 2)
    monkeypatch.setattr(unseen_returns, "hidden_goals", lambda domain: hidden_goals(domain)[::20])
    monkeypatch.setattr(TrainStep, "memory", lambda step, target=None: PlannedMemory(5, 3))
    run, out = tmp_path / "run", tmp_path / "goals"
    exorl_at_ring.main("point_mass_maze_reach_top_left", LaunchOptions(output=run), data=tmp_path)
    assert "the best trajectory of the data" in capsys.readouterr().out
    config = load_told_config(run)
    assert config.chains.goals
    with TrajectoryStore.open(config.store) as store:
        assert set(store.algorithms) == {"random"}
        starts = np.array([store.episode(i).episode.physics[0, :2] for i in range(40)])
    assert len(np.unique(np.sign(starts), axis=0)) == 4, "episodes begin in all rooms"

    # One trajectory that never meets a goal tells something too: that it is elsewhere.
    policy = load_policy(run)
    assert isinstance(policy, TellablePolicy)
    policy.tell(reward=hidden_goals(MAZE)[0], count=1)

    unseen_returns.main(run, out, draws=1, contexts=(0, 4, 6))
    with pytest.raises(DataError, match=r"holds 8 trajectories, .* has 9"):
        unseen_returns.main(run, out, draws=1, contexts=(0, 9))
    results = read_results(out / "results.json")
    for name in ("n0", "n4", "zeroed", "another", "own_trials/trial_2", "random_policy"):
        assert [f.unit for f in results.figures if f.name.startswith(f"{name}/reward_")] == ["return"] * 5
    assert results.figure("oracle").value > 600
    own = (results.figure(name).value for name in ("n0", "own_trials/trial_1"))
    assert len(set(own)) == 1
    assert 0 <= results.figure("met/n4").value <= results.figure("met/n6").value <= 1


@pytest.mark.parametrize("domain", ["point_mass_maze", "jaco"])
def test_no_goal_of_training_is_near_a_hidden_one(domain):
    hidden = hidden_goals(DOMAINS[domain])
    assert len(hidden) == 20
    for goal in hidden:
        term = goal.terms[0]
        assert goal_reward(DOMAINS[domain], term.target) == goal
        there = Features(
            {name: np.array([value]) for name, value in zip(term.features, term.target, strict=True)}
        )
        assert goal(there) == [1]
    assert not hidden_goals(DOMAINS["walker"])
