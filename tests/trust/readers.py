"""Readers of files: how a small valid file is written, and how it is read."""

import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.profiler import ProfileData
from safetensors.numpy import save_file

from agentic_ring.data.domains import parse_task
from agentic_ring.data.hidden_tasks.exploration import ExplorationStore
from agentic_ring.data.hidden_tasks.ranked_trials import RankingConfig, rank_trials
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.text.packing import PackedRows
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import DataError
from agentic_ring.files.json_files import json_row, read_json_rows, write_json
from agentic_ring.files.run_folder import Stages, read_config, write_config
from agentic_ring.mesh import make_mesh
from agentic_ring.models.llama import load_pretrained
from agentic_ring.models.llama.config_file import read_config as read_llama_config
from agentic_ring.models.llama.config_file import usable_context
from agentic_ring.models.llama.tensor_files import INDEX, SINGLE, SafetensorsFiles
from agentic_ring.results.results_file import Figure, Results, read_results, write_results
from agentic_ring.results.rows import write_rows
from agentic_ring.rollouts.returns import EvaluationRecord, Rollout, read_record, write_record
from agentic_ring.run import load_config
from agentic_ring.training.loop import MetricsLog, read_metrics
from data_prep.conversations import conversation, records
from data_prep.episode_files import (
    CollectionFolder,
    EpisodeLabel,
    episode_file,
    read_episode,
    read_labels,
    write_episode,
)
from data_prep.exorl import fetch_episodes, unpack_episodes
from evals.retrieval.answers import Answer, PredictionLog, asked_questions
from evals.retrieval.documents import Document, LinePlan, read_cases, write_cases
from evals.retrieval.ladder_documents import LadderPlan
from evals.retrieval.reports import ruler_scores
from evals.retrieval.run import RetrievalConfig
from evals.utilisation.kernel_times import kernel_times
from evals.utilisation.projection import PUBLISHED, read_rates
from experiments.exorl.pipeline import resolve
from experiments.exorl.presets import PRESETS
from experiments.hidden_tasks.rollouts import kept_returns, read_returns
from tests.data.hidden_tasks.exploration import explored
from tests.data.synthetic import DOMAIN, random_episode, random_store
from tests.data.text.test_packing import numbered, packed, write
from tests.data.text.tokenizers_for_tests import byte_level
from tests.models.gguf_cases import gguf_fields, gguf_tensors, tokenizer_fields, write_gguf
from tests.models.llama_cases import BASE
from tests.models.tiny_llama import tiny_tokenizer

SETTINGS: dict[str, Any] = {"domain": "walker", "tasks": ["run"], "seed": 1, "action_repeat": None}
TENSORS = {name: np.arange(12, dtype=np.float32).reshape(3, 4) + 0.1 for name in ("a", "b.weight")}
STATE: Any = {"weights": TENSORS["a"], "step": np.int64(7), "no": np.zeros(0)}


@dataclass(frozen=True)
class FileReader:
    """A reader; ``make`` gets the path of ``file`` in a folder (by default ``name``), which is damaged.

    ``keeps`` says what it may return of a damaged file that it accepts: nothing but the original ("same");
    whole rows of it in order, of a log that a kill may have cut ("rows"); or, of formats of other programs,
    which have no digest, another value of the right types and ranges ("legal").
    """

    name: str
    read: Callable[[Path], Any]
    make: Callable[[Path], object]
    keeps: Literal["same", "rows", "legal"] = "same"
    file: str = ""


def _json(content: Any) -> Callable[[Path], object]:
    return lambda path: write_json(path, asdict(content))


