"""Is an answer right? By the last number in it, as LongChat has it, or by the first."""

import re
from typing import Literal

Rule = Literal["last", "first"]

UNPARSABLE = -1
"""What LongChat takes an answer without any number for; no line holds it."""

MOST_DIGITS = 100
"""Python refuses to convert a number of thousands of digits, and a model may well write one."""


def parsed_number(answer: str, rule: Rule) -> int:
    """The number that an answer is taken for.

    LongChat takes the last; other versions of the test the first. They differ where an answer repeats
    the question ("line 17 is <4242>") or goes on after it.
    """
    numbers = re.findall(r"\d+", answer)
    if not numbers:
        return UNPARSABLE
    return int(numbers[-1 if rule == "last" else 0][:MOST_DIGITS])
