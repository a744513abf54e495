"""Conversations as a model was taught to read them: chat templates, built in or a folder's own.

A template cuts a conversation into pieces of text, questions and answers in turn. A model reads the
pieces up to its answer and writes the answer; whoever trains it encodes the same pieces, so that no
token of a prompt differs between the two, and none of an answer is lost to a text encoded twice.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, get_args

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import DataError, UnknownNameError

Role = Literal["system", "user", "assistant"]


class Turn(NamedTuple):
    """What one side says."""

    role: Role
    text: str


class Piece(NamedTuple):
    """A stretch of a conversation's text, and whether the model is to write it."""

    text: str
    is_answer: bool


class ChatTemplate(Protocol):
    """How a conversation is written.

    Attributes:
      name: by which it is asked for.
      special: tokens it writes, each of which must be one token of the tokenizer.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def special(self) -> tuple[str, ...]: ...  # noqa: D102

    def prompt(self, turns: Sequence[Turn]) -> str:
        """The text of a conversation that ends with the user's turn, up to where the answer begins.

        Raises:
          DataError: the turns are no such conversation.
        """
        ...

    def pieces(self, turns: Sequence[Turn]) -> list[Piece]:
        """The same text, and that of answers, piece by piece; after the user's last turn a prompt's end.

        Raises:
          DataError: the turns are no conversation.
        """
        ...


def check_turns(turns: Sequence[Turn]) -> None:
    """Checks that user and assistant take turns, the user first, after the system if it speaks at all.

    Raises:
      DataError: they do not.
    """
    roles = [turn.role for turn in turns]
    unknown = set(roles) - set(get_args(Role))
    if unknown:
        raise DataError(f"roles {sorted(unknown)} in a conversation, expected {', '.join(get_args(Role))}")
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    if not spoken or any(role != ("user", "assistant")[n % 2] for n, role in enumerate(spoken)):
        raise DataError(
            f"the roles of a conversation are {', '.join(roles) or 'none'}; expected user and assistant in "
            "turn, the user first, after at most one turn of the system"
        )


@dataclass(frozen=True)
class FormatTemplate:
    """A template in a few format strings, each with one ``{}`` for the text.

    Attributes:
      name: by which it is asked for.
      system_turn: how the system speaks.
      question: the user's turn, up to where an answer begins.
      answer: the answer and what ends it.
      start: what stands before all turns.
      system: what the system says where a conversation does not tell.
      special: tokens in these strings.
      strip: whether white space round a turn is taken off.
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
    """The template of a tokenizer's folder, rendered as Hugging Face renders it: in Jinja's sandbox.

    Args:
      source: Jinja.
      tokenizer: gives ``bos_token`` and ``eos_token``.
      clock: what ``strftime_now`` tells.

    Raises:
      DataError: the source is no Jinja.
    """

    name = "tokenizer"
    special: tuple[str, ...] = ()

    def __init__(self, source: str, tokenizer: Tokenizer, clock: Callable[[], datetime] = datetime.now):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"the tokenizer's chat template is no Jinja: {error}; {_ANOTHER}") from None
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
        """See ``ChatTemplate``; each piece is what one more turn adds to the text of those before it.

        Raises:
          DataError: the turns are no conversation, the template refuses them, or it writes a turn in
            another way once others follow.
        """
        check_turns(turns)
        text = ""
        pieces: list[Piece] = []
        for count, turn in enumerate(turns, start=1):
            if turn.role == "system":
                continue
            asked = turn.role == "user"
            longer = self._render(turns[:count], prompt=asked)
            if not longer.startswith(text):
                raise DataError(
                    f"the tokenizer's chat template writes the turns before number {count} in another way "
                    f"once that one follows, so its answers cannot be trained on; {_ANOTHER}"
                )
            # What follows the end of an answer belongs to the template, not to what the model says.
            end = len(longer) if asked else self._end_of_answer(longer, len(text))
            pieces.append(Piece(longer[len(text) : end], not asked))
            text = longer[:end]
        return pieces

    def _end_of_answer(self, text: str, start: int) -> int:
        ends = [text.rfind(token, start) + len(token) for token in self._ends if token in text[start:]]
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
        # A template is a program of other people's: in the sandbox it may fail in any way.
        except Exception as error:
            raise DataError(f"the tokenizer's chat template fails: {error}; {_ANOTHER}") from None


_ANOTHER = "take another template: vicuna_v1.1, llama-3 or plain"


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, by which some templates mark answers; here pieces tell them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _check_asks(turns: Sequence[Turn]) -> None:
    if not turns or turns[-1].role != "user":
        raise DataError("a prompt must end with a turn of the user; take off the last answer")


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
"""Names for ``chat_template``; "plain" writes each turn on a line of its own, and no roles, and
"tokenizer" is the template of the tokenizer's folder."""


def chat_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of this name, checked against the tokenizer.

    Raises:
      UnknownNameError: no such template.
      DataError: the tokenizer lacks a token that the template writes, or a template of its own.
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
    absent = [token for token in template.special if len(tokenizer.encode(token)) != 1]
    if absent:
        raise DataError(
            f"the template {name} writes {', '.join(absent)}, which the tokenizer does not have as one "
            "token each; take a template that was made for this tokenizer (plain fits any)"
        )
    return template


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
