"""Replies in the format of OpenAI's protocol: choices, log probabilities, stream events, errors."""

import json
from typing import Any, Literal

from agentic_ring.serve.generation import GeneratedText, ScoredToken
from agentic_ring.serve.jobs import GenerationJob

Kind = Literal["text_completion", "chat.completion"]

INTERNAL_ERROR = "internal error of the server; its output has the details"
_ERROR_TYPES = {404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}


def reply_body(
    kind: Kind, head: dict[str, Any], job: GenerationJob, answers: list[GeneratedText], with_top: bool
) -> dict[str, Any]:
    """The body of a complete reply; ``with_top`` adds the most likely tokens to the log probabilities."""
    prompt_tokens = sum(len(prompt.tokens) for prompt in job.prompts)
    new_tokens = sum(answer.tokens for answer in answers)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": new_tokens}
    choices = [_choice(kind, index, answer, with_top) for index, answer in enumerate(answers)]
    total = {"total_tokens": prompt_tokens + new_tokens}
    return {**head, "object": kind, "choices": choices, "usage": usage | total}


def _choice(kind: Kind, index: int, answer: GeneratedText, with_top: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": answer.ended, "logprobs": None}
    if kind == "chat.completion":
        return choice | {"message": {"role": "assistant", "content": answer.text}}
    if answer.scored is not None:
        choice["logprobs"] = _logprobs(answer.scored, with_top)
    return choice | {"text": answer.text}


def _logprobs(tokens: list[ScoredToken], with_top: bool) -> dict[str, Any]:
    top = [None if token.likeliest is None else dict([token.likeliest]) for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.log_probability for token in tokens],
        "top_logprobs": top if with_top else None,
        "text_offset": [token.offset for token in tokens],
    }


def stream_event(kind: Kind, head: dict[str, Any], text: str, ended: str | None = None) -> str:
    """A server-sent event with one part of an answer; ``ended`` is the finish reason of the last event."""
    chat = kind == "chat.completion"
    choice: dict[str, Any] = {"index": 0, "finish_reason": ended}
    choice |= {"delta": {"content": text} if text else {}} if chat else {"text": text, "logprobs": None}
    return event({**head, "object": "chat.completion.chunk" if chat else kind, "choices": [choice]})


def event(content: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


def error_body(message: str, status: int = 400, code: str | None = None) -> dict[str, Any]:
    """The body of an error reply with this HTTP status."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
