"""Readers of episodes, stores and runs: how a small valid file is written, and how it is read."""

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from jax.profiler import ProfileData

from agentic_ring.data.chain_loader import ChainConfig
from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.families.exploration import ExplorationStore
from agentic_ring.data.families.ranked_trials import RankingConfig, rank_trials
from agentic_ring.data.store import Scaling, TrajectoryStore
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import DataError
from agentic_ring.files.json_files import json_row, write_json
from agentic_ring.files.run_folder import Stages, read_config, write_config
from agentic_ring.mesh import MeshShape
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.results_file import Figure, Results, read_results, write_results, write_rows
from agentic_ring.rollouts.returns import EvaluationRecord, Rollout, read_record, write_record
from agentic_ring.run import EvaluationConfig, RunConfig, load_config
from agentic_ring.training.loop import MetricsLog, read_metrics
from agentic_ring.training.optimizer import TrainConfig
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
from evals.retrieval.run import RetrievalConfig
from evals.utilisation.kernel_times import kernel_times
from evals.utilisation.projection import PUBLISHED, read_rates
from experiments.context_length import Point, read_point
from experiments.hidden_tasks.rollouts import kept_returns, read_returns
from tests.data.synthetic import random_store

Keeps = Literal["same", "rows", "legal"]
DOMAIN = DOMAINS["cartpole"]
RANKING = RankingConfig(goals=2, demonstrations=1)
SETTINGS: dict[str, Any] = {"domain": "walker", "tasks": ["run"], "seed": 1, "action_repeat": None}
STATE: Any = {
    "weights": np.arange(12, dtype=np.float32).reshape(3, 4),
    "step": np.int64(7),
    "no": np.zeros(0),
}


@dataclass(frozen=True)
class FileReader:
    """A reader; ``make`` writes files into an empty folder, and the one that ``file`` matches is damaged.

    ``keeps`` says what it may return of a damaged file that it accepts: nothing but the original ("same");
    whole rows of it in order, of a log that a kill may have cut ("rows"); or, of formats of other programs,
    which have no digest, another value of the right types and ranges ("legal").
    """

    name: str
    file: str
    read: Callable[[Path], Any]
    keeps: Keeps
    make: Callable[[Path], object]


READERS: list[FileReader] = []


def reads(name: str, file: str, read: Callable[[Path], Any], keeps: Keeps = "same") -> Callable[..., Any]:
    """Marks a function that makes the file of a reader."""

    def register(make: Callable[[Path], object]) -> Callable[[Path], object]:
        READERS.append(FileReader(name, file, read, keeps, make))
        return make

    return register


# Episodes, collections, stores and explored trials.


def _read_episode(path: Path) -> Any:
    try:
        return read_episode(episode_file(path), DOMAIN)
    except DataError as error:  # the conversion lists file and reason
        raise DataError(f"{path}: {error}") from error


@reads("episode, compressed", "*.npz", _read_episode)
def _episode(folder: Path) -> Path:
    random, rows = np.random.default_rng(0), 4
    observation = random.normal(size=(rows, DOMAIN.observation_dim)).astype(np.float32)
    action = random.uniform(-1, 1, (rows, DOMAIN.action_dim)).astype(np.float32)
    reward = random.uniform(size=(rows, 1)).astype(np.float32)
    physics = random.normal(size=(rows, DOMAIN.physics_dim))
    return write_episode(folder, 0, Episode(observation, action, reward, np.ones_like(reward), physics))


@reads("episode, stored", "*.npz", _read_episode)
def _stored_episode(folder: Path) -> None:
    path = _episode(folder)
    with np.load(path) as arrays:
        np.savez(path, **arrays)


def _unpack(path: Path) -> Any:
    buffer = path.with_name("buffer")
    shutil.rmtree(buffer, ignore_errors=True)
    unpack_episodes(path, buffer)
    return {file.name: file.read_bytes() for file in sorted(buffer.iterdir())}


@reads("zip of episodes", "rnd.zip", _unpack)
def _archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / "rnd.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"buffer/episode_{number:06d}_3.npz", bytes([number]) * 300)
        archive.writestr("video/0.mp4", b"0")


@reads(
    "download.json",
    "exorl/walker/rnd/download.json",
    lambda path: fetch_episodes(path.parents[3], "http://127.0.0.1:9", "walker", "rnd"),
)
def _download(folder: Path) -> None:
    provenance = Provenance("http://127.0.0.1:9/walker/rnd.zip", 1000, "00", 3)
    write_json(folder / "exorl" / "walker" / "rnd" / "download.json", asdict(provenance))


@reads("collection.json", "collection.json", lambda path: CollectionFolder(path.parent).begin(SETTINGS))
def _collection(folder: Path) -> None:
    CollectionFolder(folder).begin(SETTINGS)


