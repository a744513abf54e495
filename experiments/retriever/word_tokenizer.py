"""Tokenizers for line retrieval with keys of words: each word of a key is one token.

They keep documents short for models that know nothing else: the trained retriever
(``experiments/train_retriever.py``) and the hand-built one (``evals/constructed_retriever.py``).
"""

import re
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from agentic_ring.data.text.tokenizer import Tokenizer
from evals.retrieval.documents import QUESTION_START
from evals.retrieval.keys import word_lists

END, UNKNOWN = "<end>", "<unknown>"
ASKED = f"{QUESTION_START} Tell me what is the <REGISTER_CONTENT> in "
"""The text between the end of the record and the key in a question."""
ASK = "? I need the number."
START = ": REGISTER_CONTENT is <"
LONGEST_WORD = 32
"""Letters of a word at most. Without a limit, the time to split a run of letters grows with its square."""
NOUN_PATTERN = rf"[\p{{L}} \-']{{1,{LONGEST_WORD}}}"
"""Matches a noun from its first letter on."""


def adjective_token(adjective: str) -> str:
    """Token of the first half of a key."""
    return f"line {adjective}-"


def adjective_pattern() -> str:
    """Matches ``adjective_token`` of any adjective."""
    adjectives, _ = word_lists()
    return f"line {first_word_pattern(adjectives)}"


def first_word_pattern(words: Sequence[str]) -> str:
    """Matches the first word of a key and its hyphen; ``words`` that contain hyphens are not cut at them."""
    compound = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True) if "-" in word)
    return rf"(?:{compound}|[\p{{L}} ]{{1,{LONGEST_WORD}}})-"


def line_tokenizer(words: Sequence[str], patterns: Sequence[str], chat_template: str) -> Tokenizer:
    """A tokenizer that knows only these words; any other text becomes ``UNKNOWN``.

    Args:
      words: the vocabulary, numbered from 2; 0 is ``END``, which ends an answer, and 1 is ``UNKNOWN``.
      patterns: regular expressions that match words; the first match counts.
      chat_template: Jinja template of a question.
    """
    vocabulary = {word: number for number, word in enumerate([END, UNKNOWN, *words])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("|".join(patterns)), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END])
    return Tokenizer(backend, eos=[END], add_bos=False, chat_template=chat_template)
