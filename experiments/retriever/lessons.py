"""Training data of the small retriever: records of lines, and questions about them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from agentic_ring.data.text.tokenizer import Tokenizer
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


def adjective_token(adjective: str) -> str:
    """Token of the first half of a key."""
    return f"line {adjective}-"


def retriever_tokenizer() -> Tokenizer:
    r"""A tokenizer with five tokens per line; any other text becomes ``UNKNOWN``.

    They are ``line adjective-``, ``noun``, ``: REGISTER_CONTENT is <``, ``123`` and ``45>\n``.
    """
    adjectives, nouns = word_lists()
    words = [
        *(END, UNKNOWN),
        *map(adjective_token, adjectives),
        *nouns,
        *map(str, range(1, LARGEST_VALUE // 100 + 1)),
        *(f"{number:02}>\n" for number in range(100)),
        *(HEADER, START_OF_VALUE, ASKED, ASK, "\n", ">\n"),
    ]
    # Adjectives that contain hyphens are not cut at them.
    compound = "|".join(re.escape(word) for word in sorted(adjectives, key=len, reverse=True) if "-" in word)
    patterns = [
        HEADER,
        rf"line (?:{compound}|[\p{{L}} ]{{1,{LONGEST_WORD}}})-",
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
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("|".join(patterns)), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END])
    return Tokenizer(backend, eos=[END], add_bos=False, chat_template=CHAT_TEMPLATE)


@dataclass(frozen=True)
class Vocabulary:
    """Ids of the tokens of lessons.

    Attributes:
      adjectives, nouns: int32, one per word.
      hundreds: int32 [501], by a number's digits except the last two; the first is not used.
      units: int32 [100], by the last two digits, with the line's end.
      size: number of tokens of the whole vocabulary.
    """

    adjectives: np.ndarray
    nouns: np.ndarray
    hundreds: np.ndarray
    units: np.ndarray
    header: int
    start: int
    asked: int
    ask: int
    newline: int
    line_end: int
    end: int
    size: int

    @property
    def signs(self) -> tuple[int, ...]:
        """Tokens that are neither words nor parts of numbers."""
        return self.header, self.start, self.asked, self.ask, self.newline, self.line_end, self.end

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """The ids in the tokenizer of ``retriever_tokenizer``."""

        def numbers(words: Sequence[str]) -> np.ndarray:
            return np.array([tokenizer.token_id(word) for word in words], np.int32)

        adjectives, nouns = word_lists()
        special = numbers([HEADER, START_OF_VALUE, ASKED, ASK, "\n", ">\n", END]).tolist()
        return cls(
            numbers([adjective_token(word) for word in adjectives]),
            numbers(nouns),
            np.concatenate([[0], numbers([str(n) for n in range(1, LARGEST_VALUE // 100 + 1)])]),
            numbers([f"{number:02}>\n" for number in range(100)]),
            *special,
            size=tokenizer.vocab_size,
        )

    def partners(self, lines: float) -> float:
        """Average number of lines, among ``lines`` random ones, that share a word with a key."""
        return lines * (1 / len(self.adjectives) + 1 / len(self.nouns))

    def written(self, value: int) -> list[int]:
        """The tokens of a number and its line's end; two of them, or one for numbers from 10 to 99."""
        hundreds, units = divmod(value, 100)
        if value < 10:
            return [int(self.hundreds[value]), self.line_end]
        return ([int(self.hundreds[hundreds])] if hundreds else []) + [int(self.units[units])]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lesson:
    """Rows of records and questions.

    Attributes:
      tokens, positions: int32 [B, T].
      lines: int32 [B, T], line of the record that each token belongs to or asks for; -1 for neither.
      crowd: float32 [B, T], log of the number of tokens that each token stands for.
      answer_places: int32 [B, A], places directly before the answers' tokens, ``ANSWER`` per question.
      answers: int32 [B, A], these tokens.
      weight: float32 [B, A], 0 where a row has fewer questions, or an answer fewer tokens.
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


@dataclass
class Lessons:
    """An endless iterator of batches.

    Attributes:
      vocabulary: vocabulary of the tokenizer.
      tokens: tokens per row.
      rows: rows per batch.
      questions: maximum number of questions per row.
      crowding: factor on the lines that each line stands for; 0 lets each stand for itself only.
      seed: seed of all random draws.
      drawn: number of batches drawn so far.
    """

    vocabulary: Vocabulary
    tokens: int
    rows: int
    questions: int
    crowding: float
    seed: int
    drawn: int = 0

    def __next__(self) -> Lesson:
        """The next batch."""
        random = np.random.default_rng([self.seed, self.tokens, self.drawn])
        self.drawn += 1
        rows = [self._row(random) for _ in range(self.rows)]
        return Lesson(*(np.stack(column) for column in zip(*rows, strict=True)))

    def get_state(self) -> dict[str, Any]:
        """Number of batches drawn."""
        return {"drawn": self.drawn}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after this number of batches."""
        self.drawn = state["drawn"]

    def _row(self, random: np.random.Generator) -> tuple[np.ndarray, ...]:
        known = self.vocabulary
        a_question = TOKENS_A_QUESTION + ANSWER
        most = (self.tokens - 1 - a_question) // TOKENS_A_LINE
        # The number of lines is uniform on a logarithmic scale, from two on.
        lines = int(np.exp(random.uniform(np.log(2), np.log(most + 1))))
        questions = min(self.questions, lines, (self.tokens - 1 - lines * TOKENS_A_LINE) // a_question)
        adjectives, nouns, partners = _keys(random, lines, known)
        small = random.random(lines) < SMALL_NUMBERS
        values = np.where(small, random.integers(1, 100, lines), random.integers(1, LARGEST_VALUE + 1, lines))

        tokens, positions, line_of = [known.header], [0], [-1]
        words: list[tuple[int, int]] = []  # a place, and the line whose key stands before it
        answers: list[tuple[int, list[int]]] = []  # a place, and the tokens after it
        gaps = _gaps(random, lines)
        place = 1

        def put(pieces: list[int], line: int) -> None:
            nonlocal place
            tokens.extend(pieces)
            line_of.extend([line] * len(pieces))
            positions.extend(range(place, place + len(pieces)))
            place += len(pieces)

        for line in range(lines):
            place += gaps[line]
            key = [int(known.adjectives[adjectives[line]]), int(known.nouns[nouns[line]])]
            put([*key, known.start], line)
            written = known.written(int(values[line]))
            words += [(len(tokens) - 1 + number, line) for number in range(1 + len(written))]
            put(written, line)
        # An average key then shares a word with as many lines as it does in a record without gaps.
        stands_for = known.partners(gaps.sum() / TOKENS_A_LINE) / partners
        crowd = np.zeros(self.tokens, np.float32)
        crowd[1 : len(tokens)] = np.log1p(self.crowding * stands_for)
        place += gaps[lines]
        for line in random.choice(lines, questions, replace=False):
            key = [int(known.adjectives[adjectives[line]]), int(known.nouns[nouns[line]])]
            put([known.asked, *key, known.ask, known.newline, *key, known.start], line)
            answer = [*known.written(int(values[line])), known.end]
            first = len(tokens) - 1
            answers.append((first, answer))
            words += [(first, line), (first + 1, line)] * 4
            put(answer, line)

        return (
            _filled(tokens, self.tokens, 0),
            _filled(positions, self.tokens, place),
            _filled(line_of, self.tokens, -1),
            crowd,
            *self._answers(answers),
            *self._words(random, words, adjectives, nouns),
        )

    def _answers(self, answers: list[tuple[int, list[int]]]) -> tuple[np.ndarray, ...]:
        weight = np.zeros((self.questions, ANSWER), np.float32)
        places, tokens = np.zeros((2, self.questions, ANSWER), np.int32)
        for question, (first, answer) in enumerate(answers):
            size = len(answer)
            weight[question, :size] = 1.0
            places[question, :size] = first + np.arange(size)
            tokens[question, :size] = answer
        return weight.ravel(), places.ravel(), tokens.ravel()

    def _words(
        self,
        random: np.random.Generator,
        words: list[tuple[int, int]],
        adjectives: np.ndarray,
        nouns: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        picked = random.choice(len(words), 2 * self.questions)
        places, lines = np.array(words, np.int32)[picked].T
        return places, adjectives[lines].astype(np.int32), nouns[lines].astype(np.int32)


def _keys(
    random: np.random.Generator, count: int, vocabulary: Vocabulary
) -> tuple[np.ndarray, np.ndarray, float]:
    """Draws distinct pairs of words, as indices, and says how many share a word with an average one.

    Half of the draws use few words, so that many keys share one, as in long records.
    """
    adjectives, nouns = len(vocabulary.adjectives), len(vocabulary.nouns)
    if random.random() < 0.5:
        adjectives = int(random.integers(2, min(adjectives, count + 2) + 1))
        nouns = min(nouns, -(-4 * count // adjectives))
    pairs = random.choice(adjectives * nouns, count, replace=False)
    first = random.choice(len(vocabulary.adjectives), adjectives, replace=False)
    second = random.choice(len(vocabulary.nouns), nouns, replace=False)
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
    filled = np.full(size, rest, np.int32)
    filled[: len(values)] = values
    return filled
