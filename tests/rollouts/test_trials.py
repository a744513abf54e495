from functools import partial

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from agentic_ring.data.domains import parse_task
from agentic_ring.data.gymnasium_environments import make_environment
from agentic_ring.errors import ArgumentError
from agentic_ring.rollouts.trials import Cohort, RandomPolicy, ZeroRewardPolicy, run_trials

CARTPOLE = parse_task("cartpole_swingup")
roll_out = partial(run_trials, "random policy", decisions=10)


class Recorder(RandomPolicy):
    """The random policy, which also writes down what it is told."""

    def __init__(self, num_environments: int, seed: int = 0):
        super().__init__(num_environments, CARTPOLE.domain.action_dim, seed)
        self.events, self.observations, self.rewards = [], [], []

    def begin_trial(self) -> None:
        self.events.append("begin")

    def act(self, observation: np.ndarray) -> np.ndarray:
        self.events.append("act")
        self.observations.append(observation)
        return super().act(observation)

    def receive(self, reward: np.ndarray, last: bool) -> None:
        self.events.append("last" if last else "receive")
        self.rewards.append(reward)


def environments(*seeds: int, steps: tuple[int, ...] = (10,)) -> SyncVectorEnv:
    """An environment for each seed, whose episodes have so many steps."""

    def short(seed: int, length: int) -> TimeLimit:
        return TimeLimit(make_environment(CARTPOLE, seed, 1), length)

    each = [partial(short, *pair) for pair in zip(seeds, steps * len(seeds), strict=False)]
    return SyncVectorEnv(each, autoreset_mode=AutoresetMode.DISABLED)


def test_a_policy_sees_each_trial_from_reset_to_its_last_reward():
    policy, ours = Recorder(3), environments(0, 1, 2)
    returns = roll_out([Cohort(policy, ours)], trials=2)
    assert policy.events == 2 * (["begin"] + 9 * ["act", "receive"] + ["act", "last"])
    rewards = np.array(policy.rewards)
    assert (rewards.dtype, returns.dtype) == (np.float32, np.float64)
    np.testing.assert_allclose(returns, rewards.reshape(2, 10, 3).sum(1).T, rtol=1e-5)
    assert len(np.unique(returns)) == 6
    for trial in range(2):
        start, _ = ours.reset(options={"trial": trial})
        np.testing.assert_array_equal(policy.observations[10 * trial], start)
    # The trials repeat exactly, whatever came before; here the policy receives zeros.
    again = Recorder(3)
    repeated = roll_out([Cohort(ZeroRewardPolicy(again), ours)], trials=1)
    np.testing.assert_array_equal(repeated, returns[:, :1])
    assert not np.any(again.rewards)


def test_cohorts_alternate_and_each_environment_behaves_as_in_a_cohort_of_its_own():
    def cohorts(*seeds):
        return [Cohort(Recorder(len(part), seed=part[0]), environments(*part)) for part in seeds]

    together = cohorts([0], [1, 2])
    order = []
    for name, cohort in zip("ab", together, strict=True):
        step = cohort.step
        cohort.step = lambda step=step, name=name: order.append(name) or step()
    returns = roll_out(together, trials=1)
    assert order == ["a", "b"] * 10
    alone = [roll_out(cohorts(part), trials=1) for part in ([0], [1, 2])]
    np.testing.assert_array_equal(returns, np.concatenate(alone))


def test_the_random_policy_is_uniform_and_seeded():
    first, again = (RandomPolicy(1000, 6, seed=4) for _ in range(2))
    observation = np.zeros((1000, 24), np.float32)
    action = first.act(observation)
    np.testing.assert_array_equal(action, again.act(observation), strict=True)
    quantiles = np.quantile(action, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(quantiles, [-1, -0.5, 0, 0.5, 1], atol=0.05)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros((2, 1)), r"shape \(2, 1\)"),
        (np.full((3, 1), 1.5), "from 1.5 to 1.5"),
        (np.array([[0.0], [np.nan], [0.0]]), "nan"),
    ],
)
def test_a_bad_action_is_named_before_it_is_taken(action, message):
    policy = Recorder(3)
    policy.act = lambda observation: action
    with pytest.raises(ArgumentError, match=message):
        roll_out([Cohort(policy, environments(0, 1, 2))], trials=1)
    assert not policy.rewards


@pytest.mark.parametrize(
    ("cohorts", "count", "message"),
    [
        ([environments(0, 1, steps=(4, 7))], 1, "1 of 2 environments ended at step 3 of trial 0"),
        ([environments(0), environments(0, steps=(12,))], 1, "1 of 2 cohorts ended at step 9 of trial 0"),
        ([environments(0)], 0, "trials is 0"),
    ],
)
def test_episodes_of_different_lengths_and_no_trials_are_refused(cohorts, count, message):
    with pytest.raises(ArgumentError, match=message):
        roll_out([Cohort(Recorder(each.num_envs), each) for each in cohorts], count)
