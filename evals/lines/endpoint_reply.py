"""Replies of OpenAI-compatible servers to a completion or chat request."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

EVENT_STREAM = "text/event-stream"

FAILURES = "abort", "content_filter", "error"
"""Reasons to end an answer that is not the model's own, or not whole."""


class UnreadableReplyError(Exception):
    """A reply from which no answer can be read; the message says what is wrong with it."""


@dataclass(frozen=True)
class Reply:
    """What a server says.

    Attributes:
      text: the answer.
      cut_off: whether the server stopped the answer at the limit of tokens.
      reasoned: whether the model wrote tokens of reasoning, which count towards the limit.
      prompt_tokens: tokens of the prompt; None where the server reports none, likewise the others.
      cached_tokens: tokens of the prompt that the server had read before.
      answer_tokens: tokens of answer and reasoning.
    """

    text: str
    cut_off: bool
    reasoned: bool
    prompt_tokens: int | None
    cached_tokens: int | None
    answer_tokens: int | None


def read_reply(response: httpx.Response) -> Reply:
    """Reads a reply, whole or as a stream of events, which some servers send unasked.

    Raises:
      UnreadableReplyError: it has no answer, ends before the answer does, or contradicts itself.
    """
    streamed = response.headers.get("Content-Type", "").startswith(EVENT_STREAM)
    try:
        content = _joined(response.content) if streamed else response.json()
        choice, usage = _answer(content["choices"]), content.get("usage") or {}
        message = choice.get("message") or choice
        text = message["content"] if "content" in message else message["text"]
        reasoned = bool(message.get("reasoning_content") or message.get("reasoning"))
        reasoned |= (_count(usage, "completion_tokens_details", "reasoning_tokens") or 0) > 0
        finish_reason = choice.get("finish_reason")
        cut_off = finish_reason == "length"
        counts = (
            _count(usage, "prompt_tokens") or None,  # some servers report 0 for what they do not know
            _count(usage, "prompt_tokens_details", "cached_tokens"),
            _count(usage, "completion_tokens"),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UnreadableReplyError("a reply without an answer") from error
    prompt, cached, _ = counts
    if prompt is not None and cached is not None and cached > prompt:
        raise UnreadableReplyError(f"a reply with {cached} cached tokens of {prompt} tokens of the prompt")
    if finish_reason in FAILURES:
        raise UnreadableReplyError(f"an answer that ended with {finish_reason!r}")
    if text is None and cut_off:
        text = ""
    if not isinstance(text, str):
        raise UnreadableReplyError("a reply whose answer is not text")
    return Reply(text, cut_off, reasoned, *counts)


def _answer(choices: list[Any]) -> Any:
    """The first answer; servers may send several unasked.

    Raises:
      UnreadableReplyError: several answers are called the first.
    """
    first = [choice for choice in choices if choice.get("index", 0) == 0]
    if len(first) > 1:
        raise UnreadableReplyError(f"a reply with {len(first)} answers in place of one")
    return first[0]


def _joined(stream: bytes) -> dict[str, Any]:
    """The reply that a stream of chunks adds up to.

    Raises:
      UnreadableReplyError: the stream stops half-way, goes on after the end of its answer, or reports
        different tokens for one prompt.
    """
    parts: dict[str, str] = {}
    finish_reason, usage = None, None
    for line in stream.splitlines():  # of bytes: text is also split where an answer has Unicode's separators
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        chunk = json.loads(data)
        reported = {_count(each, "prompt_tokens") or None for each in (usage, chunk.get("usage"))} - {None}
        if len(reported) > 1:
            counts = " and ".join(map(str, sorted(filter(None, reported))))
            raise UnreadableReplyError(f"a stream that reports {counts} tokens for one prompt")
        usage = chunk.get("usage") or usage
        if not any(choice.get("index", 0) == 0 for choice in chunk.get("choices", ())):
            continue
        choice = _answer(chunk["choices"])
        for name, part in (choice.get("delta") or choice).items():
            if name in ("content", "text", "reasoning_content", "reasoning") and part:
                if finish_reason is not None:
                    raise UnreadableReplyError("a stream that goes on after the end of its answer")
                parts[name] = parts.get(name, "") + part
        finish_reason = choice.get("finish_reason") or finish_reason
    if finish_reason is None:
        raise UnreadableReplyError("a stream that stops before the answer does")
    message = {"content": parts.pop("text", ""), **parts}
    return {"choices": [{"message": message, "finish_reason": finish_reason}], "usage": usage}


def _count(usage: Any, *path: str) -> int | None:
    """A count of tokens in the server's report; None where it is missing or no count."""
    for name in path:
        usage = usage.get(name) if isinstance(usage, dict) else None
    return usage if isinstance(usage, int) and not isinstance(usage, bool) and usage >= 0 else None
