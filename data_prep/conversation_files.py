"""Reads conversations from JSON arrays and jsonl files of any size, one at a time.

Arrays are decoded entry by entry by the standard library, not by ijson, which tells no line of a bad record,
refuses NaN, large numbers and a byte order mark, and needs memory quadratic in the nesting of a broken file.

Known formats of a record (ShareGPT's own, FastChat's, OpenAI's)::

    {"id": "x", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
"""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from agentic_ring.data.text.chat import Role, Turn
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import DataError

_READ_BYTES = 1 << 20
_MOST_CHARACTERS = 1 << 28
"""Limit for one record; a longer one means that a quote or a bracket is missing."""
_NEAR_END = 16
"""Maximum length of a JSON token that may be cut in two at the end of the text read so far."""
_MORE_OF_A_NUMBER = re.compile(r"|\.|[eE][+-]?")
"""Text after a complete number that may belong to it once more of the file is read."""
_WHITE = " \t\r\n"
_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


@dataclass(frozen=True)
class Record:
    """One entry of a file.

    Attributes:
      line: line on which it begins, from 1.
      end: number of bytes of the file read so far.
      value: the decoded JSON; None if it is not valid JSON.
      fault: what is wrong if it is not valid JSON, else empty.
    """

    line: int
    end: int
    value: Any
    fault: str = ""


@dataclass(frozen=True)
class Conversation:
    """The turns of a record, with normalised roles.

    Attributes:
      key: the record's id; None if it has none.
      turns: in order; only types and roles have been checked.
    """

    key: str | None
    turns: tuple[Turn, ...]


class OtherSpeakerError(DataError):
    """A conversation has a speaker that is neither user, assistant nor system, such as a tool."""


def records(path: Path) -> Iterator[Record]:
    """Yields the entries of a JSON array or the lines of a jsonl file; the first character tells which it is.

    A malformed line of a jsonl file is yielded with its fault, and reading continues.

    Raises:
      DataError: the file is missing, empty or not UTF-8, or its array is malformed.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}; give a ShareGPT JSON file, or a jsonl of conversations")
    first = b""
    with path.open("rb") as file:
        while not first and (block := file.read(_READ_BYTES)):
            first = block.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if not first:
        raise DataError(f"{path} is empty; give a file of conversations")
    yield from _array(path) if first == b"[" else _lines(path)


def conversation(value: Any) -> Conversation:
    """Returns the conversation that a record holds.

    Raises:
      OtherSpeakerError: it has another speaker.
      DataError: the record has an unknown format.
    """
    if not isinstance(value, dict):
        raise DataError(f"it is a {type(value).__name__}, expected an object with conversations or messages")
    turns = value.get("conversations", value.get("messages"))
    if not isinstance(turns, list):
        raise DataError("it has no list of conversations or messages")
    key = value.get("id")
    if key is not None and not isinstance(key, str | int):
        raise DataError(f"its id is a {type(key).__name__}, expected text or a number")
    return Conversation(None if key is None else str(key), tuple(map(_turn, turns)))


def _turn(value: Any) -> Turn:
    if not isinstance(value, dict):
        raise DataError(f"a turn is a {type(value).__name__}, expected an object")
    speaker = value.get("from", value.get("role"))
    text = value.get("value", value.get("content"))
    if not isinstance(speaker, str) or not isinstance(text, str):
        raise DataError("a turn has no text from|role and value|content")
    role = _ROLES.get(speaker.lower())
    if role is None:
        raise OtherSpeakerError(f"{speaker!r} speaks in it, expected one of {', '.join(_ROLES)}")
    return Turn(role, _replace_surrogates(text))


def _replace_surrogates(text: str) -> str:
    """Replaces each unpaired surrogate in a text by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _lines(path: Path) -> Iterator[Record]:
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            end += len(line)
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield Record(number, end, json.loads(text))
            except (ValueError, RecursionError) as error:
                yield Record(number, end, None, f"it is not JSON: {error}")


def _array(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        text = _Text(path, file)
        text.skip("[")
        if text.peek() == "]":
            return
        while True:
            text.peek()
            line, value = text.line, text.value()
            yield Record(line, file.tell(), value)
            if text.peek() == "]":
                return
            text.skip(",")


class _Text:
    """The text of a JSON file; memory holds only as much of it as one entry needs."""

    def __init__(self, path: Path, file: Any):
        self._path = path
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._decoder = json.JSONDecoder()
        self._held = ""
        self._place = 0
        self.line = 1

    def peek(self) -> str:
        """Skips white space and returns the next character without consuming it."""
        while True:
            while self._place < len(self._held):
                char = self._held[self._place]
                if char not in _WHITE:
                    return char
                self.line += char == "\n"
                self._place += 1
            if not self._more(_READ_BYTES):
                raise self._broken("it ends before its array does")

    def skip(self, expected: str) -> None:
        """Consumes one character, which must be ``expected``."""
        found = self.peek()
        if found != expected:
            raise self._broken(f"there is {found!r} where {expected!r} is expected")
        self._place += 1

    def value(self) -> Any:
        """Consumes and decodes the next entry."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._held, self._place)
                if not _MORE_OF_A_NUMBER.fullmatch(self._held, end):
                    break
                fault = "it ends before its array does"
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated string")
                if not unfinished and error.pos < len(self._held) - _NEAR_END:
                    raise self._broken(str(error.msg), error.pos) from None
                fault = error.msg
            except RecursionError:
                raise self._broken("an entry is nested too deep") from None
            except ValueError as error:  # of a number with thousands of digits
                raise self._broken(str(error)) from None
            # Twice as much each time, so that a long entry is not decoded over and over.
            held = len(self._held) - self._place
            if held > _MOST_CHARACTERS or not self._more(max(_READ_BYTES, held)):
                raise self._broken(fault)
        self.line += self._held.count("\n", self._place, end)
        self._place = end
        return value

    def _more(self, count: int) -> bool:
        data = self._file.read(count)
        try:
            text = self._decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path} is not UTF-8 ({error}); convert it, or fetch it again") from None
        self._held = self._held[self._place :] + text
        self._place = 0
        return bool(data)

    def _broken(self, fault: str, place: int | None = None) -> DataError:
        passed = self._held.count("\n", self._place, place) if place is not None else 0
        return DataError(
            f"{self._path}, line {self.line + passed}: {fault}; the file is not a complete JSON array; "
            "repair it or fetch it again"
        )


BOS, EOS = "<s>", "</s>"


def conversation_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Yields the text of every turn; records that are not conversations are skipped.

    Raises:
      DataError: a file is missing or malformed.
    """
    for path in paths:
        for record in records(path):
            try:
                turns = conversation(record.value).turns
            except DataError:  # data_prep.sharegpt lists them
                continue
            yield from (turn.text for turn in turns)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of at most ``vocab_size`` entries, with all bytes, BOS and EOS."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, bos=BOS, eos=(EOS,), add_bos=True)