def _in_folder(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: function(path.parent)


def _read_episode(path: Path) -> Any:
    try:
        return read_episode(episode_file(path), DOMAIN)
    except DataError as error:  # the conversion lists file and reason
        raise DataError(f"{path}: {error}") from error


def _episode(path: Path) -> Path:
    return write_episode(path.parent, 0, random_episode(np.random.default_rng(0), 3, "").episode)


def _stored_episode(path: Path) -> None:
    path = _episode(path)
    with np.load(path) as arrays:
        np.savez(path, **arrays)


def _archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"buffer/episode_{number:06d}_3.npz", bytes([number]) * 300)
        archive.writestr("video/0.mp4", b"0")


def _unpack(path: Path) -> Any:
    buffer = path.with_name("buffer")
    shutil.rmtree(buffer, ignore_errors=True)
    unpack_episodes(path, buffer)
    return {file.name: file.read_bytes() for file in sorted(buffer.iterdir())}


def _rows(*rows: Any) -> str:
    return "".join(json_row(asdict(row)) for row in rows)


def _labels(path: Path) -> None:
    names = [f"episode_{number:06d}_3.npz" for number in range(6)]
    task = 2, "walker_run", 3, 0.1
    path.write_text(
        _rows(*(EpisodeLabel(f, n, "td3", "ours", "td3", n // 2, *task) for n, f in enumerate(names)))
    )


def _read_store(path: Path, verify: bool = False) -> Any:
    with TrajectoryStore.open(path) as store:
        if verify:
            store.verify()
        return [store.domain.name, store.collector, list(store.episodes())]


def _explored(path: Path) -> None:
    path.write_bytes(explored("point_mass", 300).path.read_bytes())


def _read_explored(path: Path) -> Any:
    with ExplorationStore.open(path) as store:
        return [store.family.name, store.seed, store.physics, store.actions]


def _rank(path: Path) -> Any:
    with ExplorationStore.open(path.parent / "explored.h5") as store:
        return rank_trials(store, RankingConfig(goals=2, demonstrations=1))


def _ranking(path: Path) -> None:
    _explored(path.parent / "explored.h5")
    _rank(path)


def _run_config(path: Path) -> None:
    store = random_store(path.with_name("store.h5"), [12] * 6)
    preset, task = PRESETS["demo"], parse_task("cartpole_swingup")
    write_config(path.parent, resolve(preset, task, store, make_mesh(), "leaders", seed=0))


def _stages(folder: Path) -> Stages:
    stages = Stages()
    stages.keep_in(folder)
    return stages


def _metrics(path: Path) -> None:
    log = MetricsLog(path, 0)
    for step in range(1, 7):
        log.write(step, {"loss": 1 / step, "tokens_per_second": 1000.0 * step})
    log.close()


def _results(path: Path) -> None:
    figures = (Figure("loss", 0.5, "nats"), Figure("return", 10.0, "return", 9.0, 11.0, 4, 12.0))
    shown = {"devices": 1}, {"jax": "1"}, {"seed": 3}, {"training": 1.5}
    write_results(path, Results("python x.py", None, *shown, figures))


def _evaluation(path: Path) -> None:
    arrays = [np.full(shape, 0.1, np.float32) for shape in ((2, 3, 4), (2, 3, 1), (2, 3))]
    rollout = Rollout(*arrays[:3], physics=np.full((2, 4, 5), 0.1))
    write_record(path.parent, EvaluationRecord(np.array([1.0, 2.0]), np.array(["td3", "ou"]), rollout))


def _profile(path: Path) -> None:
    events = " ".join(f"events {{ metadata_id: 1 offset_ps: {n}0000 duration_ps: 5000 }}" for n in range(4))
    kernel = 'event_metadata { key: 1 value { id: 1 name: "gemm" } }'
    plane = f'planes {{ name: "/device:GPU:0" {kernel} lines {{ name: "Stream #1" {events} }} }}'
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(plane))


def _read_packed(path: Path) -> Any:
    with PackedRows.open(path) as rows:
        rows.verify()
        return [rows.description, [rows[number] for number in range(len(rows))]]


def _read_tokenizer(path: Path) -> Any:
    tokenizer = Tokenizer.load(path.parent)
    ids = tokenizer.encode_prompt("the user: and 42 others</s> é")
    return [ids, tokenizer.decode(ids), tokenizer.digest, tokenizer.chat_template, tokenizer.vocab_size]


def _tokenizer(path: Path) -> None:
    tiny_tokenizer().save(path.parent)
    if path.suffix == ".jinja":
        path.write_text("{% for m in messages %}{{ m.content }}{% endfor %} é")


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


def _conversations(path: Path) -> None:
    turns = [("human", "What is it? é"), ("gpt", "It is a line."), ("human", "Why?"), ("gpt", "Because.")]
    said = [{"from": speaker, "value": text} for speaker, text in turns]
    rows = [{"id": f"c{number}", "conversations": said} for number in range(4)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    array = json.dumps(rows, ensure_ascii=False, indent=1)
    path.write_text(lines if path.suffix == ".jsonl" else array, encoding="utf-8")


DOCUMENT = LinePlan("LRT", "4k", 7, 0, (0, 1), 2).build(5)
ASKED = asked_questions([DOCUMENT] * 2)


def _longchat(path: Path) -> None:
    """As LongChat publishes them: without our fields and digest."""
    write_cases(path, [DOCUMENT])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    ours = {"digest", "depth", "seed", "value_duplicates"}
    kept = [{name: row[name] for name in row if name not in ours} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def _predictions(path: Path) -> None:
    log = PredictionLog(path, ASKED)
    for each in ASKED:
        log.add(each.predicted(Answer("It is 42.", 100, 0.5), "", pairs_of_words=False))


def _llama_config(path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    fields = BASE | {"rope_scaling": scaling | {"original_max_position_embeddings": 32}}
    path.write_text(json.dumps(fields, indent=1))


def _read_tensors(path: Path) -> Any:
    files = SafetensorsFiles(path.parent)
    files.check_names(set(TENSORS), tied=False)
    for name in TENSORS:
        if files.shape(name) != (3, 4):
            raise DataError(f"{path}: {name} has another shape than its model's")
    return [files.read(name, (slice(None), slice(None))) for name in TENSORS]


def _read_gguf(path: Path) -> Any:
    tokenizer, model = Tokenizer.load(path), load_pretrained(path)
    ids = tokenizer.encode_prompt("the user: and 42 others</s> é")
    read = [ids, tokenizer.digest, tokenizer.chat_template, usable_context(path, 16, False), model.config]
    return [*read, *map(np.asarray, jax.tree.leaves(model))]


def _gguf(path: Path) -> None:
    fields = gguf_fields("two_key_heads") | tokenizer_fields(byte_level())
    write_gguf(path, fields, gguf_tensors("two_key_heads"), "Q8_0")


def _index(path: Path) -> None:
    files = {name: f"model-{name}.safetensors" for name in TENSORS}
    for name, file in files.items():
        save_file({name: TENSORS[name]}, path.with_name(file))
    path.write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": files}))


def _ruler(path: Path) -> None:
    path.write_text(json.dumps({"results": {"niah_single_1": {"4096,none": 0.5, "8192,none": -1}}}))


TOKENIZER = "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
TEXTS = packed(numbered([5, 3, 8, 2]), 8)
LINES = RetrievalConfig("line_retrieval", "m", False, "line", "LRT", 50, 0, 64)
LADDER = LadderPlan("LRT-NL", "4k", 0, 0, "lines", (("line", 2), ("count", 1)))
_read_llama = _in_folder(lambda folder: [read_llama_config(folder), usable_context(folder, 16, False)])
_read_lines = _in_folder(partial(read_config, kind=RetrievalConfig))
_read_profile = _in_folder(lambda folder: kernel_times(folder.parents[2]))
_begin = _in_folder(lambda folder: CollectionFolder(folder).begin(SETTINGS))
_store = partial(random_store, lengths=[3, 5])
READERS = [
    FileReader("episode, compressed", _read_episode, _episode, file="*.npz"),
    FileReader("episode, stored", _read_episode, _stored_episode, file="*.npz"),
    FileReader("zip of episodes", _unpack, _archive, file="rnd.zip"),
    FileReader(
        "download.json",
        lambda path: fetch_episodes(path.parents[3], "http://127.0.0.1:9", "walker", "rnd"),
        lambda path: write_json(path, {"url": "u", "bytes": 1000, "sha256": "00", "episodes": 3}),
        file="exorl/walker/rnd/download.json",
    ),
    FileReader("collection.json", _begin, _begin),
    FileReader("labels of a collection", _in_folder(read_labels), _labels, "rows", "episodes.jsonl"),
    FileReader(
        "state of a learner",
        lambda path: CollectionFolder(path.parents[1]).load_state("td3", 2, STATE),
        lambda path: CollectionFolder(path.parents[1])._save_state("td3", 2, STATE),
        file="resume/td3_000002.npz",
    ),
    FileReader("store, verified", partial(_read_store, verify=True), _store, file="store.h5"),
    FileReader("store, not verified", _read_store, _store, file="store.h5"),
    FileReader("explored trials", _read_explored, _explored, file="explored.h5"),
    FileReader("ranked trials", _rank, _ranking, file="*ranked*"),
    FileReader("configuration of a run", _in_folder(load_config), _run_config, file="config.json"),
    FileReader("configuration of line retrieval", _read_lines, _json(LINES), file="config.json"),
    FileReader(
        "stages.json",
        lambda path: _stages(path.parent).seconds,
        lambda path: _stages(path.parent)._add({"data": 1.5, "training": 300.25}),
    ),
    FileReader("metrics.jsonl", read_metrics, _metrics, "rows"),
    FileReader("results.json", read_results, _results),
    FileReader("evaluation.npz", _in_folder(read_record), _evaluation),
    FileReader(
        "returns of a rollout",
        lambda path: read_returns(path, 2),
        lambda path: kept_returns(path, 2, lambda: np.random.default_rng(0).random((2, 5))),
        file="returns.npz",
    ),
    FileReader("rates.csv", read_rates, lambda path: write_rows(path, [asdict(PUBLISHED)]), "legal"),
    FileReader("profile of kernels", _read_profile, _profile, "legal", "plugins/profile/1/host.xplane.pb"),
    FileReader("packed rows", _read_packed, lambda p: write(p, TEXTS, 8), file="train.h5"),
    *(FileReader(name, _read_tokenizer, _tokenizer, "legal") for name in TOKENIZER),
    FileReader("ShareGPT, an array", _read_conversations, _conversations, "legal", "conversations.json"),
    FileReader("ShareGPT, lines", _read_conversations, _conversations, "legal", "conversations.jsonl"),
    FileReader("own cases", read_cases, lambda path: write_cases(path, [DOCUMENT]), "rows", "4k.jsonl"),
    FileReader("LongChat's cases", read_cases, _longchat, "legal", "4k.jsonl"),
    FileReader(
        "predictions", lambda p: [*PredictionLog(p, ASKED).rows.values()], _predictions, "rows", "4k.jsonl"
    ),
    FileReader(
        "records of the ladder",
        lambda path: read_json_rows(path, Document, "give another folder"),
        lambda path: path.write_text(_rows(LADDER.build(20), LADDER.build(21))),
        *("rows", "4k.jsonl"),
    ),
    FileReader("results of lm-evaluation-harness", ruler_scores, _ruler, "legal", "harness.json"),
    FileReader("config.json of a LLaMA", _read_llama, _llama_config, "legal", "config.json"),
    FileReader(SINGLE, _read_tensors, lambda path: save_file(TENSORS, path), "legal"),
    FileReader("GGUF", _read_gguf, _gguf, "legal", "model.gguf"),
    FileReader("index of tensors", _read_tensors, _index, "legal", INDEX),
]
