"""Readers of texts, tokenizers, LLaMA models, and questions and answers about lines."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from agentic_ring.data.text.packing import PackedRows
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import DataError
from agentic_ring.files.json_files import json_row, read_json_rows
from agentic_ring.models.llama.config_file import read_config as read_llama_config
from agentic_ring.models.llama.config_file import usable_context
from agentic_ring.models.llama.pretrained import INDEX, SINGLE, TensorFiles
from data_prep.conversation_files import conversation, records
from evals.retrieval.documents import HEADER, Document, line_question, line_text, question_text
from evals.retrieval.ladder_documents import LadderPlan
from evals.retrieval.ladder_report import ruler_scores
from evals.retrieval.longchat_files import read_cases, write_cases
from evals.retrieval.prediction_log import PredictionLog, asked_questions
from evals.retrieval.readers import Answer
from tests.data.text.test_packing import numbered, packed
from tests.data.text.test_packing import write as write_packed
from tests.models.llama_cases import BASE
from tests.models.tiny_llama import tiny_tokenizer
from tests.trust.file_readers.reader import FileReader


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


def _document() -> Document:
    keys = [f"key-{number}" for number in range(5)]
    text = HEADER + "".join(line_text(key, 100 + n) for n, key in enumerate(keys))
    asked = tuple(line_question(question_text(keys[n]), keys[n], n, 5, 100 + n, 1) for n in (1, 3))
    return Document(text, 5, asked, 7)


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


def _predictions(folder: Path) -> Path:
    asked = asked_questions([_document(), _document()])
    log = PredictionLog(folder / "4k.jsonl", asked)
    for each in asked:
        log.add(each.predicted(Answer("It is 42.", 100, 0.5), "", pairs_of_words=False))
    return folder / "4k.jsonl"


def _ladder_records(folder: Path) -> Path:
    plan = LadderPlan("LRT-NL", "4k", 0, 0, "lines", (("line", 2), ("count", 1)))
    (folder / "4k.jsonl").write_text(json_row(asdict(plan.build(20))) + json_row(asdict(plan.build(21))))
    return folder / "4k.jsonl"


def _ruler_results(folder: Path) -> Path:
    results = {"niah_single_1": {"4096,none": 0.5, "8192,none": -1}}
    (folder / "harness.json").write_text(json.dumps({"results": results}))
    return folder / "harness.json"


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


TEXT_READERS = (
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
        lambda path: list(PredictionLog(path, asked_questions([_document()] * 2)).rows.values()),
        "rows",
    ),
    FileReader(
        "records of the ladder",
        _ladder_records,
        lambda path: read_json_rows(path, Document, "give another folder"),
        "rows",
    ),
    FileReader("results of lm-evaluation-harness", _ruler_results, ruler_scores, "legal"),
    FileReader("config.json of a LLaMA", _llama_config, _read_llama, "legal"),
    FileReader("model.safetensors", _safetensors, _read_tensors, "legal"),
    FileReader("index of tensors", _index, _read_tensors, "legal"),
)
