"""Synthetic conversations from which a tiny model learns something in minutes; nothing like real ones."""

import json
import random
from collections.abc import Callable
from pathlib import Path

from agentic_ring.files.atomic import replacing

_WORDS = (
    *("river", "stone", "lantern", "maple", "copper", "meadow", "window", "harbour", "pepper", "button"),
    *("garden", "silver", "thunder", "pocket", "velvet", "candle", "orchard", "whistle", "marble", "feather"),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _spelling(draw: random.Random) -> tuple[str, str]:
    word = draw.choice(_WORDS)
    return f"Spell the word {word}.", f"The word {word} is spelled {', '.join(word)}."


def _counting(draw: random.Random) -> tuple[str, str]:
    first, count = draw.randrange(1, 90), draw.randrange(3, 8)
    numbers = ", ".join(str(first + step) for step in range(count))
    return f"Count {count} numbers from {first}.", f"Here they are: {numbers}."


def _days(draw: random.Random) -> tuple[str, str]:
    day = draw.randrange(7)
    return f"Which day follows {_DAYS[day]}?", f"After {_DAYS[day]} comes {_DAYS[(day + 1) % 7]}."


def _repeating(draw: random.Random) -> tuple[str, str]:
    words = " ".join(draw.sample(_WORDS, 5))
    return f"Repeat after me: {words}", f"You said: {words}"


_QUESTIONS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_spelling, _counting, _days, _repeating)


def write_demo_conversations(path: Path, count: int = 1500, seed: int = 0) -> None:
    """Writes a jsonl of ``count`` conversations of two to five questions each; a seed gives the same file."""
    draw = random.Random(seed)
    with replacing(path) as beside, beside.open("w") as file:
        for number in range(count):
            turns = []
            for _ in range(draw.randrange(2, 6)):
                question, answer = draw.choice(_QUESTIONS)(draw)
                turns += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            file.write(json.dumps({"id": f"demo-{number}", "conversations": turns}) + "\n")
