"""Validation of requests: the supported part of OpenAI's protocol.

Unsupported fields that would change an answer are refused; fields without effect are ignored.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, StrictInt, StrictStr, field_validator, model_validator

DEFAULT_TOKENS = 16
"""Default length of a completion, as in OpenAI's protocol."""

DEFAULT_CHAT_TOKENS = 1024
"""Default length of a chat answer; shorter if the context is full."""

Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Prompts = Annotated[list[StrictStr], Field(min_length=1, max_length=128)]
TokenPrompts = Annotated[list[Tokens], Field(min_length=1, max_length=128)]


class _Request(BaseModel):
    """Fields of both completions and chats."""

    # Unsupported fields, and the values of them that are accepted.
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
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
        for name, allowed in cls.unsupported.items():
            if fields.get(name) not in allowed:
                raise ValueError(f"{name} is not supported; leave it out")
        # A null field counts as left out.
        return {name: value for name, value in fields.items() if value is not None}

    @field_validator("stop", mode="before")
    @classmethod
    def _several(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop


class CompletionRequest(_Request):
    """POST /v1/completions."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_Request.unsupported,
        "best_of": (None, 1),
        "suffix": (None, ""),
    }

    prompt: StrictStr | Tokens | Prompts | TokenPrompts
    max_tokens: Annotated[int, Field(ge=0)] = DEFAULT_TOKENS
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]  # pyright: ignore[reportReturnType]

    @model_validator(mode="after")
    def _check_stream(self) -> "CompletionRequest":
        if self.stream and (len(self.prompts) > 1 or self.echo or self.logprobs is not None):
            raise ValueError("a stream supports one prompt, without echo and logprobs")
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
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_Request.unsupported,
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
        """Maximum length of the answer; the newer field name takes precedence."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
