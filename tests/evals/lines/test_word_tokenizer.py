"""The tokenizers of the retrievers split any text in linear time."""

import time

import pytest

from evals.constructed_retriever import _tokenizer
from evals.lines.keys import all_words, word_lists
from evals.lines.word_tokenizer import LONGEST_WORD
from experiments.retriever.lessons import retriever_tokenizer


@pytest.mark.parametrize("text", ["a" * 100_000, "line " * 20_000, "a-'" * 30_000, "line a" + " " * 100_000])
def test_runs_of_letters_are_split_in_linear_time(text):
    for tokenizer in (retriever_tokenizer(), _tokenizer()):
        started = time.process_time()
        tokenizer.encode(text)
        assert time.process_time() - started < 5


def test_every_word_is_matched():
    assert max(len(word) for words in (*word_lists(), all_words()) for word in words) <= LONGEST_WORD
