"""The routes of the server, its streams, error replies and metrics."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentic_ring.data.text.chat import Turn
from agentic_ring.errors import AgenticRingError, DataError
from agentic_ring.inference.prefix_cache import PrefixCache
from agentic_ring.inference.sampling import Sampling
from agentic_ring.serve import openai_protocol as protocol
from agentic_ring.serve.generation import (
    AbandonedError,
    CheckConnected,
    GeneratedText,
    GenerationJob,
    GenerationRequest,
    TextGenerator,
)
from agentic_ring.serve.load_limits import BusyError, RequestQueue
from agentic_ring.serve.prompts import ContextLengthError, PromptProcess

DISCONNECT_CHECK_SECONDS = 0.5
"""Interval at which a waiting request checks whether its client is still connected."""
LEFT = 499
"""Status that the metrics count for a client that has disconnected."""
_SECONDS = (0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


def make_app(
    name: str, generator: TextGenerator, prompts: PromptProcess, queue_size: int, max_body_bytes: int
) -> Starlette:
    """Returns the server of one model, which requests select by its name.

    Without a template for ``prompts`` chats are refused; ``queue_size`` requests may wait for others.
    """
    queue = RequestQueue(generator, queue_size, lambda count: metrics.batches.observe(count))
    metrics = Metrics(queue, generator.prefixes)
    model = _Model(name, generator, prompts, queue, metrics, max_body_bytes)
    routes = [
        Route("/health", model.health),
        Route("/metrics", model.metrics_text),
        Route("/v1/models", model.models),
        Route("/v1/completions", model.completions, methods=["POST"]),
        Route("/v1/chat/completions", model.chats, methods=["POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers=_ERROR_HANDLERS)
    app.add_middleware(CountRequests, metrics=metrics, paths=frozenset(route.path for route in routes))
    return app


@dataclass(frozen=True)
class _Model:
    """The replies of one model; fields as in ``make_app``."""

    name: str
    generator: TextGenerator
    prompts: PromptProcess
    queue: RequestQueue
    metrics: "Metrics"
    max_body_bytes: int
    created: int = field(default_factory=lambda: int(time.time()))

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self.name, "waiting": self.queue.waiting})

    async def metrics_text(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "agentic_ring"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        body = await protocol.read_body(request, protocol.CompletionRequest, self.max_body_bytes)
        self._check_model(body.model)
        self.prompts.check(body.prompts)

        def make_job(check_connected: CheckConnected) -> GenerationJob:
            texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
            tokens = [prompt for prompt in body.prompts if not isinstance(prompt, str)]
            encoded = self.prompts.encode(texts, check_connected) if texts else []
            return GenerationJob(
                encoded or [self.generator.token_prompt(prompt) for prompt in tokens],
                body.max_tokens,
                _sampling(body),
                body.stop,
                echo=body.echo,
                scored=body.logprobs is not None,
            )

        return await self._reply(request, "text_completion", body, make_job, with_top=body.logprobs == 1)

    async def chats(self, request: Request) -> Response:
        body = await protocol.read_body(request, protocol.ChatRequest, self.max_body_bytes)
        self._check_model(body.model)
        if not self.prompts.has_template:
            raise DataError("the model's folder has no chat template; start the server with --template")
        turns = [Turn(message.role, message.text) for message in body.messages]
        self.prompts.check([turns])

        def make_job(check_connected: CheckConnected) -> GenerationJob:
            (prompt,) = self.prompts.encode([turns], check_connected)
            new_tokens = body.new_tokens or max(
                1, min(protocol.DEFAULT_CHAT_TOKENS, self.generator.room(prompt))
            )
            return GenerationJob([prompt], new_tokens, _sampling(body), body.stop, continues=False)

        return await self._reply(request, "chat.completion", body, make_job)

    def _check_model(self, requested: str) -> None:
        if requested != self.name:
            raise HTTPException(404, f"the model {requested!r} is not served here, but {self.name!r} is")

    async def _reply(
        self,
        request: Request,
        kind: protocol.Kind,
        body: protocol.CompletionRequest | protocol.ChatRequest,
        make_job: Callable[[CheckConnected], GenerationJob],
        with_top: bool = False,
    ) -> Response:
        """Queues the job and waits for its answers, or streams them; a disconnect cancels the job."""
        parts: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_text(text: str) -> None:
            if text and body.stream:
                loop.call_soon_threadsafe(parts.put_nowait, text)

        asked = GenerationRequest(make_job, on_text)
        asked.answers.add_done_callback(lambda _: self._count(asked))
        self.queue.submit(asked)
        answers, job = asyncio.wrap_future(asked.answers), asyncio.wrap_future(asked.job)
        # Its error counts as retrieved, since the client may have left.
        answers.add_done_callback(lambda answers: answers.cancelled() or answers.exception())
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.name}
        try:
            # Errors of the prompt are replies with a status of their own, also to requests for a stream.
            await _until_any({answers, job} if body.stream else {answers}, request)
        except BaseException:
            asked.leave()
            raise
        if body.stream and not (answers.done() and answers.exception()):
            events = _events(asked, answers, parts, kind, head)
            return StreamingResponse(events, media_type="text/event-stream")
        texts = answers.result()  # or its error, after which there may be no job
        return JSONResponse(protocol.reply_body(kind, head, asked.job.result(), texts, with_top))

    def _count(self, asked: GenerationRequest) -> None:
        if not (asked.has_left or asked.answers.exception()):
            prompts = asked.job.result().prompts
            self.metrics.prompt_tokens.inc(sum(len(prompt.tokens) for prompt in prompts))
            self.metrics.generated_tokens.inc(sum(answer.tokens for answer in asked.answers.result()))


async def _until_any(futures: Iterable[asyncio.Future], request: Request) -> None:
    """Waits until one is done, or raises an AbandonedError once the client has disconnected."""
    done: set[asyncio.Future] = set()
    while not done:
        done, _ = await asyncio.wait(
            futures, timeout=DISCONNECT_CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if await request.is_disconnected():
            raise AbandonedError


async def _events(
    asked: GenerationRequest,
    answers: asyncio.Future[list[GeneratedText]],
    parts: asyncio.Queue[str],
    kind: protocol.Kind,
    head: dict[str, Any],
) -> AsyncIterator[str]:
    """Server-sent events: parts of the answer, the finish reason, and ``[DONE]``; then the client leaves."""
    # An empty part wakes the reader at the end.
    answers.add_done_callback(lambda _: parts.put_nowait(""))
    try:
        while text := await parts.get():
            yield protocol.stream_event(kind, head, text)
        (answer,) = await answers
        yield protocol.stream_event(kind, head, "", answer.ended)
    except AgenticRingError as error:
        yield protocol.event(protocol.error_body(str(error)))
    except Exception:
        logging.getLogger(__name__).exception("a stream failed")
        yield protocol.event(protocol.error_body(protocol.INTERNAL_ERROR, 500))
    finally:
        asked.leave()
    yield "data: [DONE]\n\n"


def _sampling(body: protocol.CompletionRequest | protocol.ChatRequest) -> Sampling:
    seed = secrets.randbits(32) if body.seed is None else body.seed
    return Sampling(body.temperature, body.top_p, seed)


async def _error_reply(request: Request, error: Any) -> Response:
    """Every error is a reply in OpenAI's format, without a traceback."""
    status, message, code, headers = 400, str(error), None, None
    match error:
        case AbandonedError() | ClientDisconnect():
            return Response(status_code=LEFT)
        case ValidationError():
            faults = error.errors(include_url=False, include_input=False)[:4]  # the first few invalid fields
            named = ((".".join(map(str, fault["loc"])), fault["msg"]) for fault in faults)
            message = "; ".join(f"{where}: {what}" if where else what for where, what in named)
        case HTTPException():
            status, message, headers = error.status_code, str(error.detail), error.headers
        case ContextLengthError():
            code = "context_length_exceeded"
        case BusyError():
            status, code, headers = 429, "busy", {"Retry-After": str(error.retry_after)}
        case AgenticRingError():
            pass
        case _:
            status, message = 500, protocol.INTERNAL_ERROR
    return JSONResponse(protocol.error_body(message, status, code), status, headers)


