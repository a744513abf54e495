"""Rewards from physics are those that the environment paid, for every task of every domain."""

from dataclasses import replace

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import StoredEpisode, StoreDescription, TrajectoryStore, write_store
from agentic_ring.errors import DataError
from data_prep.relabel import RelabelConfig, Relabeller, relabel
from tests.data_prep.exploration import uniform_episodes


@pytest.fixture(scope="module", params=list(DOMAINS))
def explored(request):
    """A domain, its relabeller, and one episode of uniform actions of each of its tasks."""
    domain = DOMAINS[request.param]
    decisions = 150 if domain.name == "point_mass_maze" else 30  # which takes longer to find its reward
    episodes = uniform_episodes(domain, domain.tasks, action_repeat=5, decisions=decisions)
    return domain, Relabeller(domain, domain.tasks), episodes


def test_rewards_are_those_that_the_environment_paid(explored):
    domain, relabeller, episodes = explored
    for task, episode in zip(domain.tasks, episodes, strict=True):
        relabeller.check_physics(episode)
        rewards = relabeller.rewards(episode)
        assert rewards.keys() == set(domain.tasks)
        np.testing.assert_array_equal(rewards[task], episode.reward[:, 0], strict=True)
        assert rewards[task][0] == 0
    shifted = replace(episodes[0], physics=episodes[0].physics[::-1])
    with pytest.raises(DataError, match=r"physics and observation disagree in row 0"):
        relabeller.check_physics(shifted)


def test_exorl_compatibility_forgets_the_control(explored):
    """Two domains have a factor for small controls, which ExoRL's relabelling takes to be 1."""
    domain, relabeller, episodes = explored
    task = domain.tasks[0]
    exact = relabeller.rewards(episodes[0])[task]
    zeroed = Relabeller(domain, [task], control=False).rewards(episodes[0])[task]
    if domain.name in ("cartpole", "point_mass_maze"):
        assert (zeroed >= exact).all()
        assert zeroed.sum() > exact.sum() * 1.02
    else:
        np.testing.assert_array_equal(zeroed, exact)


def test_rewards_depend_on_their_own_row_alone(explored):
    """On states that no simulation reaches, in any order."""
    domain, relabeller, _ = explored
    generator, rows = np.random.default_rng(0), 21
    episode = replace(
        explored[2][0],
        observation=np.zeros((rows, domain.observation_dim), np.float32),
        action=generator.uniform(-1, 1, (rows, domain.action_dim)).astype(np.float32),
        physics=generator.normal(size=(rows, domain.physics_dim)),
    )
    order = np.append(0, 1 + generator.permutation(rows - 1))
    shuffled = replace(episode, action=episode.action[order], physics=episode.physics[order])
    rewards, rewards_shuffled = relabeller.rewards(episode), relabeller.rewards(shuffled)
    for task in domain.tasks:
        np.testing.assert_array_equal(rewards[task][order], rewards_shuffled[task])
        assert ((rewards[task] >= 0) & (rewards[task] <= 1)).all()
    if domain.name == "walker":
        assert (rewards["stand"] >= rewards["walk"]).all()
        assert (rewards["walk"] >= rewards["run"]).all()


def test_relabelling_a_store_keeps_all_but_the_rewards(tmp_path):
    domain = DOMAINS["cartpole"]
    episodes = uniform_episodes(domain, domain.tasks, action_repeat=5, decisions=40)
    path = tmp_path / "store.h5"
    wrong = {domain.tasks[0]: np.full(len(episodes[0]) + 1, 0.5, np.float32)}
    stored = [StoredEpisode(episode, wrong, "rnd", 5, f"e{i}") for i, episode in enumerate(episodes)]
    write_store(path, StoreDescription(domain, "rnd", (domain.tasks[0],)), stored)
    assert relabel(RelabelConfig(path)) > 0
    with TrajectoryStore.open(path) as store:
        store.verify()
        assert store.tasks == domain.tasks
        assert store.sources == ["e0", "e1"]
        for number, task in enumerate(domain.tasks):
            again = store.episode(number)
            assert again.action_repeat == 5
            np.testing.assert_array_equal(again.rewards[task], episodes[number].reward[:, 0])
            np.testing.assert_array_equal(again.episode.physics, episodes[number].physics)
