"""Rewards from physics are those that the environment paid, for every task of every domain."""

from dataclasses import replace

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import StoredEpisode, StoreDescription, TrajectoryStore, write_store
from agentic_ring.errors import DataError
from data_prep.relabel import Relabeller, main
from tests.data_prep.exploration import cut, uniform_episodes


@pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS.keys())
def test_rewards_are_those_that_the_environment_paid(domain):
    decisions = 150 if domain.name == "point_mass_maze" else 12  # which takes longer to find its reward
    episodes = uniform_episodes(domain, domain.tasks, action_repeat=5, decisions=decisions)
    relabeller = Relabeller(domain, domain.tasks)
    assert relabeller._physics.model.ntexdata < 1e6, "bytes of images that nothing draws"
    rewards = [relabeller.rewards(episode) for episode in episodes]
    for task, episode, found in zip(domain.tasks, episodes, rewards, strict=True):
        relabeller.check_physics(episode)
        assert found.keys() == set(domain.tasks)
        np.testing.assert_array_equal(found[task], episode.reward[:, 0], strict=True)
    first, task = episodes[0], domain.tasks[0]
    with pytest.raises(DataError, match=r"physics and observation disagree in row 0"):
        relabeller.check_physics(replace(first, physics=first.physics[::-1]))

    exact, zeroed = rewards[0][task], Relabeller(domain, [task], control=False).rewards(first)[task]
    if domain.name in ("cartpole", "point_mass_maze"):  # have a factor for small controls
        assert (zeroed >= exact).all()
        assert zeroed.sum() > exact.sum() * 1.02
    else:
        np.testing.assert_array_equal(zeroed, exact)

    # A reward depends on its own row alone, on states that no simulation reaches, in any order.
    generator, short = np.random.default_rng(0), cut(first, 0, 20)
    states = replace(short, physics=generator.normal(size=short.physics.shape))
    order = np.append(0, 1 + generator.permutation(20))
    shuffled = replace(states, action=states.action[order], physics=states.physics[order])
    rewards, shuffled_rewards = relabeller.rewards(states), relabeller.rewards(shuffled)
    for task in domain.tasks:
        np.testing.assert_array_equal(rewards[task][order], shuffled_rewards[task])
        assert ((rewards[task] >= 0) & (rewards[task] <= 1)).all()


def test_relabelling_a_store_keeps_all_but_the_rewards(tmp_path):
    domain = DOMAINS["cartpole"]
    episodes = uniform_episodes(domain, domain.tasks, action_repeat=5, decisions=10)
    path = tmp_path / "store.h5"
    wrong = {domain.tasks[0]: np.full(len(episodes[0]) + 1, 0.5, np.float32)}
    stored = [StoredEpisode(episode, wrong, "rnd", 5, f"e{i}") for i, episode in enumerate(episodes)]
    write_store(path, StoreDescription(domain, "rnd", (domain.tasks[0],)), stored)
    main(path)
    with TrajectoryStore.open(path) as store:
        store.verify()
        assert (store.tasks, store.sources) == (domain.tasks, ["e0", "e1"])
        for task, episode, again in zip(domain.tasks, episodes, store.episodes(), strict=True):
            assert again.action_repeat == 5
            np.testing.assert_array_equal(again.rewards[task], episode.reward[:, 0])
            np.testing.assert_array_equal(again.episode.physics, episode.physics)
