"""Training data of the small retriever: records of lines, and questions about them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.training.optimizer import OptimizerConfig, TrainConfig
from evals.retrieval.documents import HEADER, LARGEST_VALUE, QUESTION_START, START_OF_VALUE, word_lists

END, UNKNOWN = "<end>", "<unknown>"
ASKED = f"{QUESTION_START} Tell me what is the <REGISTER_CONTENT> in "
"""The text between the end of the record and the key in a question."""
ASK = "? I need the number."
LONGEST_WORD = 32
"""Letters of a word at most. Without a limit, the time to split a run of letters grows with its square."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}"
    "{{ '>\\n' + eos_token + '\\n' }}{% elif ' in line ' in message.content %}{{ '\\nline '"
    " + message.content.split(' in line ')[-1].split('? I need')[0] + ': REGISTER_CONTENT is <' }}"
    "{% endif %}{% endfor %}"
)
"""A question, followed by the beginning of the line that answers it, where it asks for one; the answer to it
is the number, to which the rest of the line is added."""

TOKENS_A_LINE = 5
TOKENS_A_QUESTION = 10
"""Tokens from the end of the record to the answer, exclusive."""
ANSWER = 3
"""Maximum number of tokens of an answer, including its end."""

SMALL_NUMBERS = 0.05
"""Share of numbers below 100. Uniform draws give one in 500: too few to learn how they are written."""

FARTHEST_POSITION = 2**19
"""Range of positions over which some rows spread their lines, as if other lines were between them."""


@dataclass(frozen=True)
class Vocabulary:
    """The retriever's tokens; those of a kind have adjacent ids.

    Attributes:
      words: all tokens, by id.
      adjectives, nouns: ids of the words of keys.
      hundreds: ids of a number's digits except the last two, from 1 on.
      units: ids of the last two digits, with the line's end.
      signs: ids of what is neither a word nor a part of a number: the header, what precedes a value, the two
        texts around the key of a question, a new line, the end of a line, and the end of an answer.
    """

    words: tuple[str, ...]
    adjectives: range
    nouns: range
    hundreds: range
    units: range
    signs: tuple[int, ...]

    def written(self, value: int) -> list[int]:
        """The tokens of a number and its line's end; two of them, or one for numbers from 10 to 99."""
        hundreds, units = divmod(value, 100)
        if value < 10:
            return [self.hundreds[value - 1], self.signs[5]]
        return ([self.hundreds[hundreds - 1]] if hundreds else []) + [self.units[units]]


@cache
def vocabulary() -> Vocabulary:
    """The tokens of all lines and questions."""
    adjectives, nouns = word_lists()
    kinds = (
        [END, UNKNOWN],
        [f"line {adjective}-" for adjective in adjectives],
        nouns,
        [str(number) for number in range(1, LARGEST_VALUE // 100 + 1)],
        [f"{number:02}>\n" for number in range(100)],
        [HEADER, START_OF_VALUE, ASKED, ASK, "\n", ">\n"],
    )
    ends = np.cumsum([len(kind) for kind in kinds]).tolist()
    _, *words, signs = (range(end - len(kind), end) for kind, end in zip(kinds, ends, strict=True))
    return Vocabulary(tuple(word for kind in kinds for word in kind), *words, signs=(*signs, 0))


def retriever_tokenizer() -> Tokenizer:
    r"""A tokenizer with five tokens per line; any other text becomes ``UNKNOWN``.

    They are ``line adjective-``, ``noun``, ``: REGISTER_CONTENT is <``, ``123`` and ``45>\n``.
    """
    # Adjectives that contain hyphens are not cut at them.
    compound = sorted((word for word in word_lists()[0] if "-" in word), key=len, reverse=True)
    patterns = [
        HEADER,
        rf"line (?:{'|'.join(map(re.escape, compound))}|[\p{{L}} ]{{1,{LONGEST_WORD}}})-",
        START_OF_VALUE,
        rf"[\p{{L}} \-']{{1,{LONGEST_WORD}}}(?={START_OF_VALUE}|\{ASK})",
        r"\d{1,3}(?=\d\d>\n)",
        r"\d\d>\n",
        r"\d(?=>\n)",
        ASKED,
        rf"\{ASK}",
        r">\n",
        r"\n",
    ]
    ids = {word: number for number, word in enumerate(vocabulary().words)}
    backend = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("|".join(patterns)), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END])
    return Tokenizer(backend, eos=[END], add_bos=False, chat_template=CHAT_TEMPLATE)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lesson:
    """Rows of records and questions.

    Attributes:
      tokens, positions: int32 [B, T].
      lines: int32 [B, T], line of the record that each token belongs to or asks for; -1 for neither.
      crowd: float32 [B, T], log of the number of tokens that each token stands for.
      weight: float32 [B, A], 0 where a row has fewer questions, or an answer fewer tokens.
      answer_places: int32 [B, A], places directly before the answers' tokens, ``ANSWER`` per question.
      answers: int32 [B, A], these tokens.
      word_places: int32 [B, W], places after a key's words in its line.
      adjectives, nouns: int32 [B, W], indices of these keys' words in the word lists.
    """

    tokens: Any
    positions: Any
    lines: Any
    crowd: Any
    weight: Any
    answer_places: Any
    answers: Any
    word_places: Any
    adjectives: Any
    nouns: Any


@dataclass(frozen=True)
class LessonStage:
    """Training on rows of one length."""

    tokens: int
    """Tokens per row."""
    rows: int
    """Rows per update."""
    questions: int
    """Maximum number of questions per row."""
    steps: int
    """Number of updates."""
    learning_rate: float
    """Peak learning rate."""
    crowding: float
    """Factor on the lines that each line stands for; 0 lets each stand for itself only."""

    def training(self, seed: int) -> TrainConfig:
        """The training settings of this stage."""
        optimizer = OptimizerConfig(
            self.learning_rate, warmup_steps=50, weight_decay=0.0, clip_norm=1.0, beta2=0.99
        )
        return TrainConfig(self.steps, self.rows, optimizer, checkpoint_every=500, log_every=10, seed=seed)


