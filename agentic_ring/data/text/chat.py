"""Chat templates, built in or a tokenizer folder's own, which write a conversation as text.

A template divides a conversation into pieces of text, alternately questions and answers. Training and
generation encode the same pieces separately, so that the tokens of a prompt are the same in both.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, NoReturn

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ArgumentError, DataError, UnknownNameError
from agentic_ring.extras import needs_extra

with needs_extra("text"):
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

Role = Literal["system", "user", "assistant"]
_SOURCES = {
    "vicuna_v1.1": (
        "{% if messages[0].role != 'system' %}A chat between a curious user and an artificial intelligence "
        "assistant. The assistant gives helpful, detailed, and polite answers to the user's questions. "
        "{% endif %}{% for turn in messages %}{% if turn.role == 'system' %}{{ turn.content }} "
        "{% elif turn.role == 'user' %}USER: {{ turn.content }} ASSISTANT:"
        "{% else %} {{ turn.content }}</s>{% endif %}{% endfor %}"
    ),
    "llama-3": (
        "<|begin_of_text|>{% for turn in messages %}"
        "{% if turn.role != 'assistant' %}<|start_header_id|>{{ turn.role }}<|end_header_id|>\n\n{% endif %}"
        "{{ turn.content | trim }}<|eot_id|>"
        "{% if turn.role == 'user' %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}{% endfor %}"
    ),
    "plain": (
        "{% for turn in messages %}{{ turn.content }}"
        "{{ eos_token if turn.role == 'assistant' else '\\n' }}{% endfor %}"
    ),
}
TEMPLATES = (*_SOURCES, "tokenizer")
"""Names for ``chat_template``; "plain" writes each turn on its own line without roles, and "tokenizer" is the
template of the tokenizer's folder."""
_ANOTHER = "use another template: vicuna_v1.1, llama-3 or plain"
_GIVEN = ("messages", "add_generation_prompt", "tools", "documents")
"""Variables of every template, beside the tokens."""
_FEW_TURNS = 8
"""Up to this length, rendering every beginning of a conversation takes no longer than anything else."""
_SPECIAL = re.compile(r"<\|[^<>|\s]+\|>|</?s>|<(?:start|end)_of_turn>")
"""Spellings that are special tokens wherever a template writes them."""


class AbsentTokenError(DataError):
    """A template writes a token that the tokenizer lacks."""


class Turn(NamedTuple):
    """One message of a conversation."""

    role: Role
    text: str


class Piece(NamedTuple):
    """A part of a conversation's text, and whether the model should write it."""

    text: str
    is_answer: bool


def _check_turns(turns: Sequence[Turn], asks: bool = False) -> None:
    """Raises a ``DataError`` unless user and assistant alternate, and the user is last if it ``asks``."""
    roles = [turn.role for turn in turns]
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    if not spoken or any(role != ("user", "assistant")[n % 2] for n, role in enumerate(spoken)):
        shown = ", ".join(roles[:8]) + (", ..." if len(roles) > 8 else "")
        raise DataError(
            f"the roles of a conversation are {shown or 'none'}; expected user and assistant in "
            "turn, the user first, after at most one turn of the system"
        )
    if asks and spoken[-1] != "user":
        raise DataError("a prompt must end with a turn of the user; remove the last answer")


