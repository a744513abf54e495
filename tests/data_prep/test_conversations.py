"""Conversations: files of any size are streamed, bad records named; what cleaning removes and rejects."""

import json
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentic_ring.data.text.chat import Turn
from agentic_ring.errors import DataError
from data_prep import conversations
from data_prep.conversations import (
    Conversation,
    Deduplicator,
    OtherSpeakerError,
    Rejected,
    clean_text,
    clean_turns,
    conversation,
    is_test,
    records,
    to_markdown,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def read(path):
    return [record.value for record in records(path)]


@example(values=[0.5, 1e300, -2e-9, 1e22], indent=None, block=1)  # numbers cut up everywhere
@given(values=st.lists(JSON, max_size=5), indent=st.sampled_from([None, 0, 3]), block=st.integers(1, 40))
@settings(max_examples=25)
def test_an_array_is_read_whatever_the_size_of_a_read(tmp_path_factory, values, indent, block):
    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=len(values) % 2 == 0), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversations, "_READ_BYTES", block)
        assert read(path) == values


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


def test_lines_and_bytes_are_told_of_each_record(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n  {"a":\n 1},\n\n  2, 3]\n')
    assert [record.line for record in records(path)] == [2, 5, 5]
    path.write_text('{"a": 1}\n\n{"b": 2}\n')
    assert [(record.line, record.end) for record in records(path)] == [(1, 9), (3, 19)]


def test_a_bad_line_is_named_and_the_next_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": \n\xff\xfe\n{"\xc3\xa9": "\xe2\x80\xa8"}\n')
    found = list(records(path))
    assert [record.value for record in found] == [{"a": 1}, None, None, {"é": "\u2028"}]
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


def test_another_speaker_is_named_and_half_a_character_is_replaced():
    with pytest.raises(OtherSpeakerError, match="'bing'"):
        conversation({"conversations": [{"from": "bing", "value": "x"}]})
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


ANSWER = (
    '<div class="markdown prose"><p>Use <strong>this</strong>:</p><pre><div class="bg-black"><div>'
    '<span>python</span><button>Copy code</button></div><div><code class="hljs language-python">'
    '<span class="k">if</span> a &lt; b:\n\n\n    <span>go</span>()\n</code></div></div></pre>'
    "<ol><li><p>One</p></li><li>Two <code>x</code><ul><li>a</li></ul></li></ol>"
    "<table><tr><th>A</th><th>B</th></tr><tr><td>1</td><td>2</td></tr></table>"
    '<blockquote><p>said</p></blockquote><h2>End</h2><p>See <a href="http://x">it</a><br>now.</p></div>'
)
MARKDOWN = """Use **this**:

```python
if a < b:


    go()
```

1. One
2. Two `x`
   - a

| A | B |
| --- | --- |
| 1 | 2 |

> said

## End

See [it](http://x)
now."""


def user(text="What is the capital of France?"):
    return Turn("user", text)


def assistant(text="The capital is Paris."):
    return Turn("assistant", text)


def test_an_html_answer_becomes_markdown():
    assert clean_text(assistant(ANSWER)).text == MARKDOWN
    assert to_markdown("<pre>no code tag\n</pre>") == "```\nno code tag\n```"


UNCHANGED = (
    "Write `<div>` and close it with `</div>`.",
    "```html\n<div><p>x</p></div>\n```",
    "<b>bold</b> words",
    "The half is 1 / 2 of it",
    "Press Copy code to copy",
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 / 2\n\nHello", "Hello"),
        ("Hello\n 1 / 3 ", "Hello"),
        ("```pythonCopy code\nx = 1\n```", "```python\nx = 1\n```"),
        ("python\nCopy code\nx = 1", "python\nx = 1"),
        ("Hello\nCopy12 chars / 3 words", "Hello"),
        *zip(UNCHANGED, UNCHANGED, strict=True),
    ],
)
def test_what_the_page_wrote_itself_goes(text, expected):
    assert clean_text(assistant(text)).text == expected
    assert clean_text(user(f"<p>{expected}</p>")).text == f"<p>{expected}</p>"


@given(st.text(alphabet="<>/divpreco ulabtr\n&;=\"'#123x", max_size=60))
def test_no_html_is_too_broken_to_be_read(html):
    assert isinstance(to_markdown(html), str)


@pytest.mark.parametrize("inside", ["<![x", "<ol start=²><li>x</li></ol>", "<b>" * 2000])
def test_html_that_its_parser_refuses_is_a_reason_to_leave_a_conversation_out(inside):
    with pytest.raises(Rejected, match="HTML that cannot be read"):
        clean_turns([user(), assistant(f"<p>{inside}</p>")])


def test_ends_without_a_question_or_an_answer_go():
    turns = [assistant("Welcome!"), user(), Turn("user", " \n"), assistant(), user("And of Spain?")]
    assert clean_turns(turns) == (user(), assistant())
    system = Turn("system", "Be brief.")
    assert clean_turns([system, *turns]) == (system, user(), assistant())


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "empty"),
        ([user(" "), assistant("1 / 2")], "empty"),
        ([user(), user()], "no answer"),
        ([assistant(), user()], "no answer"),
        ([user(), assistant(), assistant()], "do not alternate"),
        ([user(), Turn("system", "Be brief."), assistant()], "do not alternate"),
        ([user("Hi"), assistant("Hello")], "fewer than 16 characters"),
        ([user(), assistant("I am ChatGPT, a model.")], "a blocked phrase"),
    ],
)
def test_conversations_with_nothing_to_learn_are_rejected(turns, reason):
    with pytest.raises(Rejected, match=reason):
        clean_turns(turns)
    turns = (user("Who made ChatGPT?"), assistant())
    assert clean_turns(turns, blocked=()) == turns
    with pytest.raises(Rejected, match="a blocked phrase"):
        clean_turns(turns, blocked=("PARIS",))


def test_ids_and_first_pairs_are_met_once():
    seen = Deduplicator()
    first = (user(), assistant())
    assert seen.check(Conversation("a", first)) == "a"
    with pytest.raises(Rejected, match="a duplicate id"):
        seen.check(Conversation("a", (user("x"), assistant("y"))))
    with pytest.raises(Rejected, match="a duplicate first question and answer"):
        seen.check(Conversation("b", (Turn("system", "s"), *first, user("more"), assistant("still"))))
    assert seen.check(Conversation("c", (user(), assistant("Lyon, I say.")))) == "c"
    unnamed = Conversation(None, (user("x"), assistant("y")))
    key = seen.check(unnamed)
    assert key == Deduplicator().check(unnamed)


def test_the_split_depends_on_the_id_alone_and_has_its_share():
    chosen = [str(number) for number in range(20_000) if is_test(str(number), 0.05)]
    assert 0.045 < len(chosen) / 20_000 < 0.055
    assert all(is_test(key, 0.1) for key in chosen), "a larger share keeps what the smaller had"
    assert not any(is_test(str(number), 0.0) for number in range(100))