@reads("labels of a collection", "episodes.jsonl", lambda path: read_labels(path.parent), "rows")
def _labels(folder: Path) -> None:
    labels = (
        EpisodeLabel(f"episode_{n:06d}_3.npz", n, "td3", "ours", "td3", n // 2, 2, "walker_run", 3, 0.1)
        for n in range(6)
    )
    (folder / "episodes.jsonl").write_text("".join(json_row(asdict(label)) for label in labels))


@reads(
    "state of a learner",
    "resume/td3_000002.npz",
    lambda path: CollectionFolder(path.parents[1]).load_state("td3", 2, STATE),
)
def _learner(folder: Path) -> None:
    CollectionFolder(folder)._save_state("td3", 2, STATE)


def _read_store(path: Path) -> Any:
    with TrajectoryStore.open(path) as store:
        return [store.domain.name, store.collector, list(store.episodes())]


def _verify_store(path: Path) -> Any:
    with TrajectoryStore.open(path) as store:
        store.verify()
    return _read_store(path)


@reads("store, verified", "store.h5", _verify_store)
@reads("store, not verified", "store.h5", _read_store)
def _store(folder: Path) -> None:
    random_store(folder / "store.h5", [3, 5])


@cache
def _explored() -> bytes:
    with TemporaryDirectory() as folder:
        return explore(ExploreConfig("point_mass", 300, data=Path(folder))).read_bytes()


def _read_exploration(path: Path) -> Any:
    with ExplorationStore.open(path) as store:
        return [store.family.name, store.seed, store.physics, store.actions]


@reads("explored trials", "explored.h5", _read_exploration)
def _exploration(folder: Path) -> None:
    (folder / "explored.h5").write_bytes(_explored())


def _rank(path: Path) -> Any:
    with ExplorationStore.open(path.parent / "explored.h5") as store:
        return rank_trials(store, RANKING)


@reads("ranked trials", "*ranked*", _rank)
def _ranking(folder: Path) -> None:
    _exploration(folder)
    _rank(folder / "any")


# Runs, their evaluations, and measured rates.


@reads("configuration of a run", "config.json", lambda path: load_config(path.parent))
def _run_config(folder: Path) -> None:
    stack = TransformerConfig(width=8, layers=1, heads=2, ffn_width=16)
    config = RunConfig(
        task="cartpole_swingup",
        preset="tiny",
        store="data/store/cartpole-mix.h5",
        mesh=MeshShape(),
        chains=ChainConfig("swingup", 4, 2),
        scaling=Scaling((0.0,) * 5, (1.0,) * 5, 2.0, 100.0),
        model=AgenticTransformerConfig(stack, 5, 1, 500),
        training=TrainConfig(100, 4),
        evaluation=EvaluationConfig(4),
        target=100.5,
    )
    write_config(folder, config)


@reads(
    "configuration of line retrieval", "config.json", lambda path: read_config(path.parent, RetrievalConfig)
)
def _line_config(folder: Path) -> None:
    write_config(folder, RetrievalConfig("line_retrieval", "m", False, "line", "LRT", 50, 0, 64))


def _stages_in(folder: Path) -> Stages:
    stages = Stages()
    stages.keep_in(folder)
    return stages


@reads("stages.json", "stages.json", lambda path: _stages_in(path.parent).seconds)
def _stages(folder: Path) -> None:
    _stages_in(folder)._add({"data": 1.5, "training": 300.25})


@reads("metrics.jsonl", "metrics.jsonl", read_metrics, "rows")
def _metrics(folder: Path) -> None:
    log = MetricsLog(folder / "metrics.jsonl", 0)
    for step in range(1, 7):
        log.write(step, {"loss": 1 / step, "tokens_per_second": 1000.0 * step})
    log.close()


@reads("results.json", "results.json", read_results)
def _results(folder: Path) -> None:
    figures = (Figure("loss", 0.5, "nats"), Figure("return", 10.0, "return", 9.0, 11.0, 4, 12.0))
    shown = {"devices": 1}, {"jax": "1"}, {"seed": 3}, {"training": 1.5}
    write_results(folder / "results.json", Results("python x.py", None, *shown, figures))


@reads("evaluation.npz", "evaluation.npz", lambda path: read_record(path.parent))
def _evaluation(folder: Path) -> None:
    random = np.random.default_rng(0)
    shapes = (2, 3, 4), (2, 3, 1), (2, 3)
    rollout = Rollout(
        *(random.normal(size=shape).astype(np.float32) for shape in shapes), random.normal(size=(2, 4, 5))
    )
    write_record(folder, EvaluationRecord(np.array([1.0, 2.0]), np.array(["td3", "ou"]), rollout))


@reads("returns of a rollout", "returns.npz", lambda path: read_returns(path, 2))
def _returns(folder: Path) -> None:
    kept_returns(folder / "returns.npz", 2, lambda: np.random.default_rng(0).random((2, 5)))


@reads("point of a context curve", "point.json", read_point)
def _point(folder: Path) -> None:
    point = Point("run", 2, 4, 100, 1000, 2000, 1.5, 2.5, (1.0, 2.5))
    write_json(folder / "point.json", asdict(point))


@reads("rates.csv", "rates.csv", read_rates, "legal")
def _rates(folder: Path) -> None:
    write_rows(folder / "rates.csv", [asdict(PUBLISHED)])


@reads(
    "profile of kernels",
    "plugins/profile/1/host.xplane.pb",
    lambda path: kernel_times(path.parents[3]),
    "legal",
)
def _profile(folder: Path) -> None:
    (folder / "plugins" / "profile" / "1").mkdir(parents=True)
    events = " ".join(f"events {{ metadata_id: 1 offset_ps: {n}0000 duration_ps: 5000 }}" for n in range(4))
    kernel = 'event_metadata { key: 1 value { id: 1 name: "gemm" } }'
    plane = f'planes {{ name: "/device:GPU:0" {kernel} lines {{ name: "Stream #1" {events} }} }}'
    content = ProfileData.text_proto_to_serialized_xspace(plane)
    (folder / "plugins" / "profile" / "1" / "host.xplane.pb").write_bytes(content)
