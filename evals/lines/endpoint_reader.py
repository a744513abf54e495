"""A model behind an OpenAI-compatible server as a reader; also counts tokens for it."""

import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from agentic_ring.errors import ConfigError, DataError
from evals.lines.readers import Answer

KEY_VARIABLE = "OPENAI_API_KEY"

CHAT_TEMPLATE_TOKENS = 64
"""Tokens reserved for the server's chat template; Vicuna's has about 40."""


@dataclass(frozen=True)
class RetryPolicy:
    """Timeouts, retries and rate limit of requests to a server.

    Attributes:
      timeout: seconds before a request counts as lost; reading 512K tokens takes minutes.
      attempts: number of attempts before a question counts as failed.
      first_wait: seconds to wait after the first failed attempt; doubled after each further one.
      longest_wait: maximum of that wait in seconds; a server's Retry-After may be longer.
      longest_retry_after: maximum wait in seconds that a server's Retry-After can cause.
      requests_per_minute: maximum rate; None for no limit.
    """

    timeout: float = 600.0
    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 60.0
    longest_retry_after: float = 300.0
    requests_per_minute: float | None = None

    def __post_init__(self) -> None:
        if not self.timeout > 0 or self.attempts < 1:
            raise ConfigError(f"timeout is {self.timeout} s, attempts {self.attempts}; both must be positive")
        if self.requests_per_minute is not None and not self.requests_per_minute > 0:
            raise ConfigError(
                f"requests_per_minute is {self.requests_per_minute}; give a positive number, or leave it out"
            )


class EndpointReader:
    """A ``Reader`` that sends each question to a server with the whole document; servers may cache it.

    The API key comes from the environment variable OPENAI_API_KEY, if it is set, and is never shown.

    Args:
      address: base address, such as http://127.0.0.1:8000/v1.
      model: the server's name of the model.
      count_text: counts the tokens of a text; see ``token_counter``.
      completions: send bare prompts to ``/completions``, for models without a chat template, instead of
        user messages to ``/chat/completions``.
      retries: timeouts, retries and rate limit.

    Raises:
      ConfigError: the address is malformed or contains a password.
    """

    trained_on_task = False

    def __init__(
        self,
        address: str,
        model: str,
        count_text: Callable[[str], int],
        completions: bool = False,
        retries: RetryPolicy | None = None,
    ):
        self.name = model
        self._url = _checked_address(address) + ("/completions" if completions else "/chat/completions")
        self._count_text = count_text
        self._completions = completions
        self._retries = retries or RetryPolicy()
        self._key = os.environ.get(KEY_VARIABLE, "")
        self._next_request = time.monotonic()
        self._reached = False

    def count_tokens(self, document: str, question: str) -> int:
        """Tokens of the text, plus ``CHAT_TEMPLATE_TOKENS`` for a chat message."""
        return self._count_text(document + question) + (0 if self._completions else CHAT_TEMPLATE_TOKENS)

    def answers(self, document: str, questions: Sequence[str], max_new_tokens: int) -> Iterator[Answer]:
        """One answer for each question, in their order.

        Lost requests, refusals (429, 5xx) and unreadable replies are retried; after the last attempt the
        answer has an error.

        Raises:
          ConfigError: the server does not accept the key, address or model, or was never reached; further
            questions would fail too.
        """
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        with httpx.Client(headers=headers, timeout=self._retries.timeout) as client:
            for question in questions:
                yield self._answer(client, document, question, max_new_tokens)

    def _answer(self, client: httpx.Client, document: str, question: str, max_new_tokens: int) -> Answer:
        prompt = document + question
        body: dict[str, Any] = {"model": self.name, "max_tokens": max_new_tokens, "temperature": 0}
        if self._completions:
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}]
        problem = ""
        for attempt in range(self._retries.attempts):
            self._wait_for_rate_limit()
            started = time.monotonic()
            try:
                text, tokens = self._ask(client, body)
            except _RefusedError as refused:
                problem = str(refused)
                if not refused.again:
                    break
                if attempt + 1 < self._retries.attempts:
                    time.sleep(self._wait(attempt, refused.retry_after))
            else:
                tokens = self.count_tokens(document, question) if tokens is None else tokens
                return Answer(text, tokens, time.monotonic() - started)
        if not self._reached:
            raise ConfigError(f"{problem}. Is the server running, and is this its address?")
        return Answer("", self.count_tokens(document, question), 0.0, problem)

    def _ask(self, client: httpx.Client, body: dict[str, Any]) -> tuple[str, int | None]:
        """The answer's text, and the prompt's tokens if the server reports them."""
        try:
            response = client.post(self._url, json=body)
        except httpx.ReadTimeout as error:
            self._reached = True
            raise _RefusedError(f"no reply within {self._retries.timeout:g} s", again=True) from error
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise _RefusedError(f"no connection to {self._url}: {reason}", again=True) from error
        self._reached = True
        status = response.status_code
        if status in (401, 403, 404):
            raise ConfigError(
                f"{self._url} refuses every question with status {status}: {self._excerpt(response)}. Check "
                f"the key in {KEY_VARIABLE}, the model name {self.name!r}, and the address, which usually "
                "ends in /v1"
            )
        if status != 200:
            again = status in (408, 409, 425, 429) or status >= 500
            message = f"status {status}: {self._excerpt(response)}"
            raise _RefusedError(message, again, _retry_after(response))
        try:
            content = response.json()
            choice = content["choices"][0]
            text = choice["text"] if self._completions else choice["message"]["content"]
            tokens = (content.get("usage") or {}).get("prompt_tokens")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise _RefusedError(
                f"a reply without an answer: {self._excerpt(response)}", again=True
            ) from error
        if not isinstance(text, str):
            raise _RefusedError(f"a reply whose answer is not text: {self._excerpt(response)}", again=True)
        return text, tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None

    def _excerpt(self, response: httpx.Response) -> str:
        """The beginning of a reply on one line, without the key, which some servers repeat."""
        text = json.dumps(response.text[:1000], ensure_ascii=False)[1:-1]
        if self._key:
            text = text.replace(self._key, "***")
        return text[:200] or "nothing"

    def _wait(self, attempt: int, retry_after: float | None) -> float:
        if retry_after is not None:
            return min(retry_after, self._retries.longest_retry_after)
        doubled = min(self._retries.first_wait * 2**attempt, self._retries.longest_wait)
        return doubled * random.uniform(0.75, 1.25)  # so that several runs do not retry at the same moment

    def _wait_for_rate_limit(self) -> None:
        if self._retries.requests_per_minute is None:
            return
        now = time.monotonic()
        time.sleep(max(0.0, self._next_request - now))
        self._next_request = max(now, self._next_request) + 60 / self._retries.requests_per_minute


