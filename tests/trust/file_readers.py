"""Every reader of files: how a small valid file is written, and how it is read.

``keeps`` says what a reader may return of a damaged file that it accepts: nothing but the original ("same");
whole rows of it in order, of a log that a kill may have cut ("rows"); or, of formats of other programs, which
have no digest, another value of the right types and ranges ("legal").
"""

import gzip
import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from agentic_ring.data.chain_loader import ChainConfig
from agentic_ring.data.families.exploration import ExplorationStore
from agentic_ring.data.families.ranked_trials import RankingConfig, rank_trials
from agentic_ring.data.scaling import Scaling
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.tasks import DOMAINS
from agentic_ring.data.text.packed_file import PackedRows
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import DataError
from agentic_ring.files.json_files import json_row, read_json_rows, write_json
from agentic_ring.files.run_folder import Stages, read_config, write_config
from agentic_ring.mesh import MeshShape
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.llama.config_file import read_config as read_llama_config
from agentic_ring.models.llama.config_file import usable_context
from agentic_ring.models.llama.tensor_files import INDEX, SINGLE, TensorFiles
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.run import EvaluationConfig, RunConfig, load_config
from agentic_ring.training.metrics_log import MetricsLog, read_metrics
from agentic_ring.training.train_config import TrainConfig
from data_prep.collection.collection_folder import CollectionFolder
from data_prep.conversations.conversation_files import conversation, records
from data_prep.episodes.episode_files import episode_file, read_episode, write_episode
from data_prep.episodes.episode_labels import EpisodeLabel, read_labels
from data_prep.episodes.exorl_archive import Provenance, fetch_episodes, unpack_episodes
from data_prep.explore import ExploreConfig, explore
from evals.common.results import Figure, Results, read_results, write_results
from evals.common.rows import write_rows
from evals.in_context.rollouts import CueRolloutConfig, kept_returns
from evals.ladder_tasks.documents import LadderDocument, LadderPlan
from evals.ladder_tasks.report import ruler_scores
from evals.lines.evaluation_run import LineRunConfig
from evals.lines.longchat_files import read_cases, write_cases
from evals.lines.longchat_prompt import HEADER, LineDocument, LineQuestion, line_text, question_text
from evals.lines.prediction_log import Prediction, PredictionLog
from evals.rollouts.evaluation_record import EvaluationRecord, Rollout, read_record, write_record
from evals.utilisation.kernel_times import kernel_times
from evals.utilisation.rates import PUBLISHED, read_rates
from experiments.context_length import Point, read_point, write_point
from tests.data.synthetic import random_store
from tests.data.text.test_packing import numbered, packed
from tests.data.text.test_packing import write as write_packed
from tests.models.llama_cases import BASE
from tests.models.tiny_llama import tiny_tokenizer

DOMAIN = DOMAINS["cartpole"]
SCALING = Scaling((0.0,) * 5, (1.0,) * 5, 2.0, 100.0)


@dataclass(frozen=True)
class FileReader:
    """A reader; ``make`` writes files into an empty folder and returns the one to damage."""

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


def _packed(folder: Path) -> Path:
    return write_packed(folder / "train.h5", packed(numbered([5, 3, 8, 2]), 8), 8)


def _read_packed(path: Path) -> Any:
    with PackedRows.open(path) as rows:
        rows.verify()
        return [rows.description, [rows[number] for number in range(len(rows))]]


