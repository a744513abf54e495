"""Lines whose key shares a word with the key that a question asks for: the likeliest ones to be mistaken."""

from functools import cache

from evals.lines.keys import word_lists
from evals.lines.longchat_prompt import START_OF_VALUE


def count_word_partners(record: str, key: str) -> int:
    """Returns how many lines of a record, other than the key's own, share its adjective or its noun.

    Words that are the same up to a hyphen, such as "old" and "old-fashioned", count as shared.

    Args:
      record: header and lines.
      key: key of a line of the record, an adjective and a noun with a hyphen between them.
    """
    adjective, noun = _words(key)
    return record.count(f"\nline {adjective}-") + record.count(f"-{noun}{START_OF_VALUE}") - 2


def _words(key: str) -> tuple[str, str]:
    """The words of a key; in a file with other words than ours, the first hyphen is between them."""
    known = [word for word in _compound_adjectives() if key.startswith(f"{word}-")]
    adjective = known[0] if known else key.partition("-")[0]
    return adjective, key.removeprefix(f"{adjective}-")


@cache
def _compound_adjectives() -> list[str]:
    adjectives, _ = word_lists()
    return [word for word in adjectives if "-" in word]
