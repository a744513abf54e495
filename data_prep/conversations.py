"""Reads conversations from files of any size, one at a time, and cleans those that were copied out of a page.

Arrays are decoded entry by entry by the standard library, not by ijson, which tells no line of a bad record,
refuses NaN, large numbers and a byte order mark, and needs memory quadratic in the nesting of a broken file.
Known formats of a record (ShareGPT's own, FastChat's, OpenAI's)::

    {"id": "x", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

The steps of the cleaning, in this order, follow FastChat's of ShareGPT, on which Vicuna was trained::

    parts         joins records that continue each other, such as those with the ids a_0 and a_11
    HTML          converts answers that are HTML as a whole to Markdown
    page text     removes the page's own text: "1 / 2", "Copy code", "Copy123 chars / 45 words", notices
    ends          removes empty turns, answers before the first question, questions without an answer
    alternation   rejects conversations in which user and assistant do not alternate
    length        rejects conversations of fewer than 16 characters
    blocked       rejects conversations with a phrase of ``BLOCKED``
    duplicates    rejects conversations whose id, or whose first question and answer, occurred before
"""

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from bs4 import BeautifulSoup, ParserRejectedMarkup, Tag
from markdownify import MarkdownConverter
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
_WHITE = re.compile(r"[ \t\r\n]+")
_TOO_SHORT = "the file ends before its array does"
_PART = re.compile(r"(.+)_(\d{1,9})", re.S)
_BLANK = "".join(filter(str.isspace, map(chr, range(1 << 16)))) + "\u200b\u2060\ufeff"
"""White space, and characters that show nothing."""
_ROLES: dict[str, Role] = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant"), "assistant"),
    "system": "system",
}

BLOCKED = ("openai", "chatgpt", "too many requests in 1 hour")
"""Phrases by which a model would learn to take itself for another one, and a server's error message."""
LEAST_CHARACTERS = 16

# One element from the first character to the last. A text that speaks of tags, or fences some, is no HTML.
_WHOLLY_HTML = re.compile(r"\s*<(div|p|ol|ul|pre|h[1-6]|table|blockquote)\b[^>]*>.*</\1>\s*", re.S | re.I)
# At an end of a text only, and of pages that exist: code divides numbers, too.
_PAGER = re.compile(r"\A\d+ / [1-9]\d*[ \t]*(\n|\Z)|\n[ \t]*\d+ / [1-9]\d*\Z")
_COUNTS = re.compile(r"Copy\d+ chars / \d+ words")
_AFTER_FENCE = re.compile(r"(^[ \t]*```[^\n`]*?)[ \t]*Copy code[ \t]*", re.M)
_ALONE = re.compile(r"^[ \t]*Copy code[ \t]*$\n?", re.M)
_NOTICE = re.compile(
    r"\A\*This (?:chat )?conversation is shared from .*\*\Z|This content may violate our content policy\. "
    r"If you believe this to be in error, please submit your feedback\b.*? in this area\."
)


@dataclass(frozen=True)
class Record:
    """One entry of a file: the line on which it begins, from 1, and the bytes of the file read so far.

    ``value`` is the decoded JSON; it is None if ``fault`` says why it is not valid.
    """

    line: int
    end: int
    value: Any
    fault: str = ""


class Rejected(DataError):
    """A conversation is rejected; the message is the reason, the same for all conversations of its kind."""


