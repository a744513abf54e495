"""Parts of an answer add up to its text, never split a character and end before a stop string."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.inference.detokenizer import (
    AnswerText,
    IncrementalDetokenizer,
    StopStringFilter,
    generate_answers,
)
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.text_engine import Completion
from tests.data.text.tokenizers_for_tests import byte_level, sentencepiece

TEXTS = ["The capital of France is Paris.", "é, and 日本 🙂 after it", "line 12: <4821>\n\n  indented"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece("first")], ids=["bytes", "sentencepiece"])
def test_pieces_add_up_to_the_decoded_text(tokenizer, text):
    tokens = tokenizer.encode(text)
    pieces = IncrementalDetokenizer(tokenizer.decode)
    shown = [pieces.add(token) for token in tokens]
    assert "".join(shown) + pieces.rest() == tokenizer.decode(tokens)
    if "日" not in text:  # which sentencepiece here has no token for
        assert len([piece for piece in shown if piece]) > 3


def test_a_character_comes_whole_with_the_last_of_its_tokens():
    tokenizer = byte_level()
    tokens = tokenizer.encode("🙂!")
    pieces = IncrementalDetokenizer(tokenizer.decode)
    assert [pieces.add(token) for token in tokens] == ["", "", "", "🙂", "!"]
    # Bytes that never form a character are returned at the end.
    broken = IncrementalDetokenizer(tokenizer.decode)
    assert [broken.add(token) for token in tokens[:2]] == ["", ""]
    assert broken.rest() == tokenizer.decode(tokens[:2]) == "\ufffd"


def test_an_answer_continues_its_prompt_with_the_space_between():
    tokenizer = sentencepiece("first")
    whole = tokenizer.encode("The capital of France is Paris.")
    prompt = tokenizer.encode("The capital of France")
    assert whole[: len(prompt)] == prompt

    def text(before):
        answer = AnswerText(tokenizer.decode, before, ())
        for token in whole[len(prompt) :]:
            answer.add(token)
        answer.rest()
        return answer.text

    assert text(prompt) == " is Paris."
    assert text(()) == "is Paris."


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 12), max_size=5),
)
def test_text_is_passed_on_up_to_the_first_stop_string(text, strings, cuts):
    ends = (
        (end, string) for end in range(len(text) + 1) for string in strings if text[:end].endswith(string)
    )
    met = min(ends, key=lambda each: (each[0], -len(each[1])), default=None)
    expected = text if met is None else text[: met[0] - len(met[1])]
    until, shown = StopStringFilter(strings), ""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(edges):
        shown += until.add(text[start:end])
        assert expected.startswith(shown)
    assert shown + until.rest() == expected
    assert until.stopped == (met is not None)


def test_the_possible_beginning_of_a_stop_string_is_held_back():
    until = StopStringFilter(["\n\nUser", "###"])
    shown = [until.add(piece) for piece in ("one", "\n", "\n", "two#", "#", "x##")]
    assert shown == ["one", "", "", "\n\ntwo", "", "##x"]
    assert until.add("#more") == ""
    assert until.stopped
    assert until.rest() == ""


def test_stop_strings_take_time_linear_in_the_answer():
    # Every character continues a beginning of all 64 strings, and every 255th breaks it off.
    strings = ["a" * 255 + chr(ord("A") + number) for number in range(64)]
    text = ("a" * 254 + "b") * 400
    until = StopStringFilter(strings)
    started = time.process_time()
    shown = [until.add(letter) for letter in text]
    assert time.process_time() - started < 5
    assert "".join(shown) + until.rest() == text


def test_answers_share_what_their_stop_strings_need():
    strings = ["a" * 1023 + chr(ord("A") + number) for number in range(64)]
    started = time.process_time()
    assert not any(StopStringFilter(strings).stopped for _ in range(1000))
    assert time.process_time() - started < 5


def test_a_stop_string_ends_the_answer_as_soon_as_the_text_has_it():
    """Also one that begins with the space between prompt and answer, which the answer alone would lack."""
    tokenizer = sentencepiece("first")
    prompt = tokenizer.encode("The capital of France")
    tokens = tokenizer.encode("The capital of France is Paris.")[len(prompt) :]
    made = []

    class Engine:
        def generate(self, prompts, max_new_tokens, *, on_token, **options):
            for token in tokens:
                made.append(token)
                if on_token(0, token):
                    return [Completion(made, [], "stop")]
            return [Completion(made, [], "length")]

    answer = AnswerText(tokenizer.decode, prompt, [" is"])
    (completion,) = generate_answers(Engine(), tokenizer, [prompt], [answer], len(tokens), Sampling())
    assert (answer.text, answer.stopped, completion.ended) == ("", True, "stop")
    assert len(made) < len(tokens)