_EXPECTED = (ValidationError, HTTPException, AgenticRingError, BusyError, AbandonedError, ClientDisconnect)
_ERROR_HANDLERS: dict[Any, Any] = dict.fromkeys((*_EXPECTED, Exception), _error_reply)


class Metrics(Collector):
    """Counts of requests, tokens and seconds, and the state of queue and prefix cache, in one registry."""

    def __init__(self, queue: RequestQueue, prefixes: PrefixCache):
        self._queue, self._prefixes = queue, prefixes
        self.registry = CollectorRegistry()
        self.registry.register(self)
        count = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = count("agentic_ring_requests", "Requests", ("route", "status"))
        self.prompt_tokens = count("agentic_ring_prompt_tokens", "Tokens of answered prompts")
        self.generated_tokens = count("agentic_ring_generated_tokens", "Tokens of complete answers")
        seconds = "Seconds from a request's head to the end of its answer"
        self.seconds = histogram("agentic_ring_request_seconds", seconds, ("route",), buckets=_SECONDS)
        batches = "Requests answered together"
        self.batches = histogram("agentic_ring_batch_requests", batches, buckets=(1, 2, 4, 8, 16, 32))

    def collect(self) -> Iterator[Metric]:
        """The metrics that are read when they are asked for."""
        queue, prefixes = self._queue, self._prefixes
        yield GaugeMetricFamily("agentic_ring_queue_length", "Requests that wait", queue.waiting)
        yield GaugeMetricFamily("agentic_ring_cache_bytes", "Bytes of the prefix cache", prefixes.nbytes)
        yield CounterMetricFamily("agentic_ring_cache_hits", "Prompts that continue it", prefixes.hits)
        yield CounterMetricFamily("agentic_ring_cache_misses", "Prompts that replace it", prefixes.misses)


@dataclass(frozen=True)
class CountRequests:
    """Counts each request under its path, or under "other"."""

    app: ASGIApp
    metrics: Metrics
    paths: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, started = LEFT, time.monotonic()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, counted)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.labels(path, status).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - started)
