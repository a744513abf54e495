"""A model behind an OpenAI-compatible server as a reader."""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from agentic_ring.errors import ConfigError
from evals.lines.endpoint_reply import Reply, UnreadableReplyError, read_reply
from evals.lines.readers import Answer
from evals.lines.request_limits import RequestPolicy, RequestSlots

KEY_VARIABLE = "OPENAI_API_KEY"

CHAT_TEMPLATE_TOKENS = 64
"""Tokens reserved for the server's chat template; Vicuna's has about 40."""

LEAST_SHARE = 0.5
"""Share of our count of a prompt's tokens that a server must report, where the count is an estimate."""
LEAST_SHARE_COUNTED = 0.95
"""The same, where the model's tokenizer has counted them."""


@dataclass(frozen=True)
class EndpointModel:
    """A model on a server and how to ask it.

    Attributes:
      address: base address, such as http://127.0.0.1:8000/v1.
      name: the server's name of the model.
      completions: send bare prompts to ``/completions``, for models without a chat template, instead of
        user messages to ``/chat/completions``.
      fields: more fields of each request; None takes a field of ours away.

    Raises:
      ConfigError: the address is malformed or contains a password; a field is one that a question needs.
    """

    address: str
    name: str
    completions: bool = False
    fields: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.address)
        except httpx.InvalidURL as error:
            raise ConfigError(f"the endpoint {self.address!r} is not an address: {error}") from error
        if url.userinfo:
            raise ConfigError(
                f"the endpoint contains a user name or password; put the key in {KEY_VARIABLE} instead"
            )
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(
                f"the endpoint {self.address!r} is not an address such as http://127.0.0.1:8000/v1"
            )
        for name in ("model", "messages", "prompt", "stream"):
            if name in (self.fields or {}):
                raise ConfigError(f"the field {name!r} of a request is this program's; leave it out")

    @property
    def url(self) -> str:
        """Where questions are sent."""
        return self.address.rstrip("/") + ("/completions" if self.completions else "/chat/completions")

    def request(self, prompt: str, max_new_tokens: int) -> dict[str, Any]:
        """The request of one answer."""
        body: dict[str, Any] = {"model": self.name, "max_tokens": max_new_tokens, "temperature": 0}
        if self.completions:
            body["prompt"] = prompt
        else:
            body["messages"] = [{"role": "user", "content": prompt}]
        return {name: value for name, value in {**body, **(self.fields or {})}.items() if value is not None}