class ChatTemplate:
    """A template, rendered in Jinja's sandbox as Hugging Face does.

    Its methods raise a ``DataError`` for turns that are no conversation.
    """

    def __init__(self, name: str, source: str, tokenizer: Tokenizer):
        self.name, self._source = name, source
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        # Without the HTML escapes of Jinja's own filter.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(
                f"the tokenizer's chat template is not valid Jinja: {error}; {_ANOTHER}"
            ) from None
        tokens = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
        self._tokens = {name: token or _AbsentToken(name=name) for name, token in tokens.items()}
        self._tokenizer = tokenizer
        self._variables: Mapping[str, Any] = {}

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the tokenizer's, and the special token that this template writes there.

        The two differ where a template was made for another base model than the one that it is used with.
        """
        answer, first = "ANSWER", []
        with suppress(DataError):
            text = self._render([Turn("user", "QUESTION"), Turn("assistant", answer)], prompt=False)
            first = self._tokenizer.encode(text.rpartition(answer)[2].strip())[:1]
        own = (token for token in first if token in self._tokenizer.special_ids)
        return (*dict.fromkeys((*self._tokenizer.eos_ids, *own)),)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a model that was trained with this template."""
        return self._tokenizer.with_template(self._source, self.end_ids)

    def with_variables(self, variables: Mapping[str, Any]) -> "ChatTemplate":
        """The template with values of further names that it asks for, such as ``enable_thinking``.

        Raises:
          ArgumentError: it is a name that every template is given.
        """
        if taken := sorted({*variables} & {*_GIVEN, *self._tokens}):
            raise ArgumentError(f"chat_template_kwargs has {', '.join(taken)}, which no request may set")
        chosen = copy(self)
        chosen._variables = variables
        return chosen

    def prompt(self, turns: Sequence[Turn]) -> str:
        """Returns the text of a conversation that ends with the user's turn, up to the answer's beginning."""
        _check_turns(turns, asks=True)
        return self._render(turns, prompt=True)

    def pieces(self, turns: Sequence[Turn]) -> list[Piece]:
        """Returns the text that each turn adds to that of the turns before it.

        The time is linear in the conversation's length for templates that write a turn in the same way after
        three turns as after all earlier ones, which is checked. For others it grows with the number of turns.
        A template that writes a turn differently once others follow is refused.
        """
        _check_turns(turns)
        if len(turns) > _FEW_TURNS:
            with suppress(DataError):
                pieces = self._pieces_from_neighbours(turns)
                if self._agree(pieces, turns):
                    return pieces
        return self._pieces_from_beginnings(turns)

    def _pieces_from_beginnings(self, turns: Sequence[Turn]) -> list[Piece]:
        """The pieces by rendering every beginning of the conversation."""
        text = ""
        pieces: list[Piece] = []
        for count, turn in enumerate(turns, start=1):
            if turn.role == "system":
                continue
            longer = self._beginning(turns[:count], len(text))
            if not longer.startswith(text):
                raise DataError(
                    f"the tokenizer's chat template writes the turns before number {count} differently once "
                    f"that one follows, so its answers cannot be trained on; {_ANOTHER}"
                )
            pieces.append(Piece(longer[len(text) :], turn.role == "assistant"))
            text = longer
        return pieces

    def _pieces_from_neighbours(self, turns: Sequence[Turn]) -> list[Piece]:
        """The pieces by rendering each turn after the two or three before it."""
        # The system's text is not repeated for each turn: it may be long.
        opening = [Turn("system", "system")] if turns[0].role == "system" else []
        spoken = turns[len(opening) :]
        pieces = self._pieces_from_beginnings(turns[: len(opening) + 4])
        for start in range(2, len(spoken) - 2, 2):
            pieces += self._pieces_from_beginnings([*opening, *spoken[start : start + 4]])[2:]
        return pieces

    def _agree(self, pieces: Sequence[Piece], turns: Sequence[Turn]) -> bool:
        """Whether the pieces add up to the text of the first 1/1, 1/2, 1/4 ... of the turns."""
        count = len(pieces)
        while count:
            *before, last = (piece.text for piece in pieces[:count])
            text = "".join(before)
            if self._beginning(turns[: len(turns) - len(pieces) + count], len(text)) != text + last:
                return False
            count //= 2
        return True

    def _beginning(self, turns: Sequence[Turn], start: int) -> str:
        """The text of the turns, the last of which begins at ``start``: up to the answer, or to its end."""
        asked = turns[-1].role == "user"
        text = self._render(turns, prompt=asked)
        written = text[start:]
        tokens = filter(None, map(self._tokenizer.token, self.end_ids))
        ends = [written.rfind(token) + len(token) for token in tokens if token in written]
        # Text after an answer's end token belongs to the template, not to the answer.
        cut = not asked and ends and not written[max(ends) :].strip()
        return text[: start + max(ends)] if cut else text

    def _render(self, turns: Sequence[Turn], prompt: bool) -> str:
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        try:
            given = dict.fromkeys(_GIVEN) | {"messages": messages, "add_generation_prompt": prompt}
            return self._template.render({**self._variables, **self._tokens, **given})
        except AbsentTokenError:
            raise
        # A template is foreign code, which may raise anything in the sandbox.
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise DataError(f"the tokenizer's chat template fails: {reason}; {_ANOTHER}") from None


class _AbsentToken(jinja2.Undefined):
    """A token that the tokenizer's files do not name: a template may ask for it, but not write it."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AbsentTokenError(
            f"the tokenizer's chat template writes {self._undefined_name}, which the tokenizer's files do "
            f"not name; set it in tokenizer_config.json, or {_ANOTHER}"
        )

    __str__ = __add__ = __radd__ = _refuse


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, with which some templates mark answers; it is ignored here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def chat_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the template with this name, checked against the tokenizer.

    Raises:
      UnknownNameError: no such template.
      DataError: the tokenizer lacks a token that the template writes, or has no template of its own.
    """
    if name not in TEMPLATES:
        raise UnknownNameError("chat template", name, TEMPLATES)
    source = _SOURCES.get(name, tokenizer.chat_template)
    if source is None:
        raise DataError(f"the tokenizer has no chat template of its own; {_ANOTHER}")
    if name in _SOURCES:
        _check_special(name, tokenizer, _SPECIAL.findall(source))
    if name == "plain" and tokenizer.eos is None:
        raise DataError(
            "the tokenizer names no token that ends an answer; set eos_token in tokenizer_config.json"
        )
    return ChatTemplate(name, source, tokenizer)


def check_special_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """Checks that the tokenizer has the special tokens that a template writes in a prompt of one turn.

    A template that fails on such a prompt for another reason says so when it is used.

    Raises:
      AbsentTokenError: the tokenizer lacks one.
    """
    try:
        sample = template.prompt([Turn("user", "")])
    except AbsentTokenError:
        raise
    except DataError:
        return
    _check_special(template.name, tokenizer, _SPECIAL.findall(sample))


def _check_special(name: str, tokenizer: Tokenizer, tokens: Iterable[str]) -> None:
    absent = [token for token in dict.fromkeys(tokens) if len(tokenizer.encode(token)) != 1]
    if absent:
        raise AbsentTokenError(
            f"the template {name} writes {', '.join(absent)}, which the tokenizer does not have as one "
            "token each; use a template that was made for this tokenizer (plain fits any)"
        )
