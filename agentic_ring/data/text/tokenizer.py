"""Encodes and decodes text with the tokenizer of a Hugging Face folder, or of a GGUF file.

What it needs of a folder is given in several files, each of which but the first may be absent::

    tokenizer.json            the tokenizer itself; required
    added_tokens.json         further tokens, and their ids
    tokenizer_config.json     bos_token, eos_token, add_bos_token, chat_template; also further tokens
    special_tokens_map.json   bos_token, eos_token
    generation_config.json    bos_token_id, eos_token_id: an id, or several that all end an answer
    config.json               the same; used where generation_config.json has no entry
    chat_template.jinja       takes precedence over chat_template
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from agentic_ring.errors import ArgumentError, DataError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import json_fault, read_json
from agentic_ring.files.model_path import is_gguf

with needs_extra("text"):
    import pydantic
    import tokenizers

SAVED_FILES = "tokenizer_config.json", "generation_config.json", "tokenizer.json"
"""What ``Tokenizer.save`` writes, in this order."""
_REMEDY = "fetch the file again"
_Id = Annotated[int, pydantic.Field(ge=0, lt=2**28)]
"""Larger ids make the library build tables of that size."""
_NEUTRAL = "\n"
"""A context for any text: tokenizers put no space after it, and seldom merge it with what follows."""
LONG_TEXT = 16_384
"""Characters from which ``RememberingTokenizer`` remembers a text."""
MARGIN = 4096
"""Characters after a word that may decide where the word ends: those that both texts have after the place
from which the second one is encoded."""


class _Model(pydantic.BaseModel):
    vocab: dict[str, _Id] | list[Any] | None = None


class _AddedToken(pydantic.BaseModel):
    id: _Id
    content: Annotated[str, pydantic.Field(min_length=1)]


class _FurtherToken(pydantic.BaseModel):
    """A token in the ``added_tokens_decoder`` of a tokenizer_config.json."""

    content: Annotated[str, pydantic.Field(min_length=1)]
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


class _ConfigFile(pydantic.BaseModel):
    added_tokens_decoder: dict[_Id, _FurtherToken] = {}


class _TokenizerFile(pydantic.BaseModel):
    """What the library does not check in a tokenizer.json."""

    model: _Model
    added_tokens: list[_AddedToken] = []


class Tokenizer:
    """A ``tokenizers.Tokenizer`` with the model's begin and end tokens and chat template.

    Settings of its folder that have no use here, such as the padding or a temperature, are saved with it.

    Args:
      backend: its truncation and padding are switched off.
      bos: the token that begins a text, if any.
      eos: the tokens that end an answer; the first is the one to write.
      add_bos: whether a text begins with ``bos``; as in ``backend`` if None.
      chat_template: Jinja source, see ``agentic_ring.data.text.chat``.

    Raises:
      DataError: bos or eos is not a token of the tokenizer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos: str | None = None,
        eos: Sequence[str] = (),
        add_bos: bool | None = None,
        chat_template: str | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_id = None if bos is None else self._id_of(bos)
        self.eos_ids = tuple(dict.fromkeys(map(self._id_of, eos)))
        if add_bos is None:
            add_bos = backend.encode("a").ids[:1] == [self.bos_id]
        self.add_bos = add_bos and self.bos_id is not None
        self.chat_template = chat_template
        self._settings: dict[str, Any] = {}
        self._generation: dict[str, Any] = {}

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Reads the tokenizer of a Hugging Face folder, or of a GGUF file.

        Raises:
          DataError: tokenizer.json is missing, or a file cannot be read or does not match the others.
          UnknownNameError: a GGUF file has a kind of tokenizer that is not supported.
        """
        folder = Path(folder)
        if is_gguf(folder):
            from agentic_ring.data.text.gguf_tokenizer import read_tokenizer

            return cls(**read_tokenizer(folder))
        path = folder / "tokenizer.json"
        if not path.exists():
            raise DataError(_how_to_get(folder))
        read_json(path, _TokenizerFile, _REMEDY, foreign=True)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        # The library raises no narrower class.
        except Exception as error:
            raise DataError(f"{path} cannot be read ({error}); {_REMEDY}") from None
        _add_further_tokens(backend, folder)
        named = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        generation = _json(folder / "generation_config.json")
        ids = _json(folder / "config.json") | generation
        bos, eos = (
            _texts(named, f"{kind}_token", folder) + _tokens(backend, ids, f"{kind}_token_id", folder)
            for kind in ("bos", "eos")
        )
        add_bos = named.get("add_bos_token")
        add_bos = add_bos if isinstance(add_bos, bool) else None
        loaded = cls(backend, bos[0] if bos else None, eos, add_bos, _chat_template(folder, named))
        loaded._settings, loaded._generation = named, generation
        return loaded

    def with_template(self, source: str, end_ids: Sequence[int]) -> Tokenizer:
        """This tokenizer for a model that was trained with another chat template, which has these ends."""
        ends = [token for token in map(self.token, end_ids) if token is not None]
        chosen = type(self)(self._backend, self.bos, ends, self.add_bos, source)
        chosen._settings, chosen._generation = self._settings, self._generation
        return chosen

    def save(self, folder: Path | str) -> None:
        """Writes files that ``load`` and Hugging Face's ``transformers`` can read.

        The required one is written last: a new folder cannot be loaded before it has all of them.
        """
        folder = Path(folder)
        ours = {"add_bos_token": self.add_bos, "bos_token": self.bos, "eos_token": self.eos}
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | self._settings | ours
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        generation = dict(self._generation)
        if self.eos_ids:
            generation |= {"bos_token_id": self.bos_id, "eos_token_id": list(self.eos_ids)}
        texts = [json.dumps(values, indent=2, ensure_ascii=False) + "\n" for values in (config, generation)]
        for name, text in zip(SAVED_FILES, [*texts, self._backend.to_str(pretty=True)], strict=True):
            with replacing(folder / name) as beside:
                beside.write_text(text, encoding="utf-8")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token, as the vocabulary spells it."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts that are encoded as one id wherever they occur, and begin and end tokens; longest first."""
        added = self._backend.get_added_tokens_decoder().values()
        ids = self.eos_ids if self.bos_id is None else (self.bos_id, *self.eos_ids)
        special = {token.content for token in added if token.special}
        special |= {token for token in map(self._backend.id_to_token, ids) if token is not None}
        return tuple(sorted(special, key=lambda token: (-len(token), token)))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which ``decode`` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids that stand for one byte each, of which ``decode`` makes characters; of LLaMA 1 and 2."""
        decoder: Any = self._backend.decoder
        if decoder is None or b'"ByteFallback"' not in decoder.__getstate__():
            return frozenset()
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(number for number in ids if number is not None)

    @cached_property
    def digest(self) -> str:
        """A digest of everything that determines the ids of a text."""
        decisive = self._backend.to_str(), self.bos_id, self.eos_ids, self.add_bos
        return hashlib.blake2b(repr(decisive).encode(), digest_size=16).hexdigest()

    @property
    def bos(self) -> str | None:
        """The token that begins a text."""
        return None if self.bos_id is None else self._backend.id_to_token(self.bos_id)

    @property
    def eos(self) -> str | None:
        """The token to write at the end of an answer."""
        return self._backend.id_to_token(self.eos_ids[0]) if self.eos_ids else None

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token; None if there is no such token."""
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """Returns the token with this id, as the vocabulary spells it; None if there is none."""
        return self._backend.id_to_token(token_id)

    def encode(self, text: str, bos: bool = False, after: str = "") -> list[int]:
        """Encodes ``text``; special tokens in it are recognised, and none is added unless asked for.

        Args:
          bos: prepend ``bos_id``.
          after: the text before this one, encoded already. Tokenizers like SentencePiece's put a space before
            the first word, unless the text continues another.

        Raises:
          ArgumentError: ``bos`` is set and the tokenizer has none.
        """
        if bos and self.bos_id is None:
            raise ArgumentError("this tokenizer has no token that begins a text; encode with bos=False")
        front = [self.bos_id] if bos and self.bos_id is not None else []
        # A context that would merge into one token with the text is of no use.
        for context in (self._end(after), _NEUTRAL) if after else ("",):
            before = self._ids(context)
            whole = self._ids(context + text)
            if whole[: len(before)] == before:
                return front + whole[len(before) :]
        return front + self._ids(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes a whole prompt, with ``bos_id`` in front if texts begin with it, but never twice."""
        return self.encode(text, bos=self.add_bos and not text.startswith(self.bos or ""))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Decodes ``ids``, by default without special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def check_fits(self, vocab_size: int) -> None:
        """Raises a ``DataError`` if a model with this vocabulary size lacks an id."""
        if self.vocab_size > vocab_size:
            last = self.vocab_size - 1
            raise DataError(
                f"the tokenizer's ids go up to {last} ({self.token(last)!r}), but the model's vocabulary has "
                f"{vocab_size} entries; use the tokenizer that the model came with"
            )

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids if text else []

    def _end(self, text: str) -> str:
        """Returns the last special token or character of a text."""
        ends = (token for token in self.special_tokens if text.endswith(token))
        return next(ends, text[-1:])

    def _id_of(self, token: str) -> int:
        number = self._backend.token_to_id(token)
        if number is None:
            raise DataError(
                f"the token {token!r} is not in the tokenizer's vocabulary; correct the names of the special "
                "tokens in tokenizer_config.json, or use the tokenizer.json that belongs to it"
            )
        return number


class RememberingTokenizer(Tokenizer):
    """The same tokens as ``Tokenizer``'s, in less time for a text that begins like the last long one.

    Requests about one document repeat it, and encoding half a million tokens takes seconds.
    Tokenizers encode each word on its own, but for those that divide no text into words: these encode each
    text as a whole here, too. A tokenizer whose words depend on what stands before them is noticed.
    """

    _text = ""
    _encoding: tokenizers.Encoding | None = None

    def _ids(self, text: str) -> list[int]:
        if len(text) < LONG_TEXT:
            return super()._ids(text)
        ids = self._continued(text)
        if ids is None:
            self._text, self._encoding = text, self._backend.encode(text, add_special_tokens=False)
            ids = self._encoding.ids
        return ids

    def _continued(self, text: str) -> list[int] | None:
        """The tokens, from those of the remembered text; None if the two share too little."""
        if self._encoding is None:
            return None
        lengths = range(min(len(self._text), len(text)))
        shared = bisect_left(lengths, True, key=lambda at: self._text[: at + 1] != text[: at + 1])
        token, first = self._word_before(shared - MARGIN)
        if 2 * first < len(text):
            return None
        ids = self._encoding.ids
        if super()._ids(self._text[first:]) != ids[token:]:
            return None
        return ids[:token] + super()._ids(text[first:])

    def _word_before(self, place: int) -> tuple[int, int]:
        """The first token and character of the remembered text's last word before ``place``, or zeros."""
        encoding = self._encoding
        assert encoding is not None, "a text is remembered"
        token = encoding.char_to_token(place) if place > 0 else None
        word = None if token is None else encoding.token_to_word(token)
        tokens = None if word is None else encoding.word_to_tokens(word)
        # Offsets of a word may leave out the space before it; what the word before has left is complete.
        before = encoding.token_to_chars(tokens[0] - 1) if tokens and tokens[0] else None
        return (0, 0) if tokens is None or before is None else (tokens[0], before[1])


def _add_further_tokens(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Adds the tokens that only other files than tokenizer.json name, as ``transformers`` does.

    Raises:
      DataError: one would get another id than it has there.
    """
    tokens: dict[int, tuple[Path, _FurtherToken]] = {}
    if (file := folder / "added_tokens.json").exists():
        found = read_json(file, dict[str, _Id], _REMEDY, foreign=True)
        tokens |= {number: (file, _FurtherToken(content=content)) for content, number in found.items()}
    if (file := folder / "tokenizer_config.json").exists():
        found = read_json(file, _ConfigFile, _REMEDY, foreign=True).added_tokens_decoder
        tokens |= {number: (file, token) for number, token in found.items()}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for number, (file, token) in sorted(tokens.items()):
        if token.content in known:
            continue
        backend.add_tokens([tokenizers.AddedToken(**token.model_dump())])
        if (found := backend.token_to_id(token.content)) != number:
            raise DataError(
                f"{file} gives the token {token.content!r} the id {number}, but after those of "
                f"tokenizer.json it is {found}; take both files from the same model"
            )


def _how_to_get(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}; give one with a tokenizer.json in it"
    if (folder / "tokenizer.model").exists():
        return (
            f"{folder} has a tokenizer.model but no tokenizer.json; convert it once, where transformers and "
            "sentencepiece are installed, with\n"
            '  python -c "from transformers import AutoTokenizer; '
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    return f"{folder} has no tokenizer.json; fetch it from where the model came from"


def _json(path: Path) -> dict[str, Any]:
    """Reads a JSON object without its null entries; empty if there is no such file."""
    if not path.exists():
        return {}
    values = read_json(path, dict[str, Any], _REMEDY, foreign=True)
    return {name: value for name, value in values.items() if value is not None}


def _texts(named: dict[str, Any], name: str, folder: Path) -> list[str]:
    """Reads a special token as Hugging Face writes it: a string, or an object with its ``content``."""
    value = named.get(name)
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and not isinstance(content, str):
        raise DataError(f"{folder}: {name} is {value!r}, expected a string or an object with its content")
    return [content] if content else []


def _tokens(backend: tokenizers.Tokenizer, named: dict[str, Any], name: str, folder: Path) -> list[str]:
    """Returns the tokens of an id or a list of ids."""
    value = named.get(name, [])
    ids = value if isinstance(value, list) else [value]
    if not all(type(number) is int and number < 2**28 for number in ids):
        raise DataError(f"{folder}: {name} is {value!r:.80}, expected an id or a list of ids")
    # A configuration may name an id that only the model's vocabulary has; it never occurs.
    tokens = (backend.id_to_token(number) for number in ids if number >= 0)
    return [token for token in tokens if token is not None]


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} {json_fault(error)}; {_REMEDY}") from None
    value = config.get("chat_template")
    if isinstance(value, list):  # several by name; "default" is for plain conversations
        try:
            value = {entry["name"]: entry["template"] for entry in value}.get("default")
        except (KeyError, TypeError):
            raise DataError(f"{folder}: chat_template has entries without name and template") from None
    if value is not None and not isinstance(value, str):
        raise DataError(f"{folder}: chat_template is a {type(value).__name__}, expected text")
    return value
