"""The script from a file of conversations to rows of tokens, and its messages."""

import json
import re

import numpy as np
import pytest

from agentic_ring.data.text.packing import PackedRows
from agentic_ring.errors import ConfigError, DataError, UnknownNameError
from data_prep.conversations import is_test
from data_prep.sharegpt import ConversationsConfig, length_table, main, prepare
from tests.commands import exit_status
from tests.data.text.tokenizers_for_tests import sentencepiece


def entry(key, *texts):
    turns = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]
    return {"id": key, "conversations": turns}


answer = "The capital number {} is Paris.".format


@pytest.fixture
def folder(tmp_path):
    sentencepiece().save(tmp_path / "model")
    return tmp_path


def config(folder, *entries, **changes):
    path = folder / "chats.json"
    path.write_text(json.dumps(entries))
    options = {"length": "256", "test_share": 0.2, "output": folder / "packed"} | changes
    return ConversationsConfig((path,), folder / "model", **options)


def texts(path):
    """Every text of a file, and its answers."""
    tokenizer, found = sentencepiece(), []
    with PackedRows.open(path) as rows:
        rows.verify()
        rows.check_tokenizer(tokenizer)
        for row in map(rows.__getitem__, range(len(rows))):
            for segment in range(row.segment_ids.max() + 1):
                inside = row.segment_ids == segment
                ids = row.tokens[inside]
                assert ids[0] == tokenizer.bos_id
                said = np.split(ids, np.flatnonzero(np.diff(row.counts[inside])) + 1)[1::2]
                assert all(part[-1] == tokenizer.eos_ids[0] for part in said)
                found.append((tokenizer.decode(ids), [tokenizer.decode(part).strip() for part in said]))
    return found


def test_every_conversation_arrives_in_its_split_with_loss_on_its_answers(folder):
    entries = [
        entry(f"id{number}", f"Which is number {number}?", answer(number), "And?", "No more of it.")
        for number in range(40)
    ]
    bad = {
        "a duplicate id": entry("id0", "Which other?", answer(2)),
        "a duplicate first question and answer": entry("again", "Which is number 0?", answer(0)),
        "no answer": entry("question", "Which one, and no answer?"),
        "a blocked phrase": entry("maker", "Who made you?", "It was OpenAI."),
        "an unknown speaker: 'tool'": {"id": "tool", "conversations": [{"from": "tool", "value": "x"}]},
    }
    summary = prepare(config(folder, *entries, *bad.values()))
    assert summary.rejected == dict.fromkeys(bad, 1)
    expected = {"train": {}, "test": {}}
    for number in range(40):
        split = "test" if is_test(f"id{number}", 0.2) else "train"
        expected[split][f"Which is number {number}?"] = [answer(number), "No more of it."]
    assert expected["test"]
    for split, conversations in expected.items():
        found = texts(folder / "packed" / f"{split}.h5")
        assert len(found) == len(conversations) == summary.splits[split]["conversations"]
        assert all(text.startswith("A chat between a curious user") for text, _ in found)
        by_question = {re.search(r"USER: (.*?) ASSISTANT:", text)[1]: said for text, said in found}
        assert by_question == conversations
    assert sum(summary.lengths) == sum(counts["tokens"] for counts in summary.splits.values())


def test_conversations_longer_than_a_row_are_divided_or_cut_and_counted(folder):
    question = "Which is the capital of all the capitals that there are in the world, as of now?"
    many = entry("many", *[part for number in range(12) for part in (question, answer(number))])
    long, endless = entry("long", "Which one?", "Paris. " * 300), entry("endless", "Why? " * 300, answer(1))
    settings = config(folder, many, long, endless, test_share=0)
    summary = prepare(settings)
    assert (summary.divided, summary.cut) == (1, 1)  # a rejected conversation is not counted as cut
    assert summary.rejected == {"its questions alone fill a row": 1}
    packed = folder / "packed" / "train.h5"
    with PackedRows.open(packed) as rows:
        found = [rows[index] for index in range(len(rows))]
    assert max(int((row.segment_ids >= 0).sum()) for row in found) == 256
    decoded = " ".join(sentencepiece().decode(row.tokens) for row in found)
    assert [decoded.count(answer(number)) for number in range(12)] == [1] * 12

    before = packed.read_bytes()
    with pytest.raises(DataError, match="no conversation is left to train on; 1 rejected: no answer"):
        prepare(config(folder, entry("a", "Which one, and no answer?")))
    assert packed.read_bytes() == before
    assert sorted(file.name for file in packed.parent.iterdir()) == ["test.h5", "train.h5"]


def test_the_command_names_bad_lines_and_packs_the_rest(folder, capsys):
    path = folder / "chats.jsonl"
    lines = [json.dumps(entry(f"id{n}", f"Which is number {n}?", answer(n))) for n in range(30)]
    lines[3] = lines[3][:-5]
    lines[7] = '{"text": "no conversation"}'
    path.write_text("\n".join(lines))
    flags = (path, "--tokenizer", folder / "model", "--length", "1k", "--output", folder / "packed")
    assert exit_status(main, *flags) == 1
    printed = capsys.readouterr()
    assert re.search(r"chats\.jsonl, line 4: it is not JSON", printed.err)
    assert re.search(r"chats\.jsonl, line 8: it has no list of conversations", printed.err)
    assert "Conversation lengths in tokens" in printed.out
    assert re.search(r"train +\d+ +\d+", printed.out)
    path.write_text("\n".join(lines[:3]))
    assert exit_status(main, *flags) == 0
    assert sum(len(texts(folder / "packed" / f"{split}.h5")) for split in ("train", "test")) == 3


def test_a_divided_conversation_is_packed_whole_and_a_cut_file_up_to_its_end(folder, capsys):
    texts_of = [text for number in range(6) for text in (f"Which is number {number}?", answer(number))]
    first, second, third = entry("long_0", *texts_of[:4]), entry("long_3", *texts_of[4:]), entry("cut_0", "x")
    second["conversations"].insert(0, first["conversations"][-1])
    settings = config(folder, first, second, third, test_share=0)
    path = settings.inputs[0]
    path.write_bytes(path.read_bytes()[:-10])
    summary = prepare(settings)
    assert summary.joined == summary.splits["train"]["conversations"] == summary.malformed_count == 1
    ((_, said),) = texts(folder / "packed" / "train.h5")
    assert said == [answer(number) for number in range(6)]
    lost = len(json.dumps(third)) + 1 - 10
    assert f"its last {lost} bytes, after record 2, are lost" in capsys.readouterr().err


def test_settings_that_do_not_fit_are_refused(folder):
    for name, value in (("length", "1"), ("test_share", 1.0), ("template", "alpaca")):
        with pytest.raises((ConfigError, UnknownNameError), match=str(value)):
            config(folder, **{name: value})
    with pytest.raises(DataError, match="llama-3 writes"):
        prepare(config(folder, template="llama-3"))


def test_lengths_are_told_in_powers_of_two():
    table = length_table([10, 64, 65, 128, 500])
    cells = [(row["length up to"], row["conversations"]) for row in table.rows]
    assert cells == [("64", "2"), ("128", "2"), ("256", "0"), ("512", "1")]
