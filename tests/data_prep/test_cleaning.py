"""Cleaning of conversations: what it removes, keeps and rejects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.data.text.chat import Turn
from data_prep.cleaning import Deduplicator, Rejected, clean_text, clean_turns, is_html, is_test, to_markdown
from data_prep.conversation_files import Conversation

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


@pytest.mark.parametrize(
    "text",
    [
        "Write `<div>` and close it with `</div>`.",
        "```html\n<div><p>x</p></div>\n```",
        "a < b and c > d",
        "<b>bold</b> words",
        "List<String> x;",
    ],
)
def test_a_text_about_html_stays_as_it_is(text):
    assert not is_html(text)
    assert clean_text(assistant(text)).text == text


def test_html_of_a_user_stays_as_it_is():
    assert clean_text(user("<p>Why?</p>")).text == "<p>Why?</p>"


@given(st.text(alphabet="<>/divpreco ulabtr\n&;=\"'#123x", max_size=60))
def test_no_html_is_too_broken_to_be_read(html):
    assert isinstance(to_markdown(html), str)


@pytest.mark.parametrize("inside", ["<![x", "<ol start=²><li>x</li></ol>", "<b>" * 2000])
def test_html_that_its_parser_refuses_is_a_reason_to_leave_a_conversation_out(inside):
    with pytest.raises(Rejected, match="HTML that cannot be read"):
        clean_turns([user(), assistant(f"<p>{inside}</p>")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 / 2\n\nHello", "Hello"),
        ("Hello\n 1 / 3 ", "Hello"),
        ("The half is 1 / 2 of it", "The half is 1 / 2 of it"),
        ("```pythonCopy code\nx = 1\n```", "```python\nx = 1\n```"),
        ("python\nCopy code\nx = 1", "python\nx = 1"),
        ("Press Copy code to copy", "Press Copy code to copy"),
        ("Hello\nCopy12 chars / 3 words", "Hello"),
    ],
)
def test_what_the_page_wrote_itself_goes(text, expected):
    assert clean_text(assistant(text)).text == expected


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


def test_blocked_phrases_are_a_choice():
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
