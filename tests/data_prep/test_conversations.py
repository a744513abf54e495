"""Conversations: files of any size are streamed, bad records named; what cleaning removes and rejects."""

import itertools
import json
import tracemalloc
from functools import partial

import pytest

from agentic_ring.data.text.chat import Turn
from agentic_ring.errors import DataError
from data_prep import conversations
from data_prep.conversations import (
    Deduplicator,
    Rejected,
    clean_text,
    clean_turns,
    conversation,
    is_test,
    joined,
    records,
)

ROLES = "system", "user", "assistant"
TEXTS = ["", 'a "\\\u2028é\U0001f600\n', {"é\n": [1, {}]}]
VALUES = [0.5, 1e300, -2e-9, 1e22, 10**30, True, None, *TEXTS, [], {}, [TEXTS], 0]


@pytest.mark.parametrize("block", range(1, 41))
def test_an_array_is_read_whatever_the_size_of_a_read(tmp_path, monkeypatch, block):
    monkeypatch.setattr(conversations, "_READ_BYTES", block)
    path = tmp_path / "a.json"
    for indent, as_ascii, values in itertools.product((None, 0, 3), (True, False), (VALUES, VALUES[1:4], [])):
        path.write_text(json.dumps(values, indent=indent, ensure_ascii=as_ascii), "utf-8")
        assert [record.value for record in records(path)] == values


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "a.json"
    entry = json.dumps({"id": "x", "conversations": [{"from": "human", "value": "y" * 1000}] * 20})
    path.write_text("[" + ",\n".join([entry] * 1500) + "]")
    tracemalloc.start()
    count = sum(1 for _ in records(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1500
    assert peak < path.stat().st_size / 4


def test_lines_and_bytes_are_told_of_each_record_and_a_bad_line_is_passed(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n  {"a":\n 1},\n\n  2, 3]\n')
    assert [record.line for record in records(path)] == [2, 5, 5]
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n\xff\xfe\n{"\xc3\xa9": "\xe2\x80\xa8"}\n')
    found = [(record.value, record.line, record.end, bool(record.fault)) for record in records(path)]
    good = ({"a": 1}, 1, 12, False), ({"é": "\u2028"}, 5, path.stat().st_size, False)
    assert found == [good[0], (None, 3, 20, True), (None, 4, 23, True), good[1]]


def test_broken_files_are_named_with_their_line(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(DataError, match=r"there is no file .*a\.json"):
        list(records(path))
    for contents, message in (
        (b" \n ", "is empty"),
        (b"[]\n  \n[1]", r"line 3: there is '\[' after the end of the array"),
        (b'[1]\n{"a": 1}\n', "line 2: there is '{' after the end of the array"),
        (b"[1]\xc3", "line 1: there is 'half a character' after"),
        (b'[{"a": 1}\n {"a": 2}]', "line 2: there is '{' where ',' is expected"),
        (b'[{"a": 1},\n\n {"a" 2, "long enough to be seen at once": 3}]', "line 3: Expecting ':'"),
        (b'[{"a": "\xff"}]', "is not UTF-8"),
        (b"[" * 100_000, "nested too deep|line 1"),
    ):
        path.write_bytes(contents)
        with pytest.raises(DataError, match=rf"a\.json.*({message})"):
            list(records(path))


def test_what_is_whole_in_an_array_that_is_cut_off_is_kept_and_the_loss_is_told(tmp_path):
    path = tmp_path / "a.json"
    for contents, count, lost, line in (
        (b"[", 0, 0, 1),
        (b'[{"a": "x', 0, 8, 1),
        (b'[{"a": 1}', 1, 0, 1),
        (b'[{"a": 1},\n', 1, 0, 2),
        (b'[{"a": 1},\n {"a": "\xc3\xa9 \xc3', 1, 11, 2),
        (b'[{"a": 1},\n {"a": 1}, 2', 2, 1, 2),
    ):
        path.write_bytes(contents)
        *kept, end = records(path)
        assert [record.value for record in kept] == [{"a": 1}] * count
        assert f"its last {lost} bytes, after record {count}, are lost" in end.fault
        assert end.line == line


def test_parts_of_a_conversation_are_joined():
    turns = [Turn(ROLES[1 + number % 2], str(number)) for number in range(9)]
    parts = [("a_b_0", turns[:4]), ("a_b_3", turns[3:6]), ("a_b_6", turns[6:])]
    rest = [
        ("a_b_20", turns[:2]),  # turns are missing
        ("a_b_21", turns[:2]),  # other turns than those of the record before
        ("a_b_21", turns[:2]),  # the same record
        ("a_c_23", turns[:2]),
        ("0", turns[:2]),
        (None, turns[:2]),
        ("a_0", []),
        ("a_0", turns[:2]),
    ]
    assert list(joined([*parts, *rest])) == [("a_b_0", turns, 3), *((*record, 1) for record in rest)]
    assert list(joined([])) == []


def test_all_known_shapes_are_one_conversation():
    """Half a character, as JSON may hold it, is replaced."""
    texts = "s", "a\ud83d b \ud83d\ude00", "a"
    spoken = [zip(roles, texts, strict=True) for roles in (("system", "human", "gpt"), ROLES)]
    sharegpt = {"id": "x", "conversations": [{"from": role, "value": text} for role, text in spoken[0]]}
    openai = {"messages": [{"role": role, "content": text} for role, text in spoken[1]]}
    expected = [*map(Turn, ROLES, ("s", "a\ufffd b \U0001f600", "a"))]
    assert conversation(sharegpt) == ("x", expected)
    assert conversation(openai) == (None, expected)
    assert conversation({"id": 7, "conversations": []}) == ("7", [])
    # A row of a table that joins both formats has the fields of both.
    joined = [{"from": None, "value": None} | turn for turn in openai["messages"]]
    assert conversation({"id": None, "conversations": None, "messages": joined}) == (None, expected)
    with pytest.raises(Rejected, match="an unknown speaker"):
        conversation({"conversations": [{"from": "bing", "value": "x"}]})


def test_records_that_are_no_conversation_are_named():
    for value, message in (
        (3, "it is a int"),
        ({"text": "x"}, "no list of conversations or messages"),
        ({"conversations": ["x"]}, "a turn is a str"),
        ({"conversations": [{"from": "human", "value": None}]}, "no text"),
        ({"id": [1], "conversations": []}, "its id is a list"),
    ):
        with pytest.raises(DataError, match=message):
            conversation(value)


user, assistant = partial(Turn, "user"), partial(Turn, "assistant")
QUESTION, CAPITAL = PAIR = user("What is the capital of France?"), assistant("The capital is Paris.")


def test_an_html_answer_becomes_markdown():
    answer = (
        '<div class="markdown prose"><p>Use <strong>this</strong>:</p><pre><div class="bg-black"><div>'
        '<span>python</span><button>Copy code</button></div><div><code class="hljs language-python">'
        '<span class="k">if</span> a &lt; b:\n\n\n    <span>go</span>()\n</code></div></div></pre>'
        "<ol><li><p>One_*</p></li><li>Two <code>x</code><ul><li>a</li></ul></li></ol>"
        '<h2>End</h2><p>See <a href="http://x">it</a><br>now.</p></div>'
    )
    assert clean_text(assistant(answer)).text == (
        "Use **this**:\n\n```python\nif a < b:\n\n\n    go()\n```\n\n1. One_*\n2. Two `x`\n   - a\n\n"
        "## End\n\nSee [it](http://x)\nnow."
    )
    assert clean_text(assistant("<pre>no code tag\n</pre>")).text == "```\nno code tag\n```"


def test_what_the_page_wrote_itself_goes_and_nothing_else():
    for text, expected in (
        ("Hello\n 1 / 3 ", "Hello"),
        ("```pythonCopy code\nx = 1\n```", "```python\nx = 1\n```"),
        ("python\nCopy code\nx = 1", "python\nx = 1"),
        ("Hello\nCopy12 chars / 3 words", "Hello"),
        ("Hello\u200b", "Hello"),
        ("*This conversation is shared from [**ChatHub**](https://chathub.gg)*", ""),
        ("try:\n  1 / 0\nexcept ZeroDivisionError:\n  1 / 1\nelse:", None),
        ("Write `<div>` and close it with `</div>`.", None),
        ("```html\n<div><p>x</p></div>\n```", None),
        ("<b>bold</b> words", None),
        ("The half is 1 / 2 of it", None),
        ("Press Copy code to copy", None),
    ):
        expected = text if expected is None else expected
        assert clean_text(assistant(text)).text == expected
        assert clean_text(user(f"<p>{expected}</p>")).text == f"<p>{expected}</p>"


@pytest.mark.parametrize("inside", ["<![x", "<ol start=²><li>x</li></ol>", "<b>" * 2000])
def test_html_that_its_parser_refuses_is_a_reason_to_leave_a_conversation_out(inside):
    with pytest.raises(Rejected, match="HTML that cannot be read"):
        clean_turns([QUESTION, assistant(f"<p>{inside}</p>")])


def test_turns_without_a_question_or_an_answer_go_and_blocked_phrases_may_be_chosen():
    turns = [assistant("Welcome!"), QUESTION, user(" \n"), CAPITAL, user("And of Spain?")]
    assert clean_turns(turns) == PAIR
    system = Turn("system", "Be brief.")
    assert clean_turns([system, *turns]) == (system, *PAIR)
    assert clean_turns([*PAIR, user("Still there?"), assistant("\u200b"), *PAIR]) == PAIR * 2
    blocked = (user("Who made ChatGPT?"), CAPITAL)
    assert clean_turns(blocked, blocked=()) == blocked
    with pytest.raises(Rejected, match="a blocked phrase"):
        clean_turns(blocked, blocked=("PARIS",))


def test_conversations_with_nothing_to_learn_are_rejected():
    for turns, reason in (
        ([], "empty"),
        ([user(" "), assistant("1 / 2")], "empty"),
        ([QUESTION, QUESTION], "no answer"),
        ([CAPITAL, QUESTION], "no answer"),
        ([*PAIR, CAPITAL], "do not alternate"),
        ([QUESTION, Turn("system", "Be brief."), CAPITAL], "do not alternate"),
        ([user("Hi"), assistant("Hello")], "fewer than 16 characters"),
        ([QUESTION, assistant("I am ChatGPT, a model.")], "a blocked phrase"),
    ):
        with pytest.raises(Rejected, match=reason):
            clean_turns(turns)


def test_ids_and_first_pairs_are_met_once():
    seen = Deduplicator()
    other = (user("x"), assistant("y"))
    assert seen.check("a", PAIR) == "a"
    with pytest.raises(Rejected, match="a duplicate id"):
        seen.check("a", other)
    with pytest.raises(Rejected, match="a duplicate first question and answer"):
        seen.check("b", (Turn("system", "s"), *PAIR, user("more"), assistant("still")))
    assert seen.check("c", (QUESTION, assistant("Lyon, I say."))) == "c"
    assert seen.check(None, other) == Deduplicator().check(None, other)


def test_the_split_depends_on_the_id_alone_and_has_its_share():
    chosen = [str(number) for number in range(20_000) if is_test(str(number), 0.05)]
    assert 900 < len(chosen) < 1100
    assert all(is_test(key, 0.1) for key in chosen), "a larger share keeps what the smaller had"
    assert not any(is_test(str(number), 0.0) for number in range(100))
