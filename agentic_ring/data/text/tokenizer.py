"""Text to token ids and back, by the files of a Hugging Face folder.

Which tokens begin and end a text is said in several files, each of which may be absent::

    tokenizer.json            the tokenizer itself; needed
    tokenizer_config.json     bos_token, eos_token, add_bos_token, chat_template
    special_tokens_map.json   bos_token, eos_token
    generation_config.json    bos_token_id, eos_token_id: a number, or several that all end an answer
    config.json               the same; where generation_config.json says nothing
    chat_template.jinja       instead of chat_template
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from agentic_ring.errors import ArgumentError, DataError
from agentic_ring.files import replacing


class Tokenizer:
    """A ``tokenizers.Tokenizer`` and what its model makes of the special tokens.

    Args:
      backend: of the ``tokenizers`` library; its truncation and padding are switched off.
      bos: the token that begins a text, where there is one.
      eos: the tokens that end an answer, the one that is written first.
      add_bos: whether a text begins with ``bos``; as ``backend`` has it where absent.
      chat_template: Jinja source, see ``agentic_ring.data.text.chat``.

    Attributes:
      bos_id: int, or None.
      eos_ids: ids that end an answer, the one that is written first.
      add_bos: whether a text begins with ``bos_id``.
      chat_template: Jinja source, or None.

    Raises:
      DataError: bos or eos is no token of the tokenizer.
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

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Reads the tokenizer of a Hugging Face folder.

        Raises:
          DataError: no tokenizer.json, or a file that cannot be read or does not fit the others.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise DataError(_how_to_get(folder))
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        # The library raises no class narrower than this one.
        except Exception as error:
            raise DataError(f"{path} cannot be read ({error}); fetch the file again") from None
        named = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
        ids = _json(folder / "config.json") | _json(folder / "generation_config.json")
        bos, eos = (
            [
                *_texts(named.get(f"{kind}_token"), f"{kind}_token", folder),
                *_tokens(backend, ids.get(f"{kind}_token_id"), f"{kind}_token_id", folder),
            ]
            for kind in ("bos", "eos")
        )
        add_bos = named.get("add_bos_token")
        return cls(
            backend,
            bos[0] if bos else None,
            eos,
            add_bos if isinstance(add_bos, bool) else None,
            _chat_template(folder, named),
        )

    def save(self, folder: Path | str) -> None:
        """Writes files that ``load`` and Hugging Face's ``transformers`` open.

        Raises:
          OSError: the disk is full.
        """
        folder = Path(folder)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "bos_token": self.bos,
            "eos_token": self.eos,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        files = {"tokenizer.json": self._backend.to_str(pretty=True)}
        files["tokenizer_config.json"] = _dump(config)
        if self.eos_ids:
            ids = {"bos_token_id": self.bos_id, "eos_token_id": list(self.eos_ids)}
            files["generation_config.json"] = _dump(_json(folder / "generation_config.json") | ids)
        for name, text in files.items():
            with replacing(folder / name) as beside:
                beside.write_text(text, encoding="utf-8")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """What stands for one id wherever it is met in a text, longest first."""
        added = self._backend.get_added_tokens_decoder().values()
        return tuple(sorted((token.content for token in added if token.special), key=len, reverse=True))

    @cached_property
    def digest(self) -> str:
        """Of all that decides which ids a text gets."""
        decisive = self._backend.to_str(), self.bos_id, self.eos_ids, self.add_bos
        return hashlib.blake2b(repr(decisive).encode(), digest_size=16).hexdigest()

    @property
    def bos(self) -> str | None:
        """The token that begins a text."""
        return None if self.bos_id is None else self._backend.id_to_token(self.bos_id)

    @property
    def eos(self) -> str | None:
        """The token that is written to end an answer."""
        return self._backend.id_to_token(self.eos_ids[0]) if self.eos_ids else None

    def token_id(self, token: str) -> int | None:
        """The id of a token; None where there is no such token."""
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """The token of an id, as the vocabulary spells it; None where there is no such id."""
        return self._backend.id_to_token(token_id)

    def encode(self, text: str, bos: bool = False, after: str = "") -> list[int]:
        """The ids of ``text``; special tokens are those that stand in it, and none is added.

        Args:
          text: any text.
          bos: put ``bos_id`` in front.
          after: the text that stands before this one, already encoded. Tokenizers in the manner of
            SentencePiece put a space before the first word, unless the text is seen to go on.

        Raises:
          ArgumentError: ``bos`` where the tokenizer has none.
        """
        if bos and self.bos_id is None:
            raise ArgumentError("this tokenizer has no token that begins a text; encode with bos=False")
        front = [self.bos_id] if bos and self.bos_id is not None else []
        context = self._end(after)
        before = self._ids(context)
        whole = self._ids(context + text)
        # Where the context's last letter would become one token with the text, the text stands alone.
        return front + (whole[len(before) :] if whole[: len(before)] == before else self._ids(text))

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a whole prompt: ``bos_id`` in front where texts begin with it, but never twice."""
        return self.encode(text, bos=self.add_bos and not text.startswith(self.bos or ""))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ``ids``, without special tokens unless asked for."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def check_fits(self, vocab_size: int) -> None:
        """Checks that a model with this vocabulary knows every id.

        Raises:
          DataError: an id lies beyond it.
        """
        if self.vocab_size > vocab_size:
            last = self.vocab_size - 1
            raise DataError(
                f"the tokenizer's ids go up to {last} ({self.token(last)!r}), but the model's vocabulary has "
                f"{vocab_size} entries; use the tokenizer that the model came with"
            )

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids if text else []

    def _end(self, text: str) -> str:
        """The last special token or character of a text."""
        ends = (token for token in self.special_tokens if text.endswith(token))
        return next(ends, text[-1:])

    def _id_of(self, token: str) -> int:
        number = self._backend.token_to_id(token)
        if number is None:
            raise DataError(
                f"the token {token!r} is not in the tokenizer's vocabulary; mend the names of the special "
                "tokens in tokenizer_config.json, or use the tokenizer.json that belongs to it"
            )
        return number


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
    """An object, without the entries that say nothing; empty where there is no file."""
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}); fetch the file again") from None
    if not isinstance(values, dict):
        raise DataError(f"{path} holds a {type(values).__name__}, expected an object; fetch the file again")
    return {name: value for name, value in values.items() if value is not None}


def _texts(value: Any, name: str, folder: Path) -> list[str]:
    """A special token as Hugging Face writes it: a string, or an object with its ``content``."""
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and not isinstance(content, str):
        raise DataError(f"{folder}: {name} is {value!r}, expected a string or an object with its content")
    return [content] if content else []


def _tokens(backend: tokenizers.Tokenizer, value: Any, name: str, folder: Path) -> list[str]:
    """The tokens of one id or of several."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int for number in ids):
        raise DataError(f"{folder}: {name} is {value!r}, expected a number or a list of numbers")
    # A configuration may name an id that only the model's vocabulary has: it is never met.
    tokens = (backend.id_to_token(number) if number >= 0 else None for number in ids)
    return [token for token in tokens if token is not None]


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):  # several under names, of which one is for plain conversations
        try:
            value = {entry["name"]: entry["template"] for entry in value}.get("default")
        except (KeyError, TypeError):
            raise DataError(f"{folder}: chat_template has entries without name and template") from None
    if value is not None and not isinstance(value, str):
        raise DataError(f"{folder}: chat_template is a {type(value).__name__}, expected text")
    return value


def _dump(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
