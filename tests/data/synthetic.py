"""Small stores of random numbers in the shape of cartpole episodes, for tests that need no physics."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import StoredEpisode, StoreDescription, write_store
from agentic_ring.data.trajectories import Episode

DOMAIN = DOMAINS["cartpole"]
TASK, OTHER_TASK = TASKS = ("swingup", "swingup_sparse")


def random_episode(
    random: np.random.Generator, length: int, source: str, algorithm: str = "td3", action_repeat: int = 1
) -> StoredEpisode:
    """An episode of ``length`` transitions; rewards of both tasks add up to 1."""
    rows = length + 1
    drawn = random.uniform(-1, 1, (-(-length // action_repeat), DOMAIN.action_dim))
    action = np.zeros((rows, DOMAIN.action_dim), np.float32)
    action[1:] = drawn.repeat(action_repeat, axis=0)[:length]
    reward = random.uniform(0, 1, (rows, 1)).astype(np.float32)
    reward[0] = 0
    episode = Episode(
        observation=random.normal(size=(rows, DOMAIN.observation_dim)).astype(np.float32),
        action=action,
        reward=reward,
        discount=np.ones((rows, 1), np.float32),
        physics=random.normal(size=(rows, DOMAIN.physics_dim)),
    )
    rewards = {TASK: reward[:, 0], OTHER_TASK: 1 - reward[:, 0]}
    return StoredEpisode(episode, rewards, algorithm, action_repeat, source)


def random_store(
    path: Path, lengths: list[int], seed: int = 0, algorithms: list[str] | None = None, action_repeat: int = 1
) -> Path:
    """Writes a store with one episode for each of ``lengths`` (transitions) and rewards of ``TASK``."""
    episodes = _random_episodes(lengths, seed, algorithms or ["td3"] * len(lengths), action_repeat)
    write_store(path, StoreDescription(DOMAIN, "test", (TASK,)), episodes)
    return path


def two_task_store(path: Path, lengths: list[int], second: float = 3.0) -> Path:
    """The same with rewards of both of cartpole's tasks; the second rewards where the first does not."""

    def rewarded(episode: StoredEpisode, share: float) -> StoredEpisode:
        first = episode.rewards[TASK] * np.float32(share)
        other = np.float32(second) * (episode.rewards[TASK] - first)
        return replace(episode, rewards={TASK: first, OTHER_TASK: other})

    episodes = _random_episodes(lengths, 0, ["td3"] * len(lengths), 1)
    both = (rewarded(episode, number / len(lengths)) for number, episode in enumerate(episodes))
    write_store(path, StoreDescription(DOMAIN, "test", TASKS), both)
    return path


def _random_episodes(
    lengths: list[int], seed: int, algorithms: list[str], action_repeat: int
) -> Iterator[StoredEpisode]:
    random = np.random.default_rng(seed)
    for number, (length, algorithm) in enumerate(zip(lengths, algorithms, strict=True)):
        source = f"episode_{number:06d}_{length}.npz"
        yield random_episode(random, length, source, algorithm, action_repeat)