@dataclass
class Lessons:
    """An endless iterator of a stage's batches; ``drawn`` of them were drawn so far."""

    stage: LessonStage
    seed: int
    drawn: int = 0

    def __next__(self) -> Lesson:
        """The next batch."""
        random = np.random.default_rng([self.seed, self.stage.tokens, self.drawn])
        self.drawn += 1
        rows = [_row(random, self.stage) for _ in range(self.stage.rows)]
        return Lesson(*(np.stack(column) for column in zip(*rows, strict=True)))

    def get_state(self) -> dict[str, Any]:
        """Number of batches drawn."""
        return {"drawn": self.drawn}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after this number of batches."""
        self.drawn = state["drawn"]


def _row(random: np.random.Generator, stage: LessonStage) -> tuple[np.ndarray, ...]:
    """The fields of a lesson for one row."""
    known, a_question = vocabulary(), TOKENS_A_QUESTION + ANSWER
    header, start, asked, ask, newline, _, end = known.signs
    most = (stage.tokens - 1 - a_question) // TOKENS_A_LINE
    # The number of lines is uniform on a logarithmic scale, from two on.
    lines = int(np.exp(random.uniform(np.log(2), np.log(most + 1))))
    questions = min(stage.questions, lines, (stage.tokens - 1 - lines * TOKENS_A_LINE) // a_question)
    adjectives, nouns, partners = _keys(random, lines)
    keys = [[known.adjectives[one], known.nouns[other]] for one, other in zip(adjectives, nouns, strict=True)]
    small = random.random(lines) < SMALL_NUMBERS
    values = np.where(small, random.integers(1, 100, lines), random.integers(1, LARGEST_VALUE + 1, lines))
    written = [known.written(value) for value in values.tolist()]
    gaps = _gaps(random, lines)

    tokens, positions, line_of = [header], [0], [-1]
    words: list[tuple[int, int]] = []  # a place, and the line whose key stands before it
    place = 1

    def put(pieces: list[int], line: int) -> None:
        nonlocal place
        tokens.extend(pieces)
        line_of.extend([line] * len(pieces))
        positions.extend(range(place, place + len(pieces)))
        place += len(pieces)

    for line in range(lines):
        place += gaps[line]
        put([*keys[line], start], line)
        words += [(len(tokens) - 1 + number, line) for number in range(1 + len(written[line]))]
        put(written[line], line)
    # An average key then shares a word with as many lines as it does in a record without gaps.
    removed = gaps.sum() / TOKENS_A_LINE
    stands_for = removed * (1 / len(known.adjectives) + 1 / len(known.nouns)) / partners
    crowd = np.zeros(stage.tokens, np.float32)
    crowd[1 : len(tokens)] = np.log1p(stage.crowding * stands_for)
    place += gaps[lines]
    weight = np.zeros((stage.questions, ANSWER), np.float32)
    answer_places, answers = np.zeros((2, stage.questions, ANSWER), np.int32)
    for question, line in enumerate(random.choice(lines, questions, replace=False)):
        put([asked, *keys[line], ask, newline, *keys[line], start], line)
        answer, first = [*written[line], end], len(tokens) - 1
        weight[question, : len(answer)] = 1.0
        answer_places[question, : len(answer)] = first + np.arange(len(answer))
        answers[question, : len(answer)] = answer
        words += [(first, line), (first + 1, line)] * 4
        put(answer, line)
    picked = random.choice(len(words), 2 * stage.questions)
    word_places, word_lines = np.array(words, np.int32)[picked].T
    return (
        _filled(tokens, stage.tokens, 0),
        _filled(positions, stage.tokens, place),
        _filled(line_of, stage.tokens, -1),
        crowd,
        *(array.ravel() for array in (weight, answer_places, answers)),
        word_places,
        *(indices[word_lines].astype(np.int32) for indices in (adjectives, nouns)),
    )


def _keys(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Draws distinct pairs of words, as indices, and says how many share a word with an average one.

    Half of the draws use few words, so that many keys share one, as in long records.
    """
    known = vocabulary()
    adjectives, nouns = len(known.adjectives), len(known.nouns)
    if random.random() < 0.5:
        adjectives = int(random.integers(2, min(adjectives, count + 2) + 1))
        nouns = min(nouns, -(-4 * count // adjectives))
    pairs = random.choice(adjectives * nouns, count, replace=False)
    first = random.choice(len(known.adjectives), adjectives, replace=False)
    second = random.choice(len(known.nouns), nouns, replace=False)
    return first[pairs // nouns], second[pairs % nouns], count * (1 / adjectives + 1 / nouns)


def _gaps(random: np.random.Generator, lines: int) -> np.ndarray:
    """Number of positions skipped before each line and before the questions.

    A third of the rows skip none. The others look like a record of up to ``FARTHEST_POSITION`` tokens
    from which most lines were removed; those that remain stand in runs of any length.
    """
    if random.random() < 1 / 3:
        return np.zeros(lines + 1, np.int64)
    length = int(np.exp(random.uniform(np.log(1024), np.log(FARTHEST_POSITION - 65_536))))
    runs = random.integers(0, length, random.integers(1, lines + 2))
    return np.diff(np.sort(random.choice(runs, lines + 1)), prepend=0)


def _filled(values: Sequence[int], size: int, rest: int) -> np.ndarray:
    return np.array([*values, *[rest] * (size - len(values))], np.int32)
