"""Chat templates, built in or a tokenizer folder's own, which write a conversation as text.

A template divides a conversation into pieces of text, alternately questions and answers. Training and
generation encode the same pieces separately, so that the tokens of a prompt are the same in both.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, get_args

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import DataError, UnknownNameError
from agentic_ring.extras import needs_extra

with needs_extra("text"):
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

Role = Literal["system", "user", "assistant"]


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


class ChatTemplate(Protocol):
    """Interface of the templates.

    Attributes:
      special: tokens that the template writes, each of which must be one token of the tokenizer.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def special(self) -> tuple[str, ...]: ...  # noqa: D102

    def prompt(self, turns: Sequence[Turn]) -> str:
        """Returns the text of a conversation that ends with the user's turn, up to the answer's beginning.

        Raises:
          DataError: the turns are not such a conversation.
        """
        ...

    def pieces(self, turns: Sequence[Turn]) -> list[Piece]:
        """Returns the text of a conversation with its answers, as pieces.

        Raises:
          DataError: the turns are not a conversation.
        """
        ...


def check_turns(turns: Sequence[Turn]) -> None:
    """Checks that user and assistant alternate, the user first, after an optional turn of the system.

    Raises:
      DataError: they do not.
    """
    roles = [turn.role for turn in turns]
    unknown = set(roles) - set(get_args(Role))
    if unknown:
        raise DataError(f"roles {sorted(unknown)} in a conversation, expected {', '.join(get_args(Role))}")
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    if not spoken or any(role != ("user", "assistant")[n % 2] for n, role in enumerate(spoken)):
        shown = ", ".join(roles[:8]) + (", ..." if len(roles) > 8 else "")
        raise DataError(
            f"the roles of a conversation are {shown or 'none'}; expected user and assistant in "
            "turn, the user first, after at most one turn of the system"
        )


@dataclass(frozen=True)
class FormatTemplate:
    """A template made of format strings, each with one ``{}`` for the text.

    Attributes:
      system_turn: the system's turn.
      question: the user's turn, up to the answer's beginning.
      answer: the answer and its end token.
      start: text before all turns.
      system: the system's text for conversations without a system turn.
      special: tokens in these strings.
      strip: whether to remove white space around a turn.
    """

    name: str
    system_turn: str
    question: str
    answer: str
    start: str = ""
    system: str | None = None
    special: tuple[str, ...] = ()
    strip: bool = False

    def prompt(self, turns: Sequence[Turn]) -> str:
        """See ``ChatTemplate``."""
        _check_asks(turns)
        return "".join(piece.text for piece in self.pieces(turns))

    def pieces(self, turns: Sequence[Turn]) -> list[Piece]:
        """See ``ChatTemplate``."""
        check_turns(turns)
        if self.system is not None and turns[0].role != "system":
            turns = [Turn("system", self.system), *turns]
        front = self.start
        pieces = []
        for role, text in turns:
            text = text.strip() if self.strip else text
            if role == "system":
                front += self.system_turn.format(text)
            elif role == "user":
                pieces.append(Piece(front + self.question.format(text), False))
                front = ""
            else:
                pieces.append(Piece(self.answer.format(text), True))
        return pieces


class JinjaTemplate:
    """The template of a tokenizer's folder, rendered in Jinja's sandbox as Hugging Face does.

    Args:
      tokenizer: provides ``bos_token`` and ``eos_token``.
      clock: provides the time for ``strftime_now``.

    Raises:
      DataError: the source is not valid Jinja.
    """

    name = "tokenizer"
    special: tuple[str, ...] = ()

    def __init__(self, source: str, tokenizer: Tokenizer, clock: Callable[[], datetime] = datetime.now):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            undefined=_Undefined,
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(
                f"the tokenizer's chat template is not valid Jinja: {error}; {_ANOTHER}"
            ) from None
        self._tokenizer = tokenizer

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        return tuple(filter(None, map(self._tokenizer.token, self._tokenizer.eos_ids)))

    def prompt(self, turns: Sequence[Turn]) -> str:
        """See ``ChatTemplate``."""
        check_turns(turns)
        _check_asks(turns)
        return self._render(turns, prompt=True)

    def pieces(self, turns: Sequence[Turn]) -> list[Piece]:
        """See ``ChatTemplate``; a piece is the text that one more turn adds to that of the turns before it.

        The time is linear in the conversation's length for templates that write a turn in the same way after
        three turns as after all earlier ones, which is checked. For others it grows with the number of turns.

        Raises:
          DataError: the turns are not a conversation, the template refuses them, or it writes a turn
            differently once others follow.
        """
        check_turns(turns)
        if len(turns) > _FEW_TURNS:
            pieces = self._pieces_from_neighbours(turns)
            if pieces is not None and self._agree(pieces, turns):
                return pieces
        return self._pieces_from_beginnings(turns)

    def _pieces_from_beginnings(self, turns: Sequence[Turn]) -> list[Piece]:
        """The pieces by rendering every beginning of the conversation."""
        text = ""
        pieces: list[Piece] = []
        for count, turn in enumerate(turns, start=1):
            if turn.role == "system":
                continue
            asked = turn.role == "user"
            longer = self._render(turns[:count], prompt=asked)
            if not longer.startswith(text):
                raise DataError(
                    f"the tokenizer's chat template writes the turns before number {count} differently once "
                    f"that one follows, so its answers cannot be trained on; {_ANOTHER}"
                )
            # Text after an answer's end token belongs to the template, not to the answer.
            end = len(longer) if asked else self._end_of_answer(longer, len(text))
            pieces.append(Piece(longer[len(text) : end], not asked))
            text = longer[:end]
        return pieces

    def _pieces_from_neighbours(self, turns: Sequence[Turn]) -> list[Piece] | None:
        """The pieces by rendering each turn after the two or three before it; None if that fails."""
        # The system's text is not repeated for each turn: it may be long.
        opening = [Turn("system", "system")] if turns[0].role == "system" else []
        spoken = turns[len(opening) :]
        try:
            pieces = self._pieces_from_beginnings(turns[: len(opening) + 4])
            for start in range(2, len(spoken) - 2, 2):
                pieces += self._pieces_from_beginnings([*opening, *spoken[start : start + 4]])[2:]
        except DataError:
            return None
        return pieces

    def _agree(self, pieces: Sequence[Piece], turns: Sequence[Turn]) -> bool:
        """Whether the pieces add up to the text of the first 1/1, 1/2, 1/4 ... of the turns."""
        system = len(turns) - len(pieces)
        count = len(pieces)
        while count:
            text = "".join(piece.text for piece in pieces[:count])
            asked = not pieces[count - 1].is_answer
            try:
                rendered = self._render(turns[: system + count], prompt=asked)
            except DataError:
                return False
            end = (
                len(rendered)
                if asked
                else self._end_of_answer(rendered, len(text) - len(pieces[count - 1].text))
            )
            if rendered[:end] != text:
                return False
            count //= 2
        return True

    def _end_of_answer(self, text: str, start: int) -> int:
        written = text[start:]
        ends = [text.rfind(token, start) + len(token) for token in self._ends if token in written]
        return max(ends) if ends and not text[max(ends) :].strip() else len(text)

    def _render(self, turns: Sequence[Turn], prompt: bool) -> str:
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        tokens = {"bos_token": self._tokenizer.bos, "eos_token": self._tokenizer.eos}
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=prompt,
                tools=None,
                documents=None,
                **{name: token for name, token in tokens.items() if token is not None},
            )
        except _UnnamedTokenError as error:
            raise AbsentTokenError(
                f"the tokenizer's chat template writes {error}, which the tokenizer's files do not name; set "
                f"it in tokenizer_config.json, or {_ANOTHER}"
            ) from None
        # A template is foreign code, which may raise anything in the sandbox.
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise DataError(f"the tokenizer's chat template fails: {reason}; {_ANOTHER}") from None


