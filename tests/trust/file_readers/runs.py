"""Readers of the files of a run and of its evaluations, and of measured rates."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from jax.profiler import ProfileData

from agentic_ring.data.chain_loader import ChainConfig
from agentic_ring.data.scaling import Scaling
from agentic_ring.files.run_folder import Stages, read_config, write_config
from agentic_ring.mesh import MeshShape
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.results_file import Figure, Results, read_results, write_results
from agentic_ring.results.rows import write_rows
from agentic_ring.rollouts.evaluation_record import EvaluationRecord, Rollout, read_record, write_record
from agentic_ring.run import EvaluationConfig, RunConfig, load_config
from agentic_ring.training.loop import MetricsLog, read_metrics
from agentic_ring.training.optimizer import TrainConfig
from evals.retrieval.run import RetrievalConfig
from evals.utilisation.kernel_times import kernel_times
from evals.utilisation.projection import PUBLISHED, read_rates
from experiments.context_length import Point, read_point, write_point
from experiments.hidden_tasks.rollouts import kept_returns, read_returns
from tests.trust.file_readers.reader import FileReader

SCALING = Scaling((0.0,) * 5, (1.0,) * 5, 2.0, 100.0)


def _run_config(folder: Path) -> Path:
    stack = TransformerConfig(width=8, layers=1, heads=2, ffn_width=16)
    config = RunConfig(
        task="cartpole_swingup",
        preset="tiny",
        store="data/store/cartpole-mix.h5",
        mesh=MeshShape(),
        chains=ChainConfig("swingup", 4, 2),
        scaling=SCALING,
        model=AgenticTransformerConfig(stack, 5, 1, 500),
        training=TrainConfig(100, 4),
        evaluation=EvaluationConfig(4),
        target=100.5,
    )
    write_config(folder, config)
    return folder / "config.json"


def _line_config(folder: Path) -> Path:
    write_config(folder, RetrievalConfig("line_retrieval", "m", False, "line", "LRT", 50, 0, 64))
    return folder / "config.json"


def _stages(folder: Path) -> Path:
    stages = Stages()
    stages.keep_in(folder)
    stages._add({"data": 1.5, "training": 300.25})
    return folder / "stages.json"


def _read_stages(path: Path) -> Any:
    stages = Stages()
    stages.keep_in(path.parent)
    return stages.seconds


def _metrics(folder: Path) -> Path:
    log = MetricsLog(folder / "metrics.jsonl", 0)
    for step in range(1, 7):
        log.write(step, {"loss": 1 / step, "tokens_per_second": 1000.0 * step})
    log.close()
    return folder / "metrics.jsonl"


def _results(folder: Path) -> Path:
    figures = [Figure("loss", 0.5, "nats"), Figure("return", 10.0, "return", 9.0, 11.0, 4, 12.0)]
    shown = {"devices": 1}, {"jax": "1"}, {"seed": 3}, {"training": 1.5}
    write_results(folder / "results.json", Results("python x.py", None, *shown, tuple(figures)))
    return folder / "results.json"


def _evaluation(folder: Path) -> Path:
    random = np.random.default_rng(0)
    rollout = Rollout(
        random.normal(size=(2, 3, 4)).astype(np.float32),
        random.normal(size=(2, 3, 1)).astype(np.float32),
        random.normal(size=(2, 3)).astype(np.float32),
        random.normal(size=(2, 4, 5)),
    )
    write_record(folder, EvaluationRecord(np.array([1.0, 2.0]), np.array(["td3", "ou"]), rollout))
    return folder / "evaluation.npz"


def _returns(folder: Path) -> Path:
    kept_returns(folder / "returns.npz", 2, lambda: np.random.default_rng(0).random((2, 5)))
    return folder / "returns.npz"


def _point(folder: Path) -> Path:
    write_point(folder / "point.json", Point("run", 2, 4, 100, 1000, 2000, 1.5, 2.5, (1.0, 2.5)))
    return folder / "point.json"


def _rates(folder: Path) -> Path:
    write_rows(folder / "rates.csv", [asdict(PUBLISHED)])
    return folder / "rates.csv"


def _profile(folder: Path) -> Path:
    path = folder / "plugins" / "profile" / "1" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    events = " ".join(f"events {{ metadata_id: 1 offset_ps: {n}0000 duration_ps: 5000 }}" for n in range(4))
    kernel = 'event_metadata { key: 1 value { id: 1 name: "gemm" } }'
    plane = f'planes {{ name: "/device:GPU:0" {kernel} lines {{ name: "Stream #1" {events} }} }}'
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(plane))
    return path


RUN_READERS = (
    FileReader("configuration of a run", _run_config, lambda path: load_config(path.parent)),
    FileReader(
        "configuration of line retrieval",
        _line_config,
        lambda path: read_config(path.parent, RetrievalConfig),
    ),
    FileReader("stages.json", _stages, _read_stages),
    FileReader("metrics.jsonl", _metrics, read_metrics, "rows"),
    FileReader("results.json", _results, read_results),
    FileReader("evaluation.npz", _evaluation, lambda path: read_record(path.parent)),
    FileReader("returns of a rollout", _returns, lambda path: read_returns(path, 2)),
    FileReader("point of a context curve", _point, read_point),
    FileReader("rates.csv", _rates, read_rates, "legal"),
    FileReader("profile of kernels", _profile, lambda path: kernel_times(path.parents[3]), "legal"),
)
