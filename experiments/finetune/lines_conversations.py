"""Conversations about records of lines, in several wordings, for finetuning a model to retrieve them.

Each conversation begins with a record, in which paragraphs of ordinary text may stand between the lines, and
continues with questions for some of them. An answer repeats its line: first the key, after which to copy the
value is what a language model does anyway. A few conversations ask to continue ordinary text instead, so that
the model keeps its language.
"""

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentic_ring.data.text.chat import Turn, chat_template
from agentic_ring.data.text.conversation_tokens import tokenize
from agentic_ring.data.text.ordinary_text import paragraphs
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.files.atomic import replacing
from data_prep.conversations import is_test
from evals.retrieval.documents import HEADER, KINDS, LARGEST_VALUE, line_keys, line_text, question_text
from experiments.finetune.presets import TEST_SHARE

TEST_CONVERSATIONS = 4
"""Conversations held out, at least."""
_TOKENS_A_QUESTION = 128
"""A conversation has at most one question for so many tokens."""
_FEW_QUESTIONS = 3
"""Half of the conversations have at most so many questions. Earlier answers show what to do with a question:
a model that learns mostly from later ones does not copy the key of a first one."""
_TOKENS_A_LINE = 32
"""About; where the search for the number of lines begins."""
_SHORTEST = 768
"""Tokens of the shortest conversations."""
_SHARE_OF_ANY_LENGTH = 0.3
"""Share of the conversations that are shorter than a row, evenly over the logarithm of their length."""
_SHARE_WITH_TEXT = 0.4
"""Share of the conversations with ordinary text between the lines."""
_TEXT_EVERY = 4
"""After so many conversations one continues a text. Such answers are hard to predict: where they are a third
of all answer tokens, most of the gradient is theirs, and little is learned about lines."""


@dataclass(frozen=True)
class Wording:
    """How a record says that a key has a value, and how it is asked for; see ``WORDINGS``."""

    header: str
    line: str
    question: str
    answer: str
    share: float


WORDINGS = (
    # LongChat's, exactly, as line retrieval asks.
    Wording(
        HEADER,
        line_text("{key}", "{value}"),
        question_text("{key}"),
        line_text("{key}", "{value}").strip(),
        share=0.5,
    ),
    Wording(
        "Here is a list of codes. I will ask you for some of them.\n\n",
        "The code of {key} is {value}.\n",
        "\nWhat is the code of {key}?",
        "The code of {key} is {value}.",
        0.15,
    ),
    Wording(
        "Remember this table.\n\n| name | number |\n|---|---|\n",
        "| {key} | {value} |\n",
        "\nWhich number stands beside {key} in the table?",
        "| {key} | {value} |",
        0.1,
    ),
    Wording(
        "The following settings are in use:\n\n",
        '"{key}": "{value}",\n',
        '\nWhat is the value of "{key}"?',
        '"{key}": "{value}"',
        0.1,
    ),
    Wording(
        "Read these notes.\n\n",
        "Note. The number of {key} is {value}.\n",
        "\nWhat is the number of {key}, according to the notes?",
        "The number of {key} is {value}.",
        0.15,
    ),
)


def write_lines_conversations(
    path: Path, context: int, rows: int, tokenizer: Tokenizer, template_name: str
) -> None:
    """Writes a jsonl of conversations that fill about so many rows of ``context`` tokens, and tests."""
    template = chat_template(template_name, tokenizer)

    def count_tokens(turns: Sequence[Turn]) -> int:
        return len(tokenize(tokenizer, template, turns))

    filled = tests = number = 0
    with replacing(path) as beside, beside.open("w", encoding="utf-8") as file:

        def write(name: str, turns: Sequence[Turn]) -> int:
            speakers = itertools.cycle(("human", "gpt"))
            spoken = [{"from": next(speakers), "value": turn.text} for turn in turns]
            file.write(json.dumps({"id": name, "conversations": spoken}) + "\n")
            return count_tokens(turns)

        while filled < rows * context or tests < TEST_CONVERSATIONS:
            name, number = f"lines-{context}-{number}", number + 1
            if is_test(name, TEST_SHARE):
                write(name, conversation(name, context, count_tokens))
                tests += 1
            elif filled < rows * context:
                filled += write(name, conversation(name, context, count_tokens))
                name = f"text-{context}-{number}"
                if number % _TEXT_EVERY == 0 and not is_test(name, TEST_SHARE):
                    filled += write(name, continuation(name))


def continuation(name: str) -> list[Turn]:
    """A paragraph of ordinary text that is continued from a word in its first half."""
    draw = random.Random(name)
    words = draw.choice(paragraphs()).split(" ")
    given = draw.randint(len(words) // 8, len(words) // 2)
    start, rest = (" ".join(part) for part in (words[:given], words[given:]))
    return [Turn("user", f"Continue this text.\n\n{start}"), Turn("assistant", rest)]


def conversation(name: str, context: int, count_tokens: Callable[[Sequence[Turn]], int]) -> list[Turn]:
    """The longest conversation of this name that has at most ``context`` tokens, or a shorter one's."""
    draw = random.Random(name)
    room = context
    if draw.random() < _SHARE_OF_ANY_LENGTH and context > _SHORTEST:
        room = round(math.exp(draw.uniform(math.log(_SHORTEST), math.log(context))))
    wording = draw.choices(WORDINGS, [each.share for each in WORDINGS])[0]
    most = draw.choice((_FEW_QUESTIONS, max(1, room // _TOKENS_A_QUESTION)))
    kind, questions = draw.choice(KINDS), draw.randint(1, most)
    text_share = draw.uniform(0.05, 0.5) if draw.random() < _SHARE_WITH_TEXT else 0.0
    seed = draw.random()

    def build(lines: int) -> list[Turn]:
        draw = random.Random(seed)
        keys = line_keys(kind, lines, draw)
        facts = [{"key": key, "value": draw.randint(1, LARGEST_VALUE)} for key in keys]
        record = [wording.header]
        for fact in facts:
            if draw.random() < text_share:
                record.append(f"\n{draw.choice(paragraphs())}\n\n")
            record.append(wording.line.format(**fact))
        turns = []
        for fact in draw.sample(facts, min(questions, lines)):
            turns.append(Turn("user", wording.question.format(**fact)))
            turns.append(Turn("assistant", wording.answer.format(**fact)))
        turns[0] = Turn("user", "".join(record) + turns[0].text)
        return turns

    # In proportion to the size, and then down, as text makes lines unequal.
    lines = max(questions, room // _TOKENS_A_LINE)
    for _ in range(3):
        lines = max(questions, lines * room // count_tokens(build(lines)))
    turns = build(lines)
    while count_tokens(turns) > room and lines > 1:
        lines = min(lines - 1, lines * 19 // 20)
        turns = build(lines)
    return turns