_FEW_TURNS = 8
"""Up to this length, rendering every beginning of a conversation takes no longer than anything else."""

_ANOTHER = "use another template: vicuna_v1.1, llama-3 or plain"


_SPECIAL = re.compile(r"<\|[^<>|\s]+\|>|</?s>|<(?:start|end)_of_turn>")
"""Spellings that are special tokens wherever a template writes them."""


class _UnnamedTokenError(Exception):
    """A template writes ``bos_token`` or ``eos_token``, and the tokenizer has none."""


class _Undefined(jinja2.Undefined):
    """A name without a value, which is written as nothing, unless it is a token's."""

    def __str__(self) -> str:
        self._refuse_token()
        return super().__str__()

    def __add__(self, other: Any) -> Any:
        self._refuse_token()
        return super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        self._refuse_token()
        return super().__radd__(other)

    def _refuse_token(self) -> None:
        if self._undefined_name in ("bos_token", "eos_token"):
            raise _UnnamedTokenError(self._undefined_name)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, with which some templates mark answers; it is ignored here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """``tojson`` without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _check_asks(turns: Sequence[Turn]) -> None:
    if not turns or turns[-1].role != "user":
        raise DataError("a prompt must end with a turn of the user; remove the last answer")


_VICUNA = FormatTemplate(
    name="vicuna_v1.1",
    system_turn="{} ",
    question="USER: {} ASSISTANT:",
    answer=" {}</s>",
    system=(
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
        "helpful, detailed, and polite answers to the user's questions."
    ),
    special=("</s>",),
)
_LLAMA_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
_LLAMA_3 = FormatTemplate(
    name="llama-3",
    start="<|begin_of_text|>",
    system_turn=_LLAMA_HEADER.format("system") + "{}<|eot_id|>",
    question=_LLAMA_HEADER.format("user") + "{}<|eot_id|>" + _LLAMA_HEADER.format("assistant"),
    answer="{}<|eot_id|>",
    special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    strip=True,
)
TEMPLATES = ("vicuna_v1.1", "llama-3", "plain", "tokenizer")
"""Names for ``chat_template``; "plain" writes each turn on its own line without roles, and "tokenizer" is the
template of the tokenizer's folder."""


def chat_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the template with this name, checked against the tokenizer.

    Raises:
      UnknownNameError: no such template.
      DataError: the tokenizer lacks a token that the template writes, or has no template of its own.
    """
    if name not in TEMPLATES:
        raise UnknownNameError("chat template", name, TEMPLATES)
    if name == "tokenizer":
        if tokenizer.chat_template is None:
            raise DataError(f"the tokenizer's folder has no chat template; {_ANOTHER}")
        return JinjaTemplate(tokenizer.chat_template, tokenizer)
    if name == "plain":
        if tokenizer.eos is None:
            raise DataError(
                "the tokenizer names no token that ends an answer; set eos_token in tokenizer_config.json"
            )
        end = (tokenizer.eos,)
        return FormatTemplate("plain", "{}\n", "{}\n", "{}" + _escaped(tokenizer.eos), special=end)
    template = {"vicuna_v1.1": _VICUNA, "llama-3": _LLAMA_3}[name]
    _check_special(name, tokenizer, template.special)
    return template


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


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
