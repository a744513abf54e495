"""The finetuning demo: conversations about records, and a base that is asked before and after."""

import json
from dataclasses import replace

import numpy as np
import pytest

from agentic_ring.data.text.packing import PackedRows
from agentic_ring.errors import ConfigError
from agentic_ring.results.results_file import read_results
from experiments import llama_finetune
from experiments.common.launch import LaunchOptions
from experiments.finetune import records
from experiments.finetune.presets import PRESETS, Stage
from experiments.finetune.records import write_record_conversations
from experiments.finetune.stage_data import pack_rows
from experiments.retriever.lessons import UNKNOWN, retriever_tokenizer


def test_a_conversation_fills_a_row_and_its_answers_are_the_numbers_of_the_lines(tmp_path):
    tokenizer, path = retriever_tokenizer(), tmp_path / "records.jsonl"
    tokenizer.save(tmp_path / "base")
    write_record_conversations(path, 512, rows=40)
    turns = [json.loads(line)["conversations"] for line in path.read_text().splitlines()]
    expected = set()
    for conversation in turns:
        lines = dict(
            line.removesuffix(">").split(": REGISTER_CONTENT is <")
            for line in conversation[0]["value"].splitlines()
            if line.startswith("line ")
        )
        answers = ""
        for question, answer in zip(conversation[::2], conversation[1::2], strict=True):
            key = question["value"].split(" in line ")[-1].split("? I need")[0]
            assert lines[f"line {key}"] == answer["value"]
            answers += f"{answer['value']}>\n<end>"
        expected.add(answers)

    folder = pack_rows([path], [512], "tokenizer", tmp_path / "base", tmp_path / "rows")[512]
    found = set()
    for split in ("train", "test"):
        partly_filled = 0
        with PackedRows.open(folder / f"{split}.h5") as rows:
            for row in (rows[number] for number in range(len(rows))):
                assert tokenizer.token_id(UNKNOWN) not in row.tokens
                filled = row.segment_ids >= 0
                partly_filled += filled.sum() < 480
                for segment in np.unique(row.segment_ids[filled]):
                    answers = row.tokens[row.counts & (row.segment_ids == segment)]
                    found.add("".join(tokenizer.token(token) for token in answers))
        assert partly_filled <= 1
    assert len(turns) == 30 + 2 * 10
    assert found == expected


def small_demo(monkeypatch) -> None:
    stages = tuple(
        Stage(context, 1e16, 1e-3, steps=2, batch_tokens=context, warmup_steps=1) for context in (256, 512)
    )
    monkeypatch.setitem(PRESETS, "demo", replace(PRESETS["demo"], stages=stages))
    monkeypatch.setattr(records, "STAGES", (replace(records.STAGES[0], steps=2),))
    monkeypatch.setattr(records, "ASKED_LINES", 4)
    monkeypatch.setattr(records, "ROWS", 40)


@pytest.mark.slow
def test_the_demo_asks_before_and_after_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    small_demo(monkeypatch)
    run = tmp_path / "run"
    llama_finetune.main(LaunchOptions(output=run))
    results = read_results(run / "results.json")
    for when in ("before", "after"):
        for length in ("256", "512"):
            assert results.figure(f"{when}/score/line/{length}").n == 4
    assert json.loads((run / "model" / "config.json").read_text())["trained_on_task"] is True
    weights = (run / "model" / "model.safetensors").read_bytes()
    assert weights != (run / "base" / "model" / "model.safetensors").read_bytes()
    (run / "results.json").unlink()
    monkeypatch.setattr(records, "train_retriever", None)  # the base is there
    llama_finetune.main(LaunchOptions(output=run))
    assert (run / "model" / "model.safetensors").read_bytes() == weights


def test_the_demo_takes_no_conversations(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("")
    with pytest.raises(ConfigError, match="preset tiny"):
        llama_finetune.main(LaunchOptions(output=tmp_path / "run"), conversations=(path,), preset="demo")
