"""Conversation files: arrays of any size are streamed, bad lines are named, shapes are told apart."""

import json
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentic_ring.data.text.chat import Turn
from agentic_ring.errors import DataError
from data_prep import conversation_files
from data_prep.conversation_files import Conversation, OtherSpeakerError, conversation, records

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def read(path):
    return [record.value for record in records(path)]


@example(values=[0.5, 1e300, -2e-9, 1e22], indent=None, block=1)  # numbers cut up everywhere
@given(values=st.lists(JSON, max_size=8), indent=st.sampled_from([None, 0, 3]), block=st.integers(1, 40))
@settings(max_examples=40)
def test_an_array_is_read_whatever_the_size_of_a_read(tmp_path_factory, values, indent, block):
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=len(values) % 2 == 0), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversation_files, "_READ_BYTES", block)
        assert read(path) == values


@given(values=st.lists(JSON.filter(lambda value: not isinstance(value, list)), min_size=1, max_size=8))
def test_lines_are_read(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text(
        "\n\n".join(json.dumps(value, ensure_ascii=False) for value in values), "utf-8", newline=""
    )
    assert read(path) == values


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "a.json"
    entry = json.dumps({"id": "x", "conversations": [{"from": "human", "value": "y" * 1000}] * 20})
    path.write_text("[" + ",\n".join([entry] * 1500) + "]")
    size = path.stat().st_size
    tracemalloc.start()
    count = sum(1 for _ in records(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1500
    assert size > 30e6
    assert peak < size / 4


def test_lines_and_bytes_are_told_of_each_record(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n  {"a":\n 1},\n\n  2, 3]\n')
    assert [record.line for record in records(path)] == [2, 5, 5]
    path.write_text('{"a": 1}\n\n{"b": 2}\n')
    assert [(record.line, record.end) for record in records(path)] == [(1, 9), (3, 19)]


def test_a_bad_line_is_named_and_the_next_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": \n\xff\xfe\n{"a": 2}\n')
    found = list(records(path))
    assert [record.value for record in found] == [{"a": 1}, None, None, {"a": 2}]
    assert [record.line for record in found if record.fault] == [2, 3]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "is empty"),
        (b" \n ", "is empty"),
        (b"[1, 2", "line 1: it ends before its array does"),
        (b'[{"a": 1},\n {"a": "x', "line 2: Unterminated string"),
        (b'[{"a": 1}\n {"a": 2}]', "line 2: there is '{' where ',' is expected"),
        (b'[{"a": 1},\n\n {"a" 2, "long enough to be seen at once": 3}]', "line 3: Expecting ':'"),
        (b'[{"a": "\xff"}]', "is not UTF-8"),
        (b"[" * 100_000, "nested too deep|line 1"),
    ],
)
def test_broken_files_are_named_with_their_line(tmp_path, contents, message):
    (tmp_path / "a.json").write_bytes(contents)
    with pytest.raises(DataError, match=rf"a\.json.*({message})"):
        read(tmp_path / "a.json")
    with pytest.raises(DataError, match=r"none\.json"):
        read(tmp_path / "none.json")


def test_all_known_shapes_are_one_conversation():
    expected = (Turn("system", "s"), Turn("user", "q"), Turn("assistant", "a"))
    ours = [("system", "s"), ("human", "q"), ("gpt", "a")]
    theirs = [("system", "s"), ("user", "q"), ("assistant", "a")]
    sharegpt = {"id": "x", "conversations": [{"from": role, "value": text} for role, text in ours]}
    openai = {"messages": [{"role": role, "content": text} for role, text in theirs]}
    assert conversation(sharegpt) == Conversation("x", expected)
    assert conversation(openai) == Conversation(None, expected)
    assert conversation({"id": 7, "conversations": []}) == Conversation("7", ())


def test_half_a_character_is_replaced():
    value = json.loads('{"conversations": [{"from": "human", "value": "a\\ud83d b \\ud83d\\ude00"}]}')
    assert conversation(value).turns == (Turn("user", "a\ufffd b \U0001f600"),)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "it is a int"),
        ({"text": "x"}, "no list of conversations or messages"),
        ({"conversations": "x"}, "no list of conversations"),
        ({"conversations": ["x"]}, "a turn is a str"),
        ({"conversations": [{"from": "human"}]}, "no text"),
        ({"conversations": [{"from": "human", "value": None}]}, "no text"),
        ({"id": [1], "conversations": []}, "its id is a list"),
    ],
)
def test_records_that_are_no_conversation_are_named(value, message):
    with pytest.raises(DataError, match=message):
        conversation(value)
    with pytest.raises(OtherSpeakerError, match="'bing'"):
        conversation({"conversations": [{"from": "bing", "value": "x"}]})
