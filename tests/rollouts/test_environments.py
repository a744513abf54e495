import gymnasium
import numpy as np
import pytest

from agentic_ring.data.domains import parse_task
from agentic_ring.data.gymnasium_environments import make_environment, make_environments
from agentic_ring.errors import ArgumentError

SUITE_TASKS = ("walker_run", "cheetah_run", "cartpole_swingup")
OWN_TASKS = ("walker_flip", "quadruped_jump", "point_mass_maze_reach_top_left", "jaco_reach_bottom_right")


def actions(task_name: str, count: int, seed: int = 0) -> np.ndarray:
    """float32 [count, A]."""
    shape = (count, parse_task(task_name).domain.action_dim)
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


@pytest.mark.parametrize("task_name", SUITE_TASKS + OWN_TASKS)
def test_observations_and_rewards_are_dm_controls_own_in_exorls_order(task_name):
    task = parse_task(task_name)
    ours = make_environment(task, seed=3, action_repeat=1)
    assert ours.observation_space == gymnasium.spaces.Box(
        -np.inf, np.inf, (task.domain.observation_dim,), np.float32
    )
    observation, _ = ours.reset()
    direct = ours.get_wrapper_attr("_env")  # the dm_control environment within
    for action in actions(task_name, 20):
        named = direct.task.get_observation(direct.physics)
        expected = np.concatenate([np.ravel(entry) for entry in named.values()]).astype(np.float32)
        assert observation.dtype == np.float32
        np.testing.assert_array_equal(observation, expected)
        observation, reward, *_ = ours.step(action)
        assert reward == direct.task.get_reward(direct.physics)


@pytest.mark.parametrize("task_name", SUITE_TASKS)
def test_the_environment_is_shimmys_registered_one(task_name):
    task = parse_task(task_name)
    ours = make_environment(task, seed=0, action_repeat=1)
    theirs = gymnasium.make(
        f"dm_control/{task.domain.name}-{task.name}-v0", environment_kwargs={"flat_observation": True}
    )
    initial, _ = ours.reset()
    state = np.random.SeedSequence((0, 0)).generate_state(1)
    same, _ = theirs.reset(seed=int(state[0]))
    np.testing.assert_array_equal(initial, same["observations"].astype(np.float32))
    for action in actions(task_name, 10):
        observation, reward, *_ = ours.step(action)
        same, same_reward, *_ = theirs.step(action.astype(np.float64))
        np.testing.assert_array_equal(observation, same["observations"].astype(np.float32))
        assert reward == same_reward


def test_action_repeat_sums_rewards_and_stops_at_the_episodes_end():
    task = parse_task("cartpole_swingup")
    single = make_environment(task, seed=1, action_repeat=1)
    held = make_environment(task, seed=1, action_repeat=3)
    np.testing.assert_array_equal(single.reset()[0], held.reset()[0])
    lengths = []
    for action in actions("cartpole_swingup", 334):
        observation, reward, terminated, truncated, info = held.step(action)
        rewards, ended = [], False
        while len(rewards) < 3 and not ended:
            expected, single_reward, _, ended, _ = single.step(action)
            rewards.append(single_reward)
        lengths.append(len(rewards))
        assert reward == pytest.approx(sum(rewards), rel=1e-12)
        np.testing.assert_array_equal(observation, expected)
        assert (terminated, truncated, info) == (False, ended, {})
    assert sum(lengths) == 1000
    assert lengths[-1] == 1
    assert truncated


def test_a_trials_start_depends_on_seed_and_trial_alone():
    task = parse_task("walker_run")
    environments = make_environments(task, seeds=[5, 6])

    def start(trial: int) -> np.ndarray:
        return environments.reset(options={"trial": trial})[0]

    second, first = start(1), start(0)
    environments.step(np.zeros((2, 6), np.float32))
    np.testing.assert_array_equal(start(0), first)
    np.testing.assert_array_equal(start(1), second)
    np.testing.assert_array_equal(make_environments(task, seeds=[6]).reset()[0][0], first[1])
    starts = np.concatenate([first, second, start(2)])
    assert len(np.unique(starts, axis=0)) == 6
    environments.close()


def test_nothing_resets_by_itself():
    task = parse_task("cartpole_swingup")
    environments = make_environments(task, seeds=[0, 1, 2], action_repeat=500)
    start, _ = environments.reset()
    for last in (False, True):
        observation, reward, terminated, truncated, _ = environments.step(np.ones((3, 1), np.float32))
        assert observation.shape == (3, 5)
        assert observation.dtype == np.float32
        assert reward.shape == (3,)
        assert not terminated.any()
        assert (truncated == last).all()
    assert not (observation == start).all(axis=1).any()
    with pytest.raises(AssertionError):
        environments.step(np.ones((3, 1), np.float32))
    environments.close()


@pytest.mark.parametrize(
    ("seeds", "action_repeat", "message"),
    [([], 1, r"seeds is \[\]"), ([0, -4], 1, "-4"), ([0], 0, "action_repeat is 0")],
)
def test_bad_arguments_are_named(seeds, action_repeat, message):
    with pytest.raises(ArgumentError, match=message):
        make_environments(parse_task("cartpole_swingup"), seeds, action_repeat)
