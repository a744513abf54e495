import multiprocessing

import numpy as np
import pytest

from agentic_ring.data.domains import flatten_observation, load_environment, parse_task
from agentic_ring.errors import DataError
from data_prep.collection_environments import VectorEnvironments, open_environments

SWINGUP = parse_task("cartpole_swingup")


def test_death_of_a_process_is_reported_and_the_others_end():
    before = set(multiprocessing.active_children())
    with (
        pytest.raises(DataError, match=r"one of the 2 processes that step environments died.*--processes"),
        open_environments(SWINGUP.domain, [SWINGUP] * 2, [], 100, 2) as environments,
    ):
        environments.reset([1, 2])
        first, _ = set(multiprocessing.active_children()) - before
        first.kill()
        first.join()
        environments.reset([1, 2])
    assert set(multiprocessing.active_children()) <= before


def test_episodes_are_those_of_dm_control_without_action_repeat():
    task, action_repeat = parse_task("jaco_reach_top_left"), 3  # which does not divide the 250 steps
    steps = task.domain.episode_steps
    environments = VectorEnvironments(task.domain, [task, task], [task], action_repeat)
    generator = np.random.default_rng(0)
    actions, observations, rewards = [], [environments.reset([7, 8])], []
    for _ in range(environments.decisions):
        actions.append(generator.uniform(-1.5, 1.5, (2, task.domain.action_dim)))
        observation, reward = environments.step(actions[-1])
        observations.append(observation)
        rewards.append(reward)

    for number, (seed, episode) in enumerate(zip([7, 8], environments.episodes(), strict=True)):
        assert len(episode) == steps
        assert episode.action_repeat == action_repeat
        environment = load_environment(task, seed)
        time_step = environment.reset()
        for row in range(steps + 1):
            if row:
                action = np.clip(actions[(row - 1) // action_repeat][number], -1, 1).astype(np.float32)
                time_step = environment.step(action)
                np.testing.assert_array_equal(episode.action[row], action)
                assert episode.reward[row, 0] == np.float32(time_step.reward)
            np.testing.assert_array_equal(
                episode.observation[row], flatten_observation(time_step.observation)
            )
            np.testing.assert_array_equal(episode.physics[row], environment.physics.get_state())
        assert time_step.last()
        assert episode.action[0].tolist() == [0] * task.domain.action_dim
        assert episode.reward[0, 0] == 0
        assert (episode.discount == 1).all()
        decided = np.append(np.arange(0, steps, action_repeat), steps)
        np.testing.assert_array_equal(np.stack(observations)[:, number], episode.observation[decided])
        total = episode.reward.sum(dtype=np.float64)
        assert np.sum(rewards, axis=0)[number, 0] == pytest.approx(total, rel=1e-6)


def test_each_environment_may_have_its_own_task():
    walk, run = parse_task("walker_walk"), parse_task("walker_run")
    environments = VectorEnvironments(walk.domain, [walk, run], [run, walk], action_repeat=250)
    environments.reset([3, 3])
    rewards = [environments.step(np.ones((2, 6)))[1] for _ in range(4)]
    walked, ran = environments.episodes()
    np.testing.assert_array_equal(walked.physics, ran.physics)
    np.testing.assert_allclose(np.sum(rewards, axis=0)[:, 0], ran.reward.sum(), rtol=1e-5)
    np.testing.assert_allclose(np.sum(rewards, axis=0)[:, 1], walked.reward.sum(), rtol=1e-5)
    assert walked.reward.sum() > ran.reward.sum()
