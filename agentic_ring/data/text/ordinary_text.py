"""Ordinary English that every Python brings along: the language reference, in ``pydoc_data.topics``.

Its topics are divided into paragraphs to train on, which stand between the lines of records, and topics that
are held out, on which ``evals/perplexity.py`` measures what finetuning did to a model's language.
"""

from functools import cache
from pydoc_data.topics import topics

HELD_OUT_EVERY = 3
"""One in so many topics is held out."""
_SHORTEST, _LONGEST = 200, 1200
"""Characters of a paragraph."""


def held_out_texts() -> list[str]:
    """The texts of the topics that no training sees."""
    return [topics[name] for name in sorted(topics)[::HELD_OUT_EVERY]]


@cache
def paragraphs() -> tuple[str, ...]:
    """Paragraphs of prose from the other topics, less those that a held-out one has too."""
    held_out = " ".join(" ".join(held_out_texts()).split())
    kept = {
        " ".join(paragraph.split())
        for number, name in enumerate(sorted(topics))
        if number % HELD_OUT_EVERY
        for paragraph in topics[name].split("\n\n")
        if _SHORTEST <= len(paragraph) <= _LONGEST and "::=" not in paragraph
    }
    return tuple(sorted(paragraph for paragraph in kept if paragraph not in held_out))
