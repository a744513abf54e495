import multiprocessing

import numpy as np
import pytest

from agentic_ring.data.tasks import parse_task
from agentic_ring.errors import DataError
from data_prep.collection_environments import open_environments

SWINGUP = parse_task("cartpole_swingup")
SPARSE = parse_task("cartpole_swingup_sparse")


def explore(processes):
    """Every answer of three environments to the same seeds and actions."""
    tasks = [SWINGUP, SPARSE, SWINGUP]
    generator = np.random.default_rng(0)
    with open_environments(SWINGUP.domain, tasks, [SPARSE, SWINGUP], 100, processes) as environments:
        answers = [environments.reset([1, 2, 3])]
        for _ in range(environments.decisions):
            answers.extend(environments.step(generator.uniform(-1, 1, (3, 1)).astype(np.float32)))
        for episode in environments.episodes():
            answers.extend([episode.observation, episode.action, episode.reward, episode.physics])
        return answers


def test_episodes_are_the_same_in_any_number_of_processes():
    """More processes than environments are as many."""
    expected, found = explore(1), explore(5)
    assert len(found) == len(expected)
    for answer, same in zip(found, expected, strict=True):
        assert answer.dtype == same.dtype
        np.testing.assert_array_equal(answer, same)


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
