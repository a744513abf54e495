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
from tests.data.text.tokenizers_for_tests import byte_fallback, byte_level, sentencepiece

TEXTS = [
    "The capital of France is Paris.",
    "é, and 日本 🙂 after it",
    "ภาษาไทย, 한국어",
    "line 12: <4821>\n\n  indented",
]
KINDS = {"bytes": byte_level(), "sentencepiece": sentencepiece("first"), "byte_fallback": byte_fallback()}
kinds = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)


def pieces_of(tokenizer, tokens, before=(), skip_special=True) -> list[str]:
    pieces = IncrementalDetokenizer(tokenizer, before, skip_special)
    return [*map(pieces.add, tokens), pieces.rest()]


@kinds
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_in_many_pieces_without_half_characters(tokenizer, text):
    tokens = tokenizer.encode(text)
    shown = pieces_of(tokenizer, tokens)
    assert "".join(shown) == tokenizer.decode(tokens)
    if tokenizer is not KINDS["sentencepiece"]:  # which has no token for most of these
        assert "\ufffd" not in "".join(shown)
        assert len([piece for piece in shown if piece]) > 3 or "ภ" in text


@kinds
@given(data=st.data())
def test_pieces_of_any_tokens_add_up_to_the_decoded_text(tokenizer, data):
    """Of halves of characters, special tokens and ids without a token, too, and after any others."""
    rare = [*tokenizer.byte_ids, *tokenizer.special_ids] or [*range(tokenizer.vocab_size)]
    ids = st.integers(0, tokenizer.vocab_size + 3) | st.sampled_from(sorted(rare))
    tokens, skip = data.draw(st.lists(ids, max_size=30)), data.draw(st.booleans())
    assert "".join(pieces_of(tokenizer, tokens, (), skip)) == tokenizer.decode(tokens, skip)
    whole = tokenizer.encode("한국어 is Korean, ภาษาไทย is Thai")
    at = data.draw(st.integers(0, len(whole)))
    before = tokenizer.decode(whole[:at])
    if not before.endswith("\ufffd") and tokenizer.decode(whole).startswith(before):
        assert before + "".join(pieces_of(tokenizer, whole[at:], whole[:at])) == tokenizer.decode(whole)


def test_a_character_comes_whole_with_the_last_of_its_tokens():
    tokenizer = byte_level()
    tokens = tokenizer.encode("🙂!")
    pieces = IncrementalDetokenizer(tokenizer)
    assert [pieces.add(token) for token in tokens] == ["", "", "", "🙂", "!"]
    # Bytes that never form a character are returned at the end.
    broken = IncrementalDetokenizer(tokenizer)
    assert [broken.add(token) for token in tokens[:2]] == ["", ""]
    assert broken.rest() == tokenizer.decode(tokens[:2]) == "\ufffd"


def test_an_answer_continues_its_prompt_and_ends_as_soon_as_the_text_has_a_stop_string():
    """Also one that begins with the space between prompt and answer, which the answer alone would lack."""
    tokenizer = sentencepiece("first")
    prompt = tokenizer.encode("The capital of France")
    tokens = tokenizer.encode("The capital of France is Paris.")[len(prompt) :]

    class Engine:
        def generate(self, prompts, max_new_tokens, *, on_token, on_end, **options):
            for count, token in enumerate(tokens, start=1):
                if on_token(0, token):
                    return on_end(0, Completion(tokens[:count], [], "stop"))
            return on_end(0, Completion(tokens, [], "length"))

    for before, strings, text in ((prompt, (), " is Paris."), ((), (), "is Paris."), (prompt, [" is"], "")):
        answer = AnswerText(tokenizer, before, strings, ())
        generate_answers(Engine(), [prompt], [answer], 99, Sampling())
        completion = answer.completion
        assert (answer.text, answer.stopped) == (text, bool(strings))
        assert completion.ended == ("stop" if strings else "length")
        assert (len(completion.tokens) < len(tokens)) == bool(strings)


def test_a_stop_string_that_spells_a_special_token_is_that_token():
    tokenizer = byte_level()
    ends = [tokenizer.token_id(token) for token in ("<|end_header_id|>", "<|eot_id|>")]
    strings = ["the", "<|end_header_id|>\n\n", "<|end_header_id|>x", "<|unknown|>"]
    assert AnswerText(tokenizer, (), strings, ends[1:]).stop_tokens == {*ends}


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 12), max_size=5),
)
def test_text_is_passed_on_up_to_the_first_stop_string(text, strings, cuts):
    ends = ((text.find(string) + len(string), string) for string in strings if string in text)
    met = min(ends, key=lambda each: (each[0], -len(each[1])), default=None)
    expected = text if met is None else text[: met[0] - len(met[1])]
    until, shown = StopStringFilter(strings), ""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(edges):
        shown += until.add(text[start:end])
        assert expected.startswith(shown)
    assert (shown + until.rest(), until.stopped) == (expected, met is not None)


def test_the_possible_beginning_of_a_stop_string_is_held_back():
    until = StopStringFilter(["\n\nUser", "###"])
    shown = [until.add(piece) for piece in ("one", "\n", "\n", "two#", "#", "x##", "#more")]
    assert shown == ["one", "", "", "\n\ntwo", "", "##x", ""]
    assert (until.stopped, until.rest()) == (True, "")


def test_stop_strings_take_time_linear_in_the_answer_and_answers_share_what_they_need():
    # Every character continues a beginning of all 64 strings, and every 1023rd breaks it off.
    strings = ["a" * 1023 + chr(ord("A") + number) for number in range(64)]
    text = ("a" * 1022 + "b") * 100
    started = time.process_time()
    filters = [StopStringFilter(strings) for _ in range(1000)]
    shown = [filters[0].add(letter) for letter in text]
    assert time.process_time() - started < 5
    assert "".join(shown) + filters[0].rest() == text