class _RefusedError(Exception):
    """A request without an answer.

    Attributes:
      again: whether to retry the request.
      retry_after: seconds to wait, as requested by the server, or None.
    """

    def __init__(self, message: str, again: bool, retry_after: float | None = None):
        super().__init__(message)
        self.again = again
        self.retry_after = retry_after


def _checked_address(address: str) -> str:
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the endpoint {address!r} is not an address: {error}") from error
    if url.userinfo:
        raise ConfigError(
            f"the endpoint contains a user name or password; put the key in {KEY_VARIABLE} instead"
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"the endpoint {address!r} is not an address such as http://127.0.0.1:8000/v1")
    return address.rstrip("/")


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds from a header with a number or a date; None if it is missing or malformed."""
    text = response.headers.get("Retry-After", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            when = parsedate_to_datetime(text)
        except ValueError:
            return None
        seconds = (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if seconds < float("inf") else None


LETTERS_PER_TOKEN = 3.5


def token_counter(tokenizer: Path | None) -> Callable[[str], int]:
    """A function that counts the tokens of a text, including BOS if the tokenizer adds it.

    Args:
      tokenizer: a ``tokenizer.json``, or its folder; None gives ``estimated_tokens``.

    Raises:
      DataError: the file does not exist or is not a tokenizer.
    """
    if tokenizer is None:
        return estimated_tokens
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        raise DataError(f"{path} does not exist; give the folder of a model that has a tokenizer.json")
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise DataError(f"{path} cannot be read as a tokenizer: {error}") from error
    loaded.no_truncation()  # some files truncate or pad texts
    loaded.no_padding()
    return lambda text: len(loaded.encode(text))


def estimated_tokens(text: str) -> int:
    """Estimates the tokens of a line-retrieval prompt for LLaMA-1 and 2; newer tokenizers need fewer.

    A digit, sign or newline counts as one token, a word as its letters divided by 3.5, rounded up. For
    LongChat's 300 cases of 200 to 680 lines this is 2 to 3% above LLaMA's own counts, which LongChat
    recorded: prompts become slightly shorter than requested, so they fit.
    """
    words = re.findall(r"[A-Za-z]+|\n|[^\sA-Za-z]", text)
    return sum(-int(-len(word) // LETTERS_PER_TOKEN) for word in words)