def _tokenizer(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        tiny_tokenizer().save(folder)
        return folder / name

    return make


def _chat_template(folder: Path) -> Path:
    tiny_tokenizer().save(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %} é")
    return folder / "chat_template.jinja"


def _read_tokenizer(path: Path) -> Any:
    tokenizer = Tokenizer.load(path.parent)
    ids = tokenizer.encode_prompt("the user: and 42 others</s> é")
    return [ids, tokenizer.decode(ids), tokenizer.digest, tokenizer.chat_template, tokenizer.vocab_size]


def _conversations(count: int) -> list[dict[str, Any]]:
    turns = [("human", "What is it? é"), ("gpt", "It is a line."), ("human", "Why?"), ("gpt", "Because.")]
    said = [{"from": speaker, "value": text} for speaker, text in turns]
    return [{"id": f"c{number}", "conversations": said} for number in range(count)]


def _sharegpt(folder: Path) -> Path:
    path = folder / "conversations.json"
    path.write_text(json.dumps(_conversations(4), ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def _sharegpt_lines(folder: Path) -> Path:
    path = folder / "conversations.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in _conversations(4)))
    return path


def _read_conversations(path: Path) -> Any:
    found: list[Any] = []
    for record in records(path):
        try:
            if record.fault:
                raise DataError(record.fault)
            found.append(conversation(record.value))
        except DataError as error:  # listed by file and line
            found.append(f"fault: {type(error).__name__}")
    return found


def _document() -> LineDocument:
    keys = [f"key-{number}" for number in range(5)]
    text = HEADER + "".join(line_text(key, 100 + n) for n, key in enumerate(keys))
    asked = tuple(LineQuestion(question_text(keys[n]), keys[n], n, n / 5, 100 + n, 0) for n in (1, 3))
    return LineDocument(text, 5, asked, 7)


def _own_cases(folder: Path) -> Path:
    write_cases(folder / "4k.jsonl", [_document()])
    return folder / "4k.jsonl"


def _longchat(folder: Path) -> Path:
    """As LongChat publishes them: without our fields and digest."""
    path = _own_cases(folder)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    ours = ("digest", "depth", "seed", "value_duplicates")
    path.write_text(
        "".join(json.dumps({k: v for k, v in row.items() if k not in ours}) + "\n" for row in rows)
    )
    return path


_PROMPTS = ["a", "b", "c", "d"]


def _predictions(folder: Path) -> Path:
    log = PredictionLog(folder / "4k.jsonl", _PROMPTS, Prediction)
    for case, prompt in enumerate(_PROMPTS):
        log.add(Prediction(case, 0, "key", 0.1, 42, 0, "It is 42.", 42, 42, 100, 0.5, prompt, None))
    return folder / "4k.jsonl"


def _ladder_records(folder: Path) -> Path:
    plan = LadderPlan("LRT-NL", "4k", 0, 0, "lines", (("line", 2), ("count", 1)))
    (folder / "4k.jsonl").write_text(json_row(asdict(plan.build(20))) + json_row(asdict(plan.build(21))))
    return folder / "4k.jsonl"


def _ruler_results(folder: Path) -> Path:
    results = {"niah_single_1": {"4096,none": 0.5, "8192,none": -1}}
    (folder / "harness.json").write_text(json.dumps({"results": results}))
    return folder / "harness.json"


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
    write_config(folder, LineRunConfig("m", False, "local", False, None, "LRT", 50, 10, 0, 64))
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


_ROLLOUT = CueRolloutConfig("point_mass", cues=4, tasks=2, trials=5)


def _returns(folder: Path) -> Path:
    kept_returns(folder / "returns.npz", _ROLLOUT, lambda: np.random.default_rng(0).random((2, 5)))
    return folder / "returns.npz"


def _read_returns(path: Path) -> Any:
    def absent() -> np.ndarray:
        raise DataError(f"{path} does not exist")

    return kept_returns(path, _ROLLOUT, absent)


def _point(folder: Path) -> Path:
    write_point(folder / "point.json", Point("run", 2, 4, 100, 1000, 2000, 1.5, 2.5, (1.0, 2.5)))
    return folder / "point.json"


def _llama_config(folder: Path) -> Path:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    fields = BASE | {"rope_scaling": scaling | {"original_max_position_embeddings": 32}}
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    return folder / "config.json"


def _read_llama(path: Path) -> Any:
    config = read_llama_config(path.parent)
    return [config, usable_context(path.parent, 16, False)]


@cache
def _tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=(3, 4)).astype(np.float32) for name in ("a", "b.weight")}


def _safetensors(folder: Path) -> Path:
    save_file(_tensors(), folder / SINGLE)
    return folder / SINGLE


def _index(folder: Path) -> Path:
    for number, (name, tensor) in enumerate(_tensors().items()):
        save_file({name: tensor}, folder / f"model-{number}.safetensors")
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(_tensors())}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": files}))
    return folder / INDEX


