"""Readers of episodes, collections, stores and explored trials."""

import shutil
import zipfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.families.exploration import ExplorationStore
from agentic_ring.data.families.ranked_trials import RankingConfig, rank_trials
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import DataError
from agentic_ring.files.json_files import json_row, write_json
from data_prep.episode_files import (
    CollectionFolder,
    EpisodeLabel,
    episode_file,
    read_episode,
    read_labels,
    write_episode,
)
from data_prep.exorl import Provenance, fetch_episodes, unpack_episodes
from data_prep.explore import ExploreConfig, explore
from tests.data.synthetic import random_store
from tests.trust.file_readers.reader import FileReader

DOMAIN = DOMAINS["cartpole"]


def _episode(folder: Path) -> Path:
    random, rows = np.random.default_rng(0), 4
    episode = Episode(
        random.normal(size=(rows, DOMAIN.observation_dim)).astype(np.float32),
        random.uniform(-1, 1, (rows, DOMAIN.action_dim)).astype(np.float32),
        random.uniform(size=(rows, 1)).astype(np.float32),
        np.ones((rows, 1), np.float32),
        random.normal(size=(rows, DOMAIN.physics_dim)),
    )
    return write_episode(folder, 0, episode)


def _read_episode(path: Path) -> Any:
    try:
        return read_episode(episode_file(path), DOMAIN)
    except DataError as error:  # the conversion lists file and reason
        raise DataError(f"{path}: {error}") from error


def _stored_episode(folder: Path) -> Path:
    path = _episode(folder)
    with np.load(path) as arrays:
        np.savez(path, **arrays)
    return path


def _archive(folder: Path) -> Path:
    path = folder / "rnd.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"buffer/episode_{number:06d}_3.npz", bytes([number]) * 300)
        archive.writestr("video/0.mp4", b"0")
    return path


def _unpack(path: Path) -> Any:
    buffer = path.with_name("buffer")
    shutil.rmtree(buffer, ignore_errors=True)
    unpack_episodes(path, buffer)
    return {file.name: file.read_bytes() for file in sorted(buffer.iterdir())}


def _record(folder: Path) -> Path:
    path = folder / "exorl" / "walker" / "rnd" / "download.json"
    write_json(path, asdict(Provenance("http://127.0.0.1:9/walker/rnd.zip", 1000, "00", 3)))
    return path


def _fetch(path: Path) -> Any:
    return fetch_episodes(path.parents[3], "http://127.0.0.1:9", "walker", "rnd")


def _settings() -> dict[str, Any]:
    return {"domain": "walker", "tasks": ["run"], "seed": 1, "action_repeat": None}


def _collection(folder: Path) -> Path:
    CollectionFolder(folder).begin(_settings())
    return folder / "collection.json"


def _labels(folder: Path) -> Path:
    labels = [
        EpisodeLabel(f"episode_{n:06d}_3.npz", n, "td3", "ours", "td3", n // 2, 2, "walker_run", 3, 0.1)
        for n in range(6)
    ]
    (folder / "episodes.jsonl").write_text("".join(json_row(asdict(label)) for label in labels))
    return folder / "episodes.jsonl"


def _state() -> Any:
    return {
        "weights": np.arange(12, dtype=np.float32).reshape(3, 4),
        "step": np.int64(7),
        "none": np.zeros(0),
    }


def _learner(folder: Path) -> Path:
    CollectionFolder(folder)._save_state("td3", 2, _state())
    return folder / "resume" / "td3_000002.npz"


def _load_learner(path: Path) -> Any:
    return CollectionFolder(path.parents[1]).load_state("td3", 2, _state())


def _store(folder: Path) -> Path:
    return random_store(folder / "store.h5", [3, 5])


def _read_store(path: Path, verify: bool) -> Any:
    with TrajectoryStore.open(path) as store:
        if verify:
            store.verify()
        return [store.domain.name, store.collector, list(store.episodes())]


_RANKING = RankingConfig(goals=2, demonstrations=1)


@cache
def _explored() -> bytes:
    with TemporaryDirectory() as folder:
        return explore(ExploreConfig("point_mass", 300, data=Path(folder))).read_bytes()


def _exploration(folder: Path) -> Path:
    (folder / "explored.h5").write_bytes(_explored())
    return folder / "explored.h5"


def _read_exploration(path: Path) -> Any:
    with ExplorationStore.open(path) as store:
        return [store.family.name, store.seed, store.physics, store.actions]


def _ranking(folder: Path) -> Path:
    with ExplorationStore.open(_exploration(folder)) as store:
        rank_trials(store, _RANKING)
    return next(folder.glob("*ranked*"))


def _read_ranking(path: Path) -> Any:
    with ExplorationStore.open(path.parent / "explored.h5") as store:
        return rank_trials(store, _RANKING)


EPISODE_READERS = (
    FileReader("episode, compressed", _episode, _read_episode),
    FileReader("episode, stored", _stored_episode, _read_episode),
    FileReader("zip of episodes", _archive, _unpack),
    FileReader("download.json", _record, _fetch),
    FileReader("collection.json", _collection, lambda path: CollectionFolder(path.parent).begin(_settings())),
    FileReader("labels of a collection", _labels, lambda path: read_labels(path.parent), "rows"),
    FileReader("state of a learner", _learner, _load_learner),
    FileReader("store, verified", _store, lambda path: _read_store(path, True)),
    FileReader("store, not verified", _store, lambda path: _read_store(path, False)),
    FileReader("explored trials", _exploration, _read_exploration),
    FileReader("ranked trials", _ranking, _read_ranking),
)
