"""Tokenizers for line retrieval with keys of words, in which a word of a key is one token.

For models that know nothing else, where such a vocabulary keeps documents short: the one that is trained
(``experiments/train_retriever.py``) and the one that is set by hand (``evals/constructed_retriever.py``).
"""

import re
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from agentic_ring.data.text.tokenizer import Tokenizer
from evals.lines.keys import word_lists
from evals.lines.longchat_prompt import QUESTION_START

END, UNKNOWN = "<end>", "<unknown>"
ASKED = f"{QUESTION_START} Tell me what is the <REGISTER_CONTENT> in "
"""From the end of the record to the key that is asked for."""
ASK = "? I need the number."
START = ": REGISTER_CONTENT is <"
NOUN_PATTERN = r"[\p{L} \-']+"
"""A noun, where it is known to begin."""


def adjective_token(adjective: str) -> str:
    """The beginning of a key."""
    return f"line {adjective}-"


def adjective_pattern() -> str:
    """Matches ``adjective_token`` of any adjective: some have hyphens of their own."""
    adjectives, _ = word_lists()
    compound = "|".join(re.escape(word) for word in adjectives if "-" in word)
    return rf"line (?:{compound}|[\p{{L}} ]+)-"


def line_tokenizer(words: Sequence[str], patterns: Sequence[str], chat_template: str) -> Tokenizer:
    """A tokenizer that knows these words alone; all else becomes ``UNKNOWN``.

    Args:
      words: the vocabulary, numbered from 2; 0 is ``END``, which ends an answer, and 1 ``UNKNOWN``.
      patterns: regular expressions of words; where several match, the first counts.
      chat_template: how a question is put, in Jinja.
    """
    vocabulary = {word: number for number, word in enumerate([END, UNKNOWN, *words])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("|".join(patterns)), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END])
    return Tokenizer(backend, eos=[END], add_bos=False, chat_template=chat_template)