class EndpointReader:
    """A ``Reader`` that sends each question to a server with the whole document.

    The first question about a document goes alone: when it is answered, a server that caches prefixes has
    read the document, and the others go several at a time. A reply that reports far fewer prompt tokens than
    were sent is an error: servers may cut long prompts without saying so.

    The API key comes from the environment variable OPENAI_API_KEY, if it is set, and is never shown.

    Args:
      model: the model and its server.
      count_text: counts the tokens of a text; see ``token_counter``.
      policy: timeouts, retries, rate and concurrency.
      least_share: share of our count of prompt tokens that the server must report.

    Raises:
      ConfigError: the key has spaces or characters other than ASCII's.
    """

    trained_on_task = False

    def __init__(
        self,
        model: EndpointModel,
        count_text: Callable[[str], int],
        policy: RequestPolicy | None = None,
        least_share: float = LEAST_SHARE,
    ):
        self.name = model.name
        self._model = model
        self._count_text = count_text
        self._policy = policy or RequestPolicy()
        self._slots = RequestSlots(self._policy)
        self._least_share = least_share
        self._key = os.environ.get(KEY_VARIABLE, "").strip()
        if not re.fullmatch("[!-~]*", self._key):  # errors of the HTTP library would repeat it
            raise ConfigError(f"{KEY_VARIABLE} has characters that no key has; set it anew")
        self._reached = False
        self._stopped = threading.Event()

    def count_tokens(self, document: str, question: str) -> int:
        """Tokens of the text, plus ``CHAT_TEMPLATE_TOKENS`` for a chat message."""
        return self._count_text(document + question) + self._template_tokens

    def answers(
        self, document: str, questions: Sequence[str], max_new_tokens: int
    ) -> Iterator[tuple[int, Answer]]:
        """See ``Reader``.

        Lost requests, refusals (429, 5xx) and unreadable replies are retried; after the last attempt the
        answer has an error. If the first prompt is truncated, the others are not sent.

        Raises:
          ConfigError: the server does not accept the key, address or model, or was never reached; further
            questions would fail too.
        """
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        document_tokens = self._count_text(document)
        self._stopped.clear()
        with httpx.Client(headers=headers, timeout=self._policy.timeout) as client:

            def answer(number: int) -> Answer:
                tokens = document_tokens + self._count_text(questions[number])
                return self._answer(client, document + questions[number], tokens, max_new_tokens)

            first = answer(0)
            yield 0, first
            if isinstance(first, _TruncatedAnswer):
                yield from ((number, first) for number in range(1, len(questions)))
                return
            pool = ThreadPoolExecutor(self._policy.concurrency)
            try:
                numbers = {pool.submit(answer, number): number for number in range(1, len(questions))}
                for future in as_completed(numbers):
                    yield numbers[future], future.result()
            finally:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)

    @property
    def _template_tokens(self) -> int:
        return 0 if self._model.completions else CHAT_TEMPLATE_TOKENS

    def _answer(self, client: httpx.Client, prompt: str, tokens: int, max_new_tokens: int) -> Answer:
        """The answer to a prompt of so many tokens."""
        body = self._model.request(prompt, max_new_tokens)
        problem = ""
        for attempt in range(self._policy.attempts):
            # Of each attempt, so that those that were refused together do not all come again together.
            with self._slots.slot():
                if self._stopped.is_set():
                    break
                self._slots.wait_for_rate()
                started = time.monotonic()
                try:
                    reply = self._ask(client, body)
                except _RefusedError as refused:
                    problem = str(refused)
                    if refused.too_many:
                        self._slots.refused()
                    if not refused.again or attempt + 1 == self._policy.attempts:
                        break
                    self._stopped.wait(self._policy.wait(attempt, refused.retry_after))
                else:
                    self._slots.answered()
                    return self._checked(reply, tokens, time.monotonic() - started)
        if not self._reached:
            raise ConfigError(f"{problem}. Is the server running, and is this its address?")
        return Answer("", tokens + self._template_tokens, 0.0, problem)

    def _checked(self, reply: Reply, tokens: int, seconds: float) -> Answer:
        """The answer in a reply, unless the server has not read the whole prompt of so many tokens."""
        reported = reply.prompt_tokens
        if reported is not None and reported < self._least_share * tokens:
            problem = (
                f"the server has read {reported:,} tokens of a prompt of about {tokens:,}: it truncates "
                "prompts. Raise its context length (Ollama: num_ctx), or ask for a shorter --ctx"
            )
            return _TruncatedAnswer("", reported, seconds, problem)
        return Answer(
            reply.text,
            tokens + self._template_tokens if reported is None else reported,
            seconds,
            None,
            _unfinished(reply, self._model.completions),
            reply.answer_tokens,
            reply.cached_tokens,
        )

    def _ask(self, client: httpx.Client, body: dict[str, Any]) -> Reply:
        url = self._model.url
        try:
            response = client.post(url, json=body)
        except httpx.ReadTimeout as error:
            self._reached = True
            raise _RefusedError(f"no reply within {self._policy.timeout:g} s", again=True) from error
        except httpx.RemoteProtocolError as error:
            self._reached = True
            raise _RefusedError(f"{url} stops before the end of its reply: {error}", again=True) from error
        except httpx.DecodingError as error:
            self._reached = True
            raise _RefusedError(f"{url} sends a damaged reply: {error}", again=True) from error
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise _RefusedError(f"no connection to {url}: {reason}", again=True) from error
        self._reached = True
        status = response.status_code
        if status in (401, 403, 404):
            raise ConfigError(
                f"{url} refuses every question with status {status}: {self._excerpt(response)}. Check "
                f"the key in {KEY_VARIABLE}, the model name {self.name!r}, and the address, which usually "
                "ends in /v1"
            )
        if status != 200:
            again = status in (408, 409, 425, 429) or status >= 500
            message = f"status {status}: {self._excerpt(response)}"
            raise _RefusedError(message, again, _retry_after(response), too_many=status == 429)
        try:
            return read_reply(response)
        except UnreadableReplyError as error:
            raise _RefusedError(f"{error}: {self._excerpt(response)}", again=True) from error

    def _excerpt(self, response: httpx.Response) -> str:
        """The beginning of a reply on one line, without the key, which some servers repeat."""
        text = json.dumps(response.text[:1000], ensure_ascii=False)[1:-1]
        if self._key:
            text = text.replace(self._key, "***")
        return text[:200] or "nothing"


class _TruncatedAnswer(Answer):
    """The answer to a prompt that the server has cut."""


class _RefusedError(Exception):
    """A request without an answer.

    Attributes:
      again: whether to retry the request.
      retry_after: seconds to wait, as requested by the server, or None.
      too_many: whether the server has too many requests.
    """

    def __init__(
        self, message: str, again: bool, retry_after: float | None = None, *, too_many: bool = False
    ):
        super().__init__(message)
        self.again = again
        self.retry_after = retry_after
        self.too_many = too_many


def _unfinished(reply: Reply, completions: bool) -> str | None:
    """Why the answer stops before its end. A model that completes bare prompts never comes to one."""
    if completions or not reply.cut_off:
        return None
    if reply.reasoned and not reply.text.strip():
        return "all tokens of the answer went into reasoning"
    return "the answer was cut off at the limit of tokens"


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
