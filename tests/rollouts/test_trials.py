import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from agentic_ring.data.domains import parse_task
from agentic_ring.data.gymnasium_environments import make_environment, make_environments
from agentic_ring.errors import ArgumentError
from agentic_ring.rollouts.trials import Cohort, RandomPolicy, ZeroRewardPolicy, run_trials

CARTPOLE = parse_task("cartpole_swingup")
ACTION_REPEAT = 100  # 10 steps an episode


class Recorder(RandomPolicy):
    """The random policy, which also writes down what it is told."""

    def __init__(self, num_environments: int, seed: int = 0):
        super().__init__(num_environments, CARTPOLE.domain.action_dim, seed)
        self.events: list[str] = []
        self.observations: list[np.ndarray] = []
        self.rewards: list[np.ndarray] = []

    def begin_trial(self) -> None:
        self.events.append("begin")

    def act(self, observation: np.ndarray) -> np.ndarray:
        self.events.append("act")
        self.observations.append(observation)
        return super().act(observation)

    def receive(self, reward: np.ndarray, last: bool) -> None:
        self.events.append("last" if last else "receive")
        self.rewards.append(reward)


@pytest.fixture(scope="module")
def environments():
    made = make_environments(CARTPOLE, seeds=[0, 1, 2], action_repeat=ACTION_REPEAT)
    yield made
    made.close()


def test_a_policy_sees_each_trial_from_reset_to_its_last_reward(environments):
    policy = Recorder(3)
    steps = []
    returns = run_trials([Cohort(policy, environments)], trials=2, on_step=lambda *where: steps.append(where))
    assert policy.events == 2 * (["begin"] + 9 * ["act", "receive"] + ["act", "last"])
    assert [where[:2] for where in steps] == [(trial, step) for trial in range(2) for step in range(10)]
    means = returns.mean(axis=0)
    assert [last_return for *_, last_return in steps] == [None] * 9 + [means[0]] * 10 + [means[1]]
    rewards = np.array(policy.rewards)
    assert rewards.dtype == np.float32
    assert returns.shape == (3, 2)
    assert returns.dtype == np.float64
    np.testing.assert_allclose(returns, rewards.reshape(2, 10, 3).sum(1).T, rtol=1e-5)
    assert len(np.unique(returns)) == 6
    for trial in range(2):
        start, _ = environments.reset(options={"trial": trial})
        np.testing.assert_array_equal(policy.observations[10 * trial], start)
    # The trials repeat exactly, whatever came before; here the policy receives zeros.
    again = Recorder(3)
    repeated = run_trials([Cohort(ZeroRewardPolicy(again), environments)], trials=1)
    np.testing.assert_array_equal(repeated, returns[:, :1])
    assert not np.any(again.rewards)


def test_cohorts_alternate_and_each_environment_behaves_as_in_a_cohort_of_its_own():
    def cohorts(*seeds):
        return [
            Cohort(Recorder(len(part), seed=part[0]), make_environments(CARTPOLE, part, 250))
            for part in seeds
        ]

    together = cohorts([0], [1, 2])
    order = []
    for name, cohort in zip("ab", together, strict=True):
        step = cohort.step
        cohort.step = lambda step=step, name=name: order.append(name) or step()
    returns = run_trials(together, trials=1)
    assert order == ["a", "b"] * 4
    alone = [run_trials(cohorts(part), trials=1) for part in ([0], [1, 2])]
    np.testing.assert_array_equal(returns, np.concatenate(alone))


def test_cohorts_must_end_together():
    lengths = (50, 100)
    cohorts = [Cohort(Recorder(1), make_environments(CARTPOLE, [0], repeat)) for repeat in lengths]
    with pytest.raises(ArgumentError, match="1 of 2 cohorts ended at step 9 of trial 0"):
        run_trials(cohorts, trials=1)


def test_the_random_policy_is_uniform_and_seeded():
    first, again = (RandomPolicy(1000, 6, seed=4) for _ in range(2))
    observation = np.zeros((1000, 24), np.float32)
    action = first.act(observation)
    np.testing.assert_array_equal(action, again.act(observation))
    assert action.dtype == np.float32
    assert action.shape == (1000, 6)
    quantiles = np.quantile(action, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(quantiles, [-1, -0.5, 0, 0.5, 1], atol=0.05)
    assert not np.array_equal(first.act(observation), action)


def test_random_returns_on_walker_are_those_known_of_dm_control():
    # Uniform actions score about 24 of 1000 on walker run.
    environments = make_environments(parse_task("walker_run"), seeds=range(3))
    returns = run_trials([Cohort(RandomPolicy(3, 6, seed=0), environments)], trials=1)
    environments.close()
    assert 18 < returns.mean() < 32


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros((2, 1)), r"shape \(2, 1\)"),
        (np.full((3, 1), 1.5), "from 1.5 to 1.5"),
        (np.array([[0.0], [np.nan], [0.0]]), "nan"),
    ],
)
def test_a_bad_action_is_named_before_it_is_taken(environments, action, message):
    policy = Recorder(3)
    policy.act = lambda observation: action
    with pytest.raises(ArgumentError, match=message):
        run_trials([Cohort(policy, environments)], trials=1)
    assert not policy.rewards


def test_episodes_of_different_lengths_and_no_trials_are_refused(environments):
    unequal = SyncVectorEnv(
        [lambda steps=steps: TimeLimit(make_environment(CARTPOLE, 0, 1), steps) for steps in (4, 7)],
        autoreset_mode=AutoresetMode.DISABLED,
    )
    with pytest.raises(ArgumentError, match="1 of 2 environments ended at step 3 of trial 0"):
        run_trials([Cohort(Recorder(2), unequal)], trials=1)
    unequal.close()
    with pytest.raises(ArgumentError, match="trials is 0"):
        run_trials([Cohort(Recorder(3), environments)], trials=0)
