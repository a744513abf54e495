"""One reader of each kind of file: how a small valid file is written, and how it is read."""

import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.tasks import DOMAINS
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import DataError
from agentic_ring.files.run_folder import read_config, write_config
from agentic_ring.models.llama.config_file import read_config as read_llama_config
from agentic_ring.models.llama.tensor_files import SINGLE, TensorFiles
from agentic_ring.training.metrics_log import MetricsLog, read_metrics
from agentic_ring.training.train_config import TrainConfig
from data_prep.episodes.episode_files import episode_file, read_episode, write_episode
from data_prep.episodes.exorl_archive import unpack_episodes
from tests.data.synthetic import random_store
from tests.models.llama_cases import BASE

DOMAIN = DOMAINS["cartpole"]


@dataclass(frozen=True)
class FileReader:
    """A reader; ``make`` writes files into an empty folder and returns the one to damage.

    ``keeps`` says what it may return of a damaged file that it accepts: nothing but the original ("same");
    whole rows of it in order, of a log that a kill may have cut ("rows"); or, of formats of other programs,
    which have no digest, another value of the right types and ranges ("legal").
    """

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    keeps: Literal["same", "rows", "legal"] = "same"


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


def _archive(folder: Path) -> Path:
    path = folder / "rnd.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"buffer/episode_{number:06d}_3.npz", bytes([number]) * 300)
    return path


def _unpack(path: Path) -> Any:
    buffer = path.with_name("buffer")
    shutil.rmtree(buffer, ignore_errors=True)
    unpack_episodes(path, buffer)
    return {file.name: file.read_bytes() for file in sorted(buffer.iterdir())}


def _read_store(path: Path) -> Any:
    with TrajectoryStore.open(path) as store:
        store.verify()
        return [store.domain.name, store.collector, list(store.episodes())]


def _config(folder: Path) -> Path:
    write_config(folder, TrainConfig(100, 4))
    return folder / "config.json"


def _metrics(folder: Path) -> Path:
    log = MetricsLog(folder / "metrics.jsonl", 0)
    for step in range(1, 7):
        log.write(step, {"loss": 1 / step, "tokens_per_second": 1000.0 * step})
    log.close()
    return folder / "metrics.jsonl"


def _llama_config(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(BASE, indent=1))
    return folder / "config.json"


def _safetensors(folder: Path) -> Path:
    random = np.random.default_rng(0)
    save_file({"a": random.normal(size=(3, 4)).astype(np.float32)}, folder / SINGLE)
    return folder / SINGLE


def _read_tensors(path: Path) -> Any:
    files = TensorFiles(path.parent)
    files.check_names({"a"}, tied=False)
    if files.shape("a") != (3, 4):
        raise DataError(f"{path}: a has another shape than its model's")
    return files.read("a", (slice(None), slice(None)))


READERS = (
    FileReader("episode", _episode, _read_episode),
    FileReader("zip of episodes", _archive, _unpack),
    FileReader("store", lambda folder: random_store(folder / "store.h5", [3, 5]), _read_store),
    FileReader("configuration of a run", _config, lambda path: read_config(path.parent, TrainConfig)),
    FileReader("metrics.jsonl", _metrics, read_metrics, "rows"),
    FileReader("config.json of a LLaMA", _llama_config, lambda p: read_llama_config(p.parent), "legal"),
    FileReader("model.safetensors", _safetensors, _read_tensors, "legal"),
)
