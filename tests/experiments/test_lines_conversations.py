"""Conversations about lines, their text, and rotary positions of rows longer than the model's context."""

import re
from dataclasses import replace

import numpy as np
import pytest

from agentic_ring.data.text.chat import chat_template
from agentic_ring.data.text.ordinary_text import held_out_texts, paragraphs
from agentic_ring.data.text.packing import PackedRows
from agentic_ring.errors import ConfigError
from agentic_ring.mesh import MeshShape
from agentic_ring.models.llama import LlamaConfig
from agentic_ring.models.transformer_config import LinearScaling, TransformerConfig, YarnScaling
from evals.retrieval.documents import HEADER, QUESTION_START
from experiments.finetune.lines_conversations import (
    TEST_CONVERSATIONS,
    WORDINGS,
    continuation,
    record,
    write_lines_rows,
)
from experiments.finetune.presets import FinetuneConfig, Stage, stretched
from experiments.finetune.stage_data import prepare_rows
from tests.data.text.tokenizers_for_tests import byte_level

TOKENIZER = byte_level()
TEMPLATE = chat_template("plain", TOKENIZER)


@pytest.fixture(scope="module")
def records():
    return [record(f"test-{number}", 4096, TOKENIZER, TEMPLATE) for number in range(60)]


def test_every_answer_is_a_line_of_the_record_and_fits(records):
    for text in records:
        assert len(text.tokens) <= 4096
        for turns in text.conversations:
            assert [turn.role for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
            first = turns[0].text
            for question, answer in zip(turns[::2], turns[1::2], strict=True):
                assert answer.text in first
                value = re.findall(r"\d+", answer.text)[-1]
                assert value not in question.text.removeprefix(first)
        if len(text.conversations) > 1:  # the record stands once
            whole = TOKENIZER.decode(text.tokens.ids)
            assert whole.count(text.conversations[0][0].text[:500]) == 1
            assert text.tokens.branches.max() == len(text.conversations)
    assert 0.1 < np.mean([len(text.conversations) == 1 for text in records]) < 0.5
    sizes = sorted(len(text.tokens) for text in records)
    assert sizes[len(sizes) // 2] > 0.85 * 4096, "most fill a row"
    assert sizes[0] < 2048, "some are short"


def test_wordings_keys_and_text_vary_and_half_of_the_records_are_longchats(records):
    talks = [text.conversations[0] for text in records]
    begun = [next(each for each in WORDINGS if turns[0].text.startswith(each.header)) for turns in talks]
    assert {each.header for each in begun} == {each.header for each in WORDINGS}
    longchat = [turns for turns in talks if turns[0].text.startswith(HEADER)]
    assert 0.3 < len(longchat) / len(talks) < 0.7
    assert all(QUESTION_START in turns[-2].text for turns in longchat)
    with_text = sum(any(each in turns[0].text for each in paragraphs()) for turns in talks)
    assert 0.2 < with_text / len(talks) < 0.6
    held_out = " ".join("\n".join(held_out_texts()).split())
    assert not any(paragraph in held_out for paragraph in paragraphs())


def test_a_file_has_the_rows_that_training_reads_and_some_to_test(tmp_path):
    write_lines_rows(tmp_path / "rows", 1024, 12, TOKENIZER, TEMPLATE)
    texts = {}
    for split in ("train", "test"):
        with PackedRows.open(tmp_path / "rows" / f"{split}.h5") as rows:
            assert rows.branched or split == "test"
            stored = [rows[number] for number in range(len(rows))]
        texts[split] = [
            TOKENIZER.decode(row.tokens[row.segment_ids == segment])
            for row in stored
            for segment in range(row.segment_ids.max() + 1)
        ]
        assert split == "test" or len(stored) >= 12
    continued = [text for text in texts["train"] if "Continue this text." in text]
    assert 0 < len(continued) <= len(texts["train"]) // 4
    assert len(texts["test"]) >= TEST_CONVERSATIONS
    assert not set(texts["test"]) & set(texts["train"])
    (asked, answer), *_ = continuation("name", TOKENIZER, TEMPLATE).conversations
    assert " ".join([asked.text.removeprefix("Continue this text.\n\n"), answer.text]) in paragraphs()


def test_each_stage_packs_conversations_of_its_own_length(tmp_path):
    TOKENIZER.save(tmp_path / "model")
    stages = tuple(Stage(context, None, 1e-3, steps=2, batch_tokens=2048) for context in (1024, 2048))
    config = FinetuneConfig(
        "lines", str(tmp_path / "model"), (), (), "plain", stages, None, 0, "yarn", None, MeshShape(), (2, 1)
    )
    _, folders = prepare_rows(config, TOKENIZER.vocab_size, tmp_path / "run", None)
    for context, folder in folders.items():
        with PackedRows.open(folder / "train.h5") as rows:
            filled = [max(np.bincount(rows[number].segment_ids + 1)[1:]) for number in range(len(rows))]
        assert len(filled) >= config.rows(context)
        assert max(filled) > 0.85 * context


def test_positions_are_stretched_beyond_the_context_alone():
    stack = TransformerConfig(width=32, layers=1, heads=4, ffn_width=32, rope_theta=1e5)
    config = LlamaConfig(stack, context=2048)
    assert stretched(config, 2048, "yarn") == stack
    assert stretched(config, 8192, "linear").rope_scaling == LinearScaling(4.0)
    assert stretched(config, 8192, "yarn").rope_scaling == YarnScaling(4.0, 2048)
    # NTK-aware: the slowest wave turns a quarter as fast.
    larger = stretched(config, 8192, "ntk").rope_theta
    slowest = -(stack.head_dim - 2) / stack.head_dim
    assert larger**slowest == pytest.approx(1e5**slowest / 4)
    for odd, message in (
        (replace(config, context=None), "does not state its context"),
        (
            replace(config, transformer=replace(stack, rope_scaling=LinearScaling(2.0))),
            "scales its positions",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            stretched(odd, 8192, "yarn")
