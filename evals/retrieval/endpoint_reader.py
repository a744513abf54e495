"""A model behind an OpenAI-compatible server as a reader."""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import openai
from tokenizers import Tokenizer

from agentic_ring.errors import ConfigError, DataError
from evals.retrieval.answers import Answer

KEY_VARIABLE = "OPENAI_API_KEY"
CHAT_TEMPLATE_TOKENS = 64
"""Tokens reserved for the server's chat template; Vicuna's has about 40."""
LEAST_SHARE, LEAST_SHARE_COUNTED = 0.5, 0.95
"""Share of our count of a prompt's tokens that a server must report, where the count is an estimate, and
where the model's tokenizer has counted them."""
LETTERS_PER_TOKEN = 3.5
CONNECT_SECONDS = 30.0
"""Seconds until a server that does not even take a connection counts as silent."""
FAILURES = "abort", "content_filter", "error"
"""Reasons to end an answer that is not the model's own, or not whole."""


@dataclass
class EndpointReader:
    """Sends each question to a server with the whole document.

    The first question about a document goes alone: when it is answered, a server that caches prefixes has
    read the document, and the others go several at a time. A reply that reports far fewer prompt tokens than
    were sent is an error: servers may cut long prompts without saying so. The API key comes from the
    environment variable OPENAI_API_KEY, if it is set, and is never shown.

    Attributes:
      address: base address, such as http://127.0.0.1:8000/v1.
      name: the server's name of the model.
      count_text: counts the tokens of a text; see ``token_counter``.
      exact: whether that is the model's own count, of which a server must report nearly all, or an estimate.
      completions: send bare prompts to ``/completions``, for models without a chat template, instead of
        user messages to ``/chat/completions``.
      fields: more fields of each request; None takes a field of ours away.
      timeout: seconds before a request counts as lost; reading 512K tokens takes minutes.
      concurrency: maximum number of requests at a time.
      requests_per_minute: maximum rate, retries included; None for no limit.
      retries: retries of the ``openai`` client, which waits up to 8 s before each, or as long as the
        server asks for, up to a minute.
    """

    address: str
    name: str
    count_text: Callable[[str], int]
    exact: bool = False
    completions: bool = False
    fields: Mapping[str, Any] | None = None
    timeout: float = 600.0
    concurrency: int = 8
    requests_per_minute: float | None = None
    retries: int = 8
    trained_on_task: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if "@" in self.address:
            raise ConfigError(
                f"the endpoint contains a user name or password; put the key in {KEY_VARIABLE} instead"
            )
        try:
            url = urlsplit(self.address)
            valid = url.scheme in ("http", "https") and url.hostname and url.port != 0
        except ValueError:  # such as a port that is no number
            valid = False
        if not valid:
            raise ConfigError(
                f"the endpoint {self.address!r} is not an address such as http://127.0.0.1:8000/v1"
            )
        for name in {"model", "messages", "prompt", "stream"} & {*(self.fields or {})}:
            raise ConfigError(f"the field {name!r} of a request is this program's; leave it out")
        for name in ("timeout", "concurrency", "requests_per_minute"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise ConfigError(f"{name} is {number}; it must be positive")
        self._key = os.environ.get(KEY_VARIABLE, "").strip()
        if not re.fullmatch("[!-~]*", self._key):  # errors of the HTTP library would repeat it
            raise ConfigError(f"{KEY_VARIABLE} has characters that no key has; set it anew")
        self._url = self.address.rstrip("/") + ("/completions" if self.completions else "/chat/completions")
        self._template_tokens = 0 if self.completions else CHAT_TEMPLATE_TOKENS
        self._reached = False
        self._lock, self._next_start = threading.Lock(), time.monotonic()

    def count_tokens(self, document: str, question: str) -> int:
        """Tokens of the text, plus ``CHAT_TEMPLATE_TOKENS`` for a chat message."""
        return self.count_text(document + question) + self._template_tokens

    def answers(
        self, document: str, questions: Sequence[str], max_new_tokens: int
    ) -> Iterator[tuple[int, Answer]]:
        """Answers with the numbers of their questions, each as soon as it is complete.

        Lost requests and refusals (429, 5xx) are retried; after the last attempt, and after a reply without
        an answer, the answer has an error. If the first prompt is truncated, the others are not sent. It is a
        ``ConfigError`` if the server refuses the key, address or model, or never replied at all.
        """
        document_tokens = self.count_text(document)
        client = openai.OpenAI(
            api_key=self._key or "none",
            base_url=self.address,
            timeout=openai.Timeout(self.timeout, connect=CONNECT_SECONDS),
            max_retries=self.retries,
            http_client=openai.DefaultHttpxClient(event_hooks={"request": [self._wait_for_rate]}),
        )
        # Once the client is closed, requests in flight are not tried again for long.
        with client:

            def answer(number: int) -> Answer:
                tokens = document_tokens + self.count_text(questions[number])
                return self._answer(client, document + questions[number], tokens, max_new_tokens)

            first = answer(0)
            yield 0, first
            if isinstance(first, _TruncatedAnswer):
                yield from ((number, first) for number in range(1, len(questions)))
                return
            pool = ThreadPoolExecutor(self.concurrency)
            try:
                numbers = {pool.submit(answer, number): number for number in range(1, len(questions))}
                for future in as_completed(numbers):
                    yield numbers[future], future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _wait_for_rate(self, request: Any) -> None:
        """Waits until the next request may start."""
        if self.requests_per_minute is None:
            return
        with self._lock:
            start = max(time.monotonic(), self._next_start)
            self._next_start = start + 60 / self.requests_per_minute
        time.sleep(max(0.0, start - time.monotonic()))

    def _answer(self, client: openai.OpenAI, prompt: str, tokens: int, max_new_tokens: int) -> Answer:
        """The answer to a prompt of so many tokens, by our own count and without the template."""
        ask: Callable[..., Any] = partial(
            client.chat.completions.with_raw_response.create, messages=[{"role": "user", "content": prompt}]
        )
        if self.completions:
            ask = partial(client.completions.with_raw_response.create, prompt=prompt)
        fields = {"max_tokens": max_new_tokens, "temperature": 0, **(self.fields or {})}
        try:
            reply = ask(
                model=self.name,
                extra_body={name: value for name, value in fields.items() if value is not None},
                extra_headers=None if self._key else {"Authorization": openai.omit},
            )
            self._reached = True
            return self._read(reply.text, reply.elapsed.total_seconds(), tokens)
        except openai.APIStatusError as error:
            self._reached = True
            problem = f"status {error.status_code}: {self._excerpt(error.response.text)}"
            if error.status_code in (401, 403, 404):
                raise ConfigError(
                    f"{self._url} refuses every question with {problem}. Check the key in {KEY_VARIABLE}, "
                    f"the model name {self.name!r}, and the address, which mostly ends in /v1"
                ) from error
        except openai.APIConnectionError as error:
            within = f" within {self.timeout:g} s" if isinstance(error, openai.APITimeoutError) else ""
            problem = f"no reply from {self._url}{within}: {error.__cause__ or error}"
            if not self._reached:
                raise ConfigError(f"{problem}. Is the server running, and is this its address?") from error
        return Answer("", tokens + self._template_tokens, 0.0, problem)

    def _read(self, reply: str, seconds: float, tokens: int) -> Answer:
        """The answer in a reply; one with an error if it has none, or the server has cut the prompt."""
        counted = tokens + self._template_tokens
        failed = partial(Answer, "", counted, seconds)
        try:
            content = json.loads(reply)
            # Servers may send several answers unasked.
            (choice,) = [each for each in content["choices"] if each.get("index", 0) == 0]
            message = choice.get("message") or choice
            text = message["content"] if "content" in message else message["text"]
            usage, ended = content.get("usage") or {}, choice.get("finish_reason")
            read, answered = _tokens(usage, "prompt_tokens"), _tokens(usage, "completion_tokens")
            cached = _tokens(usage, "prompt_tokens_details", "cached_tokens")
            thought = _tokens(usage, "completion_tokens_details", "reasoning_tokens")
            reasoned = message.get("reasoning_content") or message.get("reasoning") or thought
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return failed(f"a reply without an answer: {self._excerpt(reply)}")
        cut_off = ended == "length"
        text = "" if text is None and cut_off else text
        if ended in FAILURES or not isinstance(text, str):
            return failed(f"an answer that ended with {ended!r}: {self._excerpt(reply)}")
        if read and cached is not None and cached > read:
            return failed(f"a reply with {cached} cached tokens of {read} tokens of the prompt")
        if read and read < tokens * (LEAST_SHARE_COUNTED if self.exact else LEAST_SHARE):
            problem = (
                f"the server has read {read:,} tokens of a prompt of about {tokens:,}: it truncates "
                "prompts. Raise its context length (Ollama: num_ctx), or ask for a shorter --ctx"
            )
            return _TruncatedAnswer("", read, seconds, problem)
        unfinished = None
        # A model that completes bare prompts never comes to an end.
        if cut_off and not self.completions:
            unfinished = "the answer was cut off at the limit of tokens"
            if reasoned and not text.strip():
                unfinished = "all tokens of the answer went into reasoning"
        # Some servers report 0 prompt tokens for what they do not know.
        return Answer(text, read or counted, seconds, None, unfinished, answered, cached)

    def _excerpt(self, reply: str) -> str:
        """The beginning of a reply on one line, without the key, which some servers repeat."""
        text = json.dumps(reply[:1000], ensure_ascii=False)[1:-1]
        if self._key:
            text = text.replace(self._key, "***")
        return text[:200] or "nothing"


class _TruncatedAnswer(Answer):
    """The answer to a prompt that the server has cut."""


def _tokens(usage: Any, *path: str) -> int | None:
    """A count of tokens in the server's report; None where it is missing or no count."""
    for name in path:
        usage = usage.get(name) if isinstance(usage, dict) else None
    return usage if isinstance(usage, int) and not isinstance(usage, bool) and usage >= 0 else None


def token_counter(tokenizer: Path | None) -> Callable[[str], int]:
    """A function that counts the tokens of a text, including BOS if the tokenizer adds it.

    ``tokenizer`` is a ``tokenizer.json``, or its folder; None gives ``estimated_tokens``. A file that is
    absent or no tokenizer is a ``DataError``.
    """
    if tokenizer is None:
        return estimated_tokens
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise DataError(
            f"{path} cannot be read as a tokenizer: {error}; give the folder of a model that has one"
        ) from error
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
