"""Small stores of random numbers in the shape of cartpole episodes, for tests that need no physics."""

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
    random = np.random.default_rng(seed)
    labels = enumerate(zip(lengths, algorithms or ["td3"] * len(lengths), strict=True))
    episodes = (
        random_episode(random, length, f"episode_{number:06d}_{length}.npz", algorithm, action_repeat)
        for number, (length, algorithm) in labels
    )
    write_store(path, StoreDescription(DOMAIN, "test", (TASK,)), episodes)
    return path
