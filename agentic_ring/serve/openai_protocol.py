"""Requests and replies of the supported part of OpenAI's protocol, with some fields of vLLM.

A field that is not declared here is refused, since it might change the answer.
"""

import asyncio
import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, field_validator, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request

from agentic_ring.inference.sampling import Sampling
from agentic_ring.serve.generation import GeneratedText, ScoredToken
from agentic_ring.serve.prompts import Prompt

DEFAULT_TOKENS = 16
"""Default length of a completion, as in OpenAI's protocol."""
DEFAULT_CHAT_TOKENS = 1024
"""Default length of a chat answer; shorter if the context is full."""
MAX_PROMPTS, MAX_MESSAGES, MAX_PARTS = 128, 2**14, 1024
"""Limits of a request's lists; the last one is that of one message."""
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024
"""Maximum number of stop strings and of stop tokens, and of characters of each string."""
BODY_SECONDS = 30.0
"""Time for the body of a request."""
INTERNAL_ERROR = "internal error of the server; its output has the details"

# Lists fail at their first invalid item, so that the error is no longer than the list.
Token = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[list[StrictStr], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
TokenPrompts = Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
StopString = Annotated[StrictStr, Field(max_length=MAX_STOP_CHARACTERS)]


Harmless = object
"""Of fields that may have any value."""


class Fields(BaseModel):
    """An object of a request. A null field is an absent one.

    Fields of type Any are not supported; they may only have their defaults, which change no answer.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        for name, field in type(self).model_fields.items():
            if field.annotation is Any and getattr(self, name) != field.default:
                raise ValueError(f"{name} is not supported; leave it out")
        return self


class StreamOptions(Fields):
    """What a stream has beside the answer."""

    include_usage: bool = False
    include_obfuscation: Harmless = None


class GenerationFields(Fields):
    """Fields of both completions and chats."""

    kind: ClassVar[str]
    """Kind of the reply."""
    model: Annotated[StrictStr, Field(max_length=256)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    """0 and -1 are all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] = []
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOPS, fail_fast=True)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # These change no answer: they are the client's own, or say how OpenAI should handle the request.
    user: Harmless = None
    metadata: Harmless = None
    store: Harmless = None
    service_tier: Harmless = None
    safety_identifier: Harmless = None
    prompt_cache_key: Harmless = None
    n: Any = 1
    frequency_penalty: Any = 0
    presence_penalty: Any = 0
    logit_bias: Any = {}
    repetition_penalty: Any = 1

    @property
    def sampling(self) -> Sampling:
        """How to sample; each time with another seed unless one was given."""
        seed = secrets.randbits(32) if self.seed is None else self.seed
        return Sampling(self.temperature, self.top_p, max(0, self.top_k), self.min_p, seed)

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    kind = "text_completion"
    prompt: StrictStr | Tokens | Prompts | TokenPrompts
    max_tokens: Annotated[int, Field(ge=0)] = DEFAULT_TOKENS
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    best_of: Any = 1
    suffix: Any = ""

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as tokens; all are of one kind."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else self.prompt  # pyright: ignore[reportReturnType]

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream and (len(self.prompts) > 1 or self.echo or self.logprobs is not None):
            raise ValueError("a stream supports one prompt, without echo and logprobs")
        return self


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: StrictStr


class Message(Fields):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: StrictStr | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]
    # Of a reply that is sent again.
    name: Harmless = None
    refusal: Harmless = None
    annotations: Harmless = None
    tool_calls: Any = []
    function_call: Any = {}
    audio: Any = {}

    @property
    def text(self) -> str:
        """The content as one string."""
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    kind = "chat.completion"
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the chat template, as of vLLM."""
    tools: Any = []
    tool_choice: Any = "none"
    parallel_tool_calls: Harmless = None
    functions: Any = []
    function_call: Any = "none"
    logprobs: Any = False
    top_logprobs: Any = 0
    response_format: Any = {"type": "text"}
    modalities: Any = ["text"]

    @property
    def new_tokens(self) -> int | None:
        """Maximum length of the answer; the newer field name takes precedence."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


Body = TypeVar("Body", bound=GenerationFields)


async def read_body(request: Request, kind: type[Body], max_bytes: int) -> Body:
    """Returns the validated body of a request.

    Raises:
      HTTPException: it is not JSON (415), larger than ``max_bytes`` (413), or takes too long (408).
      pydantic.ValidationError: it is not a valid ``kind``.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, "the request is not JSON; send Content-Type: application/json")
    closing, body = {"Connection": "close"}, bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise HTTPException(413, f"the request is larger than {max_bytes} bytes", closing)
    except TimeoutError:
        raise HTTPException(408, f"the request took longer than {BODY_SECONDS:g} s", closing) from None
    return kind.model_validate_json(bytes(body))


def reply_body(
    kind: str, head: dict[str, Any], prompts: Sequence[Prompt], answers: list[GeneratedText], with_top: bool
) -> dict[str, Any]:
    """The body of a complete reply; ``with_top`` adds the most likely tokens to the log probabilities."""
    choices = []
    for index, answer in enumerate(answers):
        logprobs = None if answer.scored is None else _logprobs(answer.scored, with_top)
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.ended, "logprobs": logprobs}
        if kind == ChatRequest.kind:
            choice["message"] = {"role": "assistant", "content": answer.text}
        else:
            choice["text"] = answer.text
        choices.append(choice)
    return {**head, "object": kind, "choices": choices, "usage": usage(prompts, answers)}


def usage(prompts: Sequence[Prompt], answers: Sequence[GeneratedText]) -> dict[str, int]:
    """Numbers of tokens that were read and generated."""
    read, new = sum(len(prompt.tokens) for prompt in prompts), sum(answer.tokens for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


def _logprobs(tokens: list[ScoredToken], with_top: bool) -> dict[str, Any]:
    top = [None if token.likeliest is None else dict([token.likeliest]) for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.log_probability for token in tokens],
        "top_logprobs": top if with_top else None,
        "text_offset": [token.offset for token in tokens],
    }


def stream_event(kind: str, head: dict[str, Any], text: str | None, ended: str | None = None) -> str:
    """A server-sent event with one part of an answer; ``ended`` is the finish reason of the last event.

    The first event of a chat has no text, None, but says who speaks.
    """
    chat = kind == ChatRequest.kind
    choice: dict[str, Any] = {"index": 0, "finish_reason": ended}
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text} if text else {}
    choice |= {"delta": delta} if chat else {"text": text, "logprobs": None}
    return event({**_chunk(kind, head), "choices": [choice]})


def usage_event(kind: str, head: dict[str, Any], used: dict[str, int]) -> str:
    """The server-sent event after those of the answer, if a stream shall have its usage."""
    return event({**_chunk(kind, head), "choices": [], "usage": used})


def _chunk(kind: str, head: dict[str, Any]) -> dict[str, Any]:
    return {**head, "object": "chat.completion.chunk" if kind == ChatRequest.kind else kind}


def event(content: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def error_body(message: str, status: int = 400, code: str | None = None) -> dict[str, Any]:
    """The body of an error reply with this HTTP status."""
    kinds = {404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}
    kind = kinds.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