def records(path: Path) -> Iterator[Record]:
    """Yields the entries of a JSON array or the lines of a jsonl file; the first character tells which it is.

    A malformed line of a jsonl file is yielded with its fault, and so is the entry in which an array is cut
    off. A file that is missing, empty or not UTF-8, or an otherwise malformed array, is a ``DataError``.
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


def conversation(value: Any) -> tuple[str | None, list[Turn]]:
    """Returns the id of a record, if it has one, and its turns, of which types and roles have been checked.

    An unknown format is a ``DataError``, and another speaker, such as a tool, a reason to be ``Rejected``.
    """
    if not isinstance(value, dict):
        raise DataError(f"it is a {type(value).__name__}, expected an object with conversations or messages")
    value = _given(value)
    turns = value.get("conversations", value.get("messages"))
    if not isinstance(turns, list):
        raise DataError("it has no list of conversations or messages")
    key = value.get("id")
    if key is not None and not isinstance(key, str | int):
        raise DataError(f"its id is a {type(key).__name__}, expected text or a number")
    return None if key is None else str(key), [*map(_turn, turns)]


def _turn(value: Any) -> Turn:
    if not isinstance(value, dict):
        raise DataError(f"a turn is a {type(value).__name__}, expected an object")
    value = _given(value)
    speaker = value.get("from", value.get("role"))
    text = value.get("value", value.get("content"))
    if not isinstance(speaker, str) or not isinstance(text, str):
        raise DataError("a turn has no text from|role and value|content")
    role = _ROLES.get(speaker.lower())
    if role is None:
        raise Rejected(f"an unknown speaker: {speaker[:20]!r}")
    # Each unpaired surrogate is replaced by U+FFFD.
    return Turn(role, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def joined(
    conversations: Iterable[tuple[str | None, list[Turn]]],
) -> Iterator[tuple[str | None, list[Turn], int]]:
    """Joins the parts of divided conversations that follow each other; yields their numbers of parts, too.

    Parts are recognised as FastChat names them: by the id of the whole, "_", and the number of their first
    turn in it. ShareGPT's files repeat an answer at the beginning of the next part; what is repeated must be
    equal.
    """
    whole, turns, parts = None, [], 0
    for key, more in conversations:
        repeated = _repeated(whole, turns, key, more)
        if repeated is None:
            if parts:
                yield whole, turns, parts
            whole, turns, parts = key, [], 0
        turns += more[repeated:]
        parts += 1
    if parts:
        yield whole, turns, parts


def _repeated(whole: str | None, turns: list[Turn], key: str | None, more: list[Turn]) -> int | None:
    """Number of turns that a part repeats of what comes before it; None if it continues nothing."""
    before, after = (_PART.fullmatch(text or "") for text in (whole, key))
    if not before or not after or before[1] != after[1]:
        return None
    repeated = int(before[2]) + len(turns) - int(after[2])
    same = 0 <= repeated < len(turns) and turns[len(turns) - repeated :] == more[:repeated]
    return repeated if same else None


def _given(value: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not null: rows of a table that joins two formats have those of both."""
    return {name: field for name, field in value.items() if field is not None}


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
        text, count = _Text(path, file), 0
        try:
            text.skip("[")
            more = text.peek() != "]"
            while more:
                text.peek()
                line, value = text.line, text.value()
                count += 1
                yield Record(line, file.tell(), value)
                if more := text.peek() != "]":
                    text.skip(",")
            text.skip("]")
            text.end()
        except _CutOffError:
            lost = f"its last {text.rest:,} bytes, after record {count:,}, are lost; fetch it again"
            yield Record(text.line, file.tell(), None, f"{_TOO_SHORT}: {lost}")


class _CutOffError(Exception):
    """A file ends inside its array."""


class _Text:
    """The text of a JSON file; memory holds only as much of it as one entry needs."""

    def __init__(self, path: Path, file: Any):
        self._path, self._file = path, file
        self._bytes = codecs.getincrementaldecoder("utf-8-sig")()
        self._decoder = json.JSONDecoder()
        self._held, self._place, self.line = "", 0, 1

    def peek(self) -> str:
        """Skips white space and returns the next character without consuming it."""
        if not self._next():
            raise _CutOffError
        return self._held[self._place]

    @property
    def rest(self) -> int:
        """Number of bytes that were read and not consumed."""
        return len(self._held[self._place :].encode()) + len(self._bytes.getstate()[0])

    def end(self) -> None:
        """Refuses anything but white space up to the end of the file."""
        if (found := self._next()) or self.rest:
            raise self._broken(f"there is {found or 'half a character'!r} after the end of the array")

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
                if isinstance(value, dict) or not _MORE_OF_A_NUMBER.fullmatch(self._held, end):
                    self._pass(end)
                    return value
                fault = _TOO_SHORT
            except json.JSONDecodeError as error:
                fault = error.msg
                if not fault.startswith("Unterminated string") and error.pos < len(self._held) - _NEAR_END:
                    self._pass(error.pos)
                    raise self._broken(fault) from None
            except RecursionError:
                raise self._broken("an entry is nested too deep") from None
            except ValueError as error:  # of a number with thousands of digits
                raise self._broken(str(error)) from None
            # Twice as much each time, so that a long entry is not decoded over and over.
            held = len(self._held) - self._place
            if held > _MOST_CHARACTERS:
                raise self._broken(fault)
            if not self._more(max(_READ_BYTES, held)):
                raise _CutOffError from None

    def _next(self) -> str:
        """Skips white space; returns the next character, or nothing at the end of the file."""
        while True:
            if white := _WHITE.match(self._held, self._place):
                self._pass(white.end())
            if self._place < len(self._held) or not self._more(_READ_BYTES):
                return self._held[self._place : self._place + 1]

    def _pass(self, place: int) -> None:
        self.line += self._held.count("\n", self._place, place)
        self._place = place

    def _more(self, count: int) -> bool:
        data = self._file.read(count)
        try:
            text = self._bytes.decode(data)
        except UnicodeDecodeError as error:
            raise DataError(f"{self._path} is not UTF-8 ({error}); convert it, or fetch it again") from None
        self._held, self._place = self._held[self._place :] + text, 0
        return bool(data)

    def _broken(self, fault: str) -> DataError:
        return DataError(
            f"{self._path}, line {self.line}: {fault}; the file is not one complete JSON array; "
            "repair it or fetch it again"
        )


