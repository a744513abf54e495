"""Conversations about records of lines, in several wordings, for finetuning a model to retrieve them.

A record, in which paragraphs of ordinary text may stand between the lines, is followed by questions for some
of them. An answer repeats its line: first the key, after which to copy the value is what a language model
does anyway. Most records are asked their questions separately: each is the first one of a conversation, and
the record is packed once for all of them (``share_beginning``). A few conversations continue ordinary text
instead, so that the model keeps its language.
"""

import math
import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from agentic_ring.data.text.chat import ChatTemplate, Turn
from agentic_ring.data.text.conversation_tokens import TokenizedText, share_beginning, tokenize
from agentic_ring.data.text.ordinary_text import paragraphs
from agentic_ring.data.text.packing import PackedDescription, RowPacker, packed_writer
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.files.atomic import replacing_folder
from data_prep.conversations import is_test
from data_prep.sharegpt import SPLITS
from evals.retrieval.documents import HEADER, KINDS, LARGEST_VALUE, line_keys, line_text, question_text
from experiments.finetune.presets import TEST_SHARE

TEST_CONVERSATIONS = 2
"""Records held out, at least."""
_TOKENS_A_QUESTION = 128
"""A record has at most one question for so many tokens."""
_SHARE_TOGETHER = 0.25
"""Share of the records whose questions follow each other in one conversation. Earlier answers show what to do
with a question: a model that learns mostly from later ones does not copy the key of a first one."""
_TOKENS_A_LINE = 32
"""About; where the search for the number of lines begins."""
_SHORTEST = 768
"""Tokens of the shortest conversations."""
_SHARE_OF_ANY_LENGTH = 0.3
"""Share of the records that are shorter than a row, evenly over the logarithm of their length."""
_SHARE_WITH_TEXT = 0.4
"""Share of the records with ordinary text between the lines."""
_TEXT_EVERY = 4
"""After so many records one continues a text. Such answers are hard to predict: where they are a third
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


@dataclass(frozen=True)
class LinesText:
    """A record and its questions, or ordinary text: conversations that begin alike, and their tokens."""

    conversations: list[list[Turn]]
    tokens: TokenizedText
    """Those to pack; what the conversations share stands once."""

    @classmethod
    def tokenized(
        cls, conversations: list[list[Turn]], tokenizer: Tokenizer, template: ChatTemplate
    ) -> "LinesText":
        """Conversations of one text, with their tokens."""
        texts = [tokenize(tokenizer, template, turns) for turns in conversations]
        return cls(conversations, texts[0] if len(texts) == 1 else share_beginning(texts))


def write_lines_rows(
    folder: Path, context: int, rows: int, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    """Writes about so many packed rows of ``context`` tokens for training, and some to test."""
    description = PackedDescription(tokenizer.digest, tokenizer.vocab_size, template.name)
    with replacing_folder(folder) as beside, ExitStack() as stack:
        packers = {split: RowPacker(context) for split in SPLITS}
        writers = {
            split: stack.enter_context(packed_writer(beside / f"{split}.h5", description, context))
            for split in SPLITS
        }

        def write(split: str, text: LinesText) -> int:
            for row in packers[split].add(text.tokens):
                writers[split](row)
            return len(text.tokens)

        filled = tests = number = 0
        while filled < rows * context or tests < TEST_CONVERSATIONS:
            name, number = f"lines-{context}-{number}", number + 1
            if is_test(name, TEST_SHARE):
                write("test", record(name, context, tokenizer, template))
                tests += 1
            elif filled < rows * context:
                filled += write("train", record(name, context, tokenizer, template))
                if number % _TEXT_EVERY == 0:
                    filled += write("train", continuation(f"text-{context}-{number}", tokenizer, template))
        for split, packer in packers.items():
            for row in packer.finish():
                writers[split](row)


def continuation(name: str, tokenizer: Tokenizer, template: ChatTemplate) -> LinesText:
    """A paragraph of ordinary text that is continued from a word in its first half."""
    draw = random.Random(name)
    words = draw.choice(paragraphs()).split(" ")
    given = draw.randint(len(words) // 8, len(words) // 2)
    start, rest = (" ".join(part) for part in (words[:given], words[given:]))
    turns = [Turn("user", f"Continue this text.\n\n{start}"), Turn("assistant", rest)]
    return LinesText.tokenized([turns], tokenizer, template)


def record(name: str, context: int, tokenizer: Tokenizer, template: ChatTemplate) -> LinesText:
    """The longest record of this name that has, with its questions, at most ``context`` tokens, or fewer."""
    draw = random.Random(name)
    room = context
    if draw.random() < _SHARE_OF_ANY_LENGTH and context > _SHORTEST:
        room = round(math.exp(draw.uniform(math.log(_SHORTEST), math.log(context))))
    wording = draw.choices(WORDINGS, [each.share for each in WORDINGS])[0]
    together = draw.random() < _SHARE_TOGETHER
    kind, questions = draw.choice(KINDS), draw.randint(1, max(1, room // _TOKENS_A_QUESTION))
    text_share = draw.uniform(0.05, 0.5) if draw.random() < _SHARE_WITH_TEXT else 0.0
    seed = draw.random()

    def build(lines: int) -> LinesText:
        draw = random.Random(seed)
        keys = line_keys(kind, lines, draw)
        facts = [{"key": key, "value": draw.randint(1, LARGEST_VALUE)} for key in keys]
        parts = [wording.header]
        for fact in facts:
            if draw.random() < text_share:
                parts.append(f"\n{draw.choice(paragraphs())}\n\n")
            parts.append(wording.line.format(**fact))
        whole = "".join(parts)
        asked = [
            (wording.question.format(**fact), wording.answer.format(**fact))
            for fact in draw.sample(facts, min(questions, lines))
        ]
        talks = [[Turn("user", question), Turn("assistant", answer)] for question, answer in asked]
        if together:
            talks = [[turn for talk in talks for turn in talk]]
        for talk in talks:
            talk[0] = Turn("user", whole + talk[0].text)
        return LinesText.tokenized(talks, tokenizer, template)

    # In proportion to the size, and then down, as text makes lines unequal.
    lines = max(questions, room // _TOKENS_A_LINE)
    text = build(lines)
    for _ in range(3):
        lines = max(questions, lines * room // len(text.tokens))
        text = build(lines)
    while len(text.tokens) > room and lines > 1:
        lines = min(lines - 1, lines * 19 // 20)
        text = build(lines)
    return text