def _read_tensors(path: Path) -> Any:
    files = TensorFiles(path.parent)
    files.check_names(set(_tensors()), tied=False)
    found = []
    for name in _tensors():
        if files.shape(name) != (3, 4):
            raise DataError(f"{path}: {name} has another shape than its model's")
        found.append(files.read(name, (slice(None), slice(None))))
    return found


def _rates(folder: Path) -> Path:
    write_rows(folder / "rates.csv", [asdict(PUBLISHED)])
    return folder / "rates.csv"


def _profile(folder: Path) -> Path:
    path = folder / "plugins" / "profile" / "1" / "host.trace.json.gz"
    path.parent.mkdir(parents=True)
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "/device:GPU:0"}, "pid": 1},
        {"ph": "M", "name": "thread_name", "args": {"name": "Stream #1"}, "pid": 1, "tid": 1},
        *[
            {"ph": "X", "name": f"gemm.{n}", "ts": 10 * n, "dur": 5, "pid": 1, "tid": 1, "args": {}}
            for n in range(4)
        ],
    ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode(), mtime=0))
    return path


_RANKING = RankingConfig(goals=2, leaders=1)


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


READERS = (
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
    FileReader("packed rows", _packed, _read_packed),
    FileReader("tokenizer.json", _tokenizer("tokenizer.json"), _read_tokenizer, "legal"),
    FileReader("tokenizer_config.json", _tokenizer("tokenizer_config.json"), _read_tokenizer, "legal"),
    FileReader("generation_config.json", _tokenizer("generation_config.json"), _read_tokenizer, "legal"),
    FileReader("chat_template.jinja", _chat_template, _read_tokenizer, "legal"),
    FileReader("ShareGPT, an array", _sharegpt, _read_conversations, "legal"),
    FileReader("ShareGPT, lines", _sharegpt_lines, _read_conversations, "legal"),
    FileReader("LongChat's cases", _longchat, read_cases, "legal"),
    FileReader("own cases", _own_cases, read_cases, "rows"),
    FileReader(
        "predictions",
        _predictions,
        lambda path: list(PredictionLog(path, _PROMPTS, Prediction).rows.values()),
        "rows",
    ),
    FileReader(
        "records of the ladder",
        _ladder_records,
        lambda path: read_json_rows(path, LadderDocument, "give another folder"),
        "rows",
    ),
    FileReader("results of lm-evaluation-harness", _ruler_results, ruler_scores, "legal"),
    FileReader("configuration of a run", _run_config, lambda path: load_config(path.parent)),
    FileReader(
        "configuration of line retrieval", _line_config, lambda path: read_config(path.parent, LineRunConfig)
    ),
    FileReader("stages.json", _stages, _read_stages),
    FileReader("metrics.jsonl", _metrics, read_metrics, "rows"),
    FileReader("results.json", _results, read_results),
    FileReader("evaluation.npz", _evaluation, lambda path: read_record(path.parent)),
    FileReader("returns of a rollout", _returns, _read_returns),
    FileReader("point of a context curve", _point, read_point),
    FileReader("config.json of a LLaMA", _llama_config, _read_llama, "legal"),
    FileReader("model.safetensors", _safetensors, _read_tensors, "legal"),
    FileReader("index of tensors", _index, _read_tensors, "legal"),
    FileReader("rates.csv", _rates, read_rates, "legal"),
    FileReader("profile of kernels", _profile, lambda path: kernel_times(path.parents[3])),
)