def conversation_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Yields the text of every turn; records that are not conversations are skipped."""
    for path in paths:
        for record in records(path):
            try:
                _, turns = conversation(record.value)
            except DataError:  # data_prep.sharegpt lists them
                continue
            yield from (turn.text for turn in turns)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of at most ``vocab_size`` entries, with all bytes, <s> and </s>."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, bos="<s>", eos=("</s>",), add_bos=True)


class _Converter(MarkdownConverter):
    def convert_br(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        return " " if "_inline" in parent_tags else "\n"


def _code_language(block: Tag) -> str:
    """The language that the class of a ``<pre>`` block's code names; empty if it names none."""
    code = block.find("code")
    match = re.search(r"language-([\w+#-]+)", " ".join(code.get_attribute_list("class"))) if code else None
    return match[1] if match else ""


_CONVERTER = _Converter(
    autolinks=False,
    bullets="-",
    code_language_callback=_code_language,
    escape_asterisks=False,
    escape_underscores=False,
    heading_style="atx",
    wrap=True,  # joins lines, as white space means nothing in HTML,
    wrap_width=None,  # and breaks none
)


def _to_markdown(html: str) -> str:
    """An HTML fragment as Markdown, without scripts, styles and buttons."""
    try:
        page = BeautifulSoup(html, "html.parser")
        for tag in page(("script", "style", "button", "svg", "head")):
            tag.decompose()
        for block in page("pre"):
            # A page's own header of the block stands before the code, and is no part of it.
            if (code := block.find("code")) is not None:
                block.clear()
                block.append(code)
        return _CONVERTER.convert_soup(page)
    except (ParserRejectedMarkup, RecursionError, ValueError):
        raise Rejected("HTML that cannot be read") from None


def clean_text(turn: Turn) -> Turn:
    """A turn without markup and text of the chat page."""
    text = turn.text
    if turn.role == "assistant" and _WHOLLY_HTML.fullmatch(text):
        text = _to_markdown(text)
    for debris in (_NOTICE, _COUNTS, _ALONE):
        text = debris.sub("", text)
    text = _AFTER_FENCE.sub(r"\1", text).strip(_BLANK)
    return Turn(turn.role, _PAGER.sub("", text).strip(_BLANK))


def clean_turns(turns: Sequence[Turn], blocked: Sequence[str] = BLOCKED) -> tuple[Turn, ...]:
    """The turns to train on: the system's if it comes first, then pairs of question and answer.

    If none are left, or a phrase of ``blocked`` occurs, in upper or lower case, they are ``Rejected``.
    """
    cleaned = [turn for turn in map(clean_text, turns) if turn.text]
    if not cleaned:
        raise Rejected("empty")
    system = cleaned[:1] if cleaned[0].role == "system" else []
    spoken = cleaned[len(system) :]
    while spoken and spoken[0].role != "user":
        spoken.pop(0)
    answered = [*(turn.role == "assistant" for turn in spoken[1:]), False]
    spoken = [turn for turn, kept in zip(spoken, answered, strict=False) if kept or turn.role != "user"]
    if not spoken:
        raise Rejected("no answer")
    if any(turn.role != ("user", "assistant")[number % 2] for number, turn in enumerate(spoken)):
        raise Rejected("user and assistant do not alternate")
    if sum(len(turn.text) for turn in spoken) < LEAST_CHARACTERS:
        raise Rejected(f"fewer than {LEAST_CHARACTERS} characters")
    folded = "\n".join(turn.text for turn in spoken).casefold()
    if any(phrase.casefold() in folded for phrase in blocked):
        raise Rejected("a blocked phrase")
    return (*system, *spoken)


class Deduplicator:
    """Detects duplicate conversations by 16-byte digests of their ids and first pairs."""

    def __init__(self):
        self._keys: set[bytes] = set()
        self._pairs: set[bytes] = set()

    def check(self, key: str | None, turns: Sequence[Turn]) -> str:
        """Returns the key of cleaned turns: the id of their record, or else the digest of the first pair."""
        spoken = [turn.text for turn in turns if turn.role != "system"]
        pair = _digest("\0".join(spoken[:2]))
        key = pair.hex() if key is None else key
        if _digest(key) in self._keys:
            raise Rejected("a duplicate id")
        if pair in self._pairs:
            raise Rejected("a duplicate first question and answer")
        self._keys.add(_digest(key))
        self._pairs.add(pair)
        return key


def is_test(key: str, share: float) -> bool:
    """Whether a conversation belongs to the test split, which depends on its key only."""
    return int.from_bytes(_digest(key)[:8], "big") < share * 2**64


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
