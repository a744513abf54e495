"""What requests may hold: the part of OpenAI's protocol that is served.

What would change an answer and is not served is refused; fields that change nothing are ignored.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, StrictInt, StrictStr, field_validator, model_validator

DEFAULT_TOKENS = 16
"""Of a completion, as OpenAI has it."""

DEFAULT_CHAT_TOKENS = 1024
"""Of a chat answer, where there is room."""

Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Prompts = Annotated[list[StrictStr], Field(min_length=1, max_length=128)]
TokenPrompts = Annotated[list[Tokens], Field(min_length=1, max_length=128)]


class _Request(BaseModel):
    """What completions and chats have in common."""

    # The only values of fields that are not served.
    without: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (None, 1),
        "frequency_penalty": (None, 0),
        "presence_penalty": (None, 0),
        "logit_bias": (None, {}),
    }

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int | None = None
    stop: Annotated[list[StrictStr], Field(max_length=64)] = []
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name, allowed in cls.without.items():
            if fields.get(name) not in allowed:
                raise ValueError(f"{name} is not served; leave it out")
        # What is null counts as left out.
        return {name: value for name, value in fields.items() if value is not None}

    @field_validator("stop", mode="before")
    @classmethod
    def _several(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop


class CompletionRequest(_Request):
    """POST /v1/completions."""

    without: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_Request.without,
        "best_of": (None, 1),
        "suffix": (None, ""),
    }

    prompt: StrictStr | Tokens | Prompts | TokenPrompts
    max_tokens: Annotated[int, Field(ge=0)] = DEFAULT_TOKENS
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]  # pyright: ignore[reportReturnType]

    @model_validator(mode="after")
    def _check_stream(self) -> "CompletionRequest":
        if self.stream and (len(self.prompts) > 1 or self.echo or self.logprobs is not None):
            raise ValueError("a stream is served for one prompt, without echo and logprobs")
        return self


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """Its parts together."""
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    without: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_Request.without,
        "tools": (None, []),
        "functions": (None, []),
        "logprobs": (None, False),
        "response_format": (None, {"type": "text"}),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def new_tokens(self) -> int | None:
        """Tokens of the answer at most, by its newer name or its older one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
