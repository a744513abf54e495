"""Readers of texts, tokenizers, LLaMA models, and questions and answers about lines."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from agentic_ring.data.text.packing import PackedRows
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import DataError
from agentic_ring.files.json_files import json_row, read_json_rows
from agentic_ring.models.llama.config_file import read_config, usable_context
from agentic_ring.models.llama.pretrained import INDEX, SINGLE, TensorFiles
from data_prep.conversations import conversation, records
from evals.retrieval.answers import Answer, PredictionLog, asked_questions
from evals.retrieval.documents import (
    HEADER,
    Document,
    line_question,
    line_text,
    question_text,
    read_cases,
    write_cases,
)
from evals.retrieval.ladder_documents import LadderPlan
from evals.retrieval.reports import ruler_scores
from tests.data.text.test_packing import numbered, packed, write
from tests.models.llama_cases import BASE
from tests.models.tiny_llama import tiny_tokenizer
from tests.trust.readers import reads

TENSORS = {name: np.arange(12, dtype=np.float32).reshape(3, 4) + 0.1 for name in ("a", "b.weight")}


def _read_packed(path: Path) -> Any:
    with PackedRows.open(path) as rows:
        rows.verify()
        return [rows.description, [rows[number] for number in range(len(rows))]]


@reads("packed rows", "train.h5", _read_packed)
def _packed(folder: Path) -> None:
    write(folder / "train.h5", packed(numbered([5, 3, 8, 2]), 8), 8)


def _read_tokenizer(path: Path) -> Any:
    tokenizer = Tokenizer.load(path.parent)
    ids = tokenizer.encode_prompt("the user: and 42 others</s> é")
    return [ids, tokenizer.decode(ids), tokenizer.digest, tokenizer.chat_template, tokenizer.vocab_size]


@reads("tokenizer.json", "tokenizer.json", _read_tokenizer, "legal")
@reads("tokenizer_config.json", "tokenizer_config.json", _read_tokenizer, "legal")
@reads("generation_config.json", "generation_config.json", _read_tokenizer, "legal")
def _tokenizer(folder: Path) -> None:
    tiny_tokenizer().save(folder)


@reads("chat_template.jinja", "chat_template.jinja", _read_tokenizer, "legal")
def _chat_template(folder: Path) -> None:
    _tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %} é")


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


def _conversations() -> list[dict[str, Any]]:
    turns = [("human", "What is it? é"), ("gpt", "It is a line."), ("human", "Why?"), ("gpt", "Because.")]
    said = [{"from": speaker, "value": text} for speaker, text in turns]
    return [{"id": f"c{number}", "conversations": said} for number in range(4)]


@reads("ShareGPT, an array", "conversations.json", _read_conversations, "legal")
def _sharegpt(folder: Path) -> None:
    text = json.dumps(_conversations(), ensure_ascii=False, indent=1)
    (folder / "conversations.json").write_text(text, encoding="utf-8")


@reads("ShareGPT, lines", "conversations.jsonl", _read_conversations, "legal")
def _sharegpt_lines(folder: Path) -> None:
    lines = (json.dumps(value) + "\n" for value in _conversations())
    (folder / "conversations.jsonl").write_text("".join(lines))


def _document() -> Document:
    keys = [f"key-{number}" for number in range(5)]
    text = HEADER + "".join(line_text(key, 100 + n) for n, key in enumerate(keys))
    asked = tuple(line_question(question_text(keys[n]), keys[n], n, 5, 100 + n, 1) for n in (1, 3))
    return Document(text, 5, asked, 7)


@reads("own cases", "4k.jsonl", read_cases, "rows")
def _own_cases(folder: Path) -> None:
    write_cases(folder / "4k.jsonl", [_document()])


@reads("LongChat's cases", "4k.jsonl", read_cases, "legal")
def _longchat(folder: Path) -> None:
    """As LongChat publishes them: without our fields and digest."""
    _own_cases(folder)
    rows = [json.loads(line) for line in (folder / "4k.jsonl").read_text().splitlines()]
    ours = {"digest", "depth", "seed", "value_duplicates"}
    lines = (json.dumps({name: row[name] for name in row if name not in ours}) + "\n" for row in rows)
    (folder / "4k.jsonl").write_text("".join(lines))


def _predicted(path: Path) -> PredictionLog:
    return PredictionLog(path, asked_questions([_document()] * 2))


@reads("predictions", "4k.jsonl", lambda path: list(_predicted(path).rows.values()), "rows")
def _predictions(folder: Path) -> None:
    log = _predicted(folder / "4k.jsonl")
    for each in asked_questions([_document()] * 2):
        log.add(each.predicted(Answer("It is 42.", 100, 0.5), "", pairs_of_words=False))


@reads(
    "records of the ladder",
    "4k.jsonl",
    lambda path: read_json_rows(path, Document, "give another folder"),
    "rows",
)
def _ladder_records(folder: Path) -> None:
    plan = LadderPlan("LRT-NL", "4k", 0, 0, "lines", (("line", 2), ("count", 1)))
    (folder / "4k.jsonl").write_text(json_row(asdict(plan.build(20))) + json_row(asdict(plan.build(21))))


@reads("results of lm-evaluation-harness", "harness.json", ruler_scores, "legal")
def _ruler_results(folder: Path) -> None:
    results = {"niah_single_1": {"4096,none": 0.5, "8192,none": -1}}
    (folder / "harness.json").write_text(json.dumps({"results": results}))


@reads(
    "config.json of a LLaMA",
    "config.json",
    lambda path: [read_config(path.parent), usable_context(path.parent, 16, False)],
    "legal",
)
def _llama_config(folder: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    fields = BASE | {"rope_scaling": scaling | {"original_max_position_embeddings": 32}}
    (folder / "config.json").write_text(json.dumps(fields, indent=1))


def _read_tensors(path: Path) -> Any:
    files = TensorFiles(path.parent)
    files.check_names(set(TENSORS), tied=False)
    for name in TENSORS:
        if files.shape(name) != (3, 4):
            raise DataError(f"{path}: {name} has another shape than its model's")
    return [files.read(name, (slice(None), slice(None))) for name in TENSORS]


@reads("model.safetensors", SINGLE, _read_tensors, "legal")
def _safetensors(folder: Path) -> None:
    save_file(TENSORS, folder / SINGLE)


@reads("index of tensors", INDEX, _read_tensors, "legal")
def _index(folder: Path) -> None:
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, folder / f"model-{name}.safetensors")
    files = {name: f"model-{name}.safetensors" for name in TENSORS}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": files}))
