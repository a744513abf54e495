"""The routes of the server, its streams, error replies and metrics."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator
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
from starlette.types import Message, Receive, Scope, Send

from agentic_ring.data.text.chat import Turn
from agentic_ring.errors import AgenticRingError
from agentic_ring.inference.prefix_cache import PrefixCache
from agentic_ring.serve import openai_protocol as protocol
from agentic_ring.serve.generation import (
    AbandonedError,
    CheckConnected,
    GeneratedText,
    GenerationRequest,
    TextGenerator,
)
from agentic_ring.serve.load_limits import BusyError, RequestQueue
from agentic_ring.serve.prompts import ContextLengthError, Prompt, PromptProcess

LEFT = 499
"""Status that the metrics count for a client that has disconnected."""
_EXPECTED = (ValidationError, HTTPException, AgenticRingError, BusyError, AbandonedError, ClientDisconnect)
_SECONDS = (0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class ModelServer:
    """The server of one model, which requests select by its name; an ASGI application.

    Without a template for ``prompts`` chats are refused; ``queue_size`` requests may wait for others.
    """

    def __init__(
        self,
        name: str,
        generator: TextGenerator,
        prompts: PromptProcess,
        queue_size: int,
        max_body_bytes: int,
    ):
        self._name, self._generator, self._prompts = name, generator, prompts
        self._max_body_bytes, self._created = max_body_bytes, int(time.time())
        self._queue = RequestQueue(generator, queue_size, lambda count: self._metrics.batches.observe(count))
        self._metrics = Metrics(self._queue, generator.prefixes)
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics_text),
            Route("/v1/models", self._models),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chats, methods=["POST"]),
        ]
        self._paths = {route.path for route in routes}
        handlers: dict[Any, Any] = dict.fromkeys((*_EXPECTED, Exception), _error_reply)
        self._app = Starlette(routes=routes, exception_handlers=handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request and counts it under its path, or under "other"."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, started = LEFT, time.monotonic()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, status).inc()
            self._metrics.seconds.labels(path).observe(time.monotonic() - started)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._name, "waiting": self._queue.waiting})

    async def _metrics_text(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> Response:
        model = {"id": self._name, "object": "model", "created": self._created, "owned_by": "agentic_ring"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _completions(self, request: Request) -> Response:
        body = await self._read(request, protocol.CompletionRequest)
        self._prompts.check(body.prompts)
        texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        tokens = [prompt for prompt in body.prompts if not isinstance(prompt, str)]

        def encode(check_connected: CheckConnected) -> list[Prompt]:
            encoded = self._prompts.encode(texts, check_connected) if texts else []
            return encoded or [self._generator.token_prompt(prompt) for prompt in tokens]

        scored = body.logprobs is not None
        how = body.sampling, body.stop, body.stop_token_ids
        asked = GenerationRequest(encode, body.max_tokens, *how, body.echo, scored)
        return await self._reply(request, body, asked, with_top=body.logprobs == 1)

    async def _chats(self, request: Request) -> Response:
        body = await self._read(request, protocol.ChatRequest)
        turns = [Turn(message.role, message.text) for message in body.messages]
        self._prompts.check([turns])
        longest = body.new_tokens or protocol.DEFAULT_CHAT_TOKENS

        def encode(check_connected: CheckConnected) -> list[Prompt]:
            (prompt,) = self._prompts.encode([turns], check_connected, body.chat_template_kwargs)
            if body.new_tokens is None:
                asked.max_new_tokens = max(1, min(longest, self._generator.room(prompt)))
            return [prompt]

        how = body.sampling, body.stop, body.stop_token_ids
        asked = GenerationRequest(encode, longest, *how, continues=False)
        return await self._reply(request, body, asked)

    async def _read(self, request: Request, kind: type[protocol.Body]) -> protocol.Body:
        body = await protocol.read_body(request, kind, self._max_body_bytes)
        if body.model != self._name:
            raise HTTPException(404, f"the model {body.model!r} is not served here, but {self._name!r} is")
        return body

    async def _reply(
        self,
        request: Request,
        body: protocol.CompletionRequest | protocol.ChatRequest,
        asked: GenerationRequest,
        with_top: bool = False,
    ) -> Response:
        """Queues a request and waits for its answers, or streams them; a disconnect cancels it."""
        parts: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_text(text: str) -> None:
            if text and body.stream:
                loop.call_soon_threadsafe(parts.put_nowait, text)

        asked.on_text = on_text
        asked.answers.add_done_callback(lambda _: self._count(asked))
        self._queue.submit(asked)
        answers, prompts = asyncio.wrap_future(asked.answers), asyncio.wrap_future(asked.prompts)
        # Its error counts as retrieved, since the client may have left.
        answers.add_done_callback(lambda answers: answers.cancelled() or answers.exception())
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._name}
        left = asyncio.ensure_future(_disconnect(request))
        try:
            # Errors of the prompt are replies with a status of their own, also to requests for a stream.
            awaited = {left, answers, prompts} if body.stream else {left, answers}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                raise AbandonedError
        except BaseException:
            asked.leave()
            raise
        finally:
            left.cancel()
        if body.stream and not (answers.done() and answers.exception()):
            events = _events(asked, answers, parts, body, head)
            return StreamingResponse(events, media_type="text/event-stream")
        texts = answers.result()  # or its error, after which there may be no encoded prompts
        return JSONResponse(protocol.reply_body(body.kind, head, asked.prompts.result(), texts, with_top))

    def _count(self, asked: GenerationRequest) -> None:
        if not (asked.has_left or asked.answers.exception()):
            self._metrics.prompt_tokens.inc(sum(len(prompt.tokens) for prompt in asked.prompts.result()))
            self._metrics.generated_tokens.inc(sum(answer.tokens for answer in asked.answers.result()))


async def _disconnect(request: Request) -> None:
    """Waits until the client has disconnected; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    asked: GenerationRequest,
    answers: asyncio.Future[list[GeneratedText]],
    parts: asyncio.Queue[str],
    body: protocol.CompletionRequest | protocol.ChatRequest,
    head: dict[str, Any],
) -> AsyncIterator[str]:
    """Server-sent events: parts of the answer, the finish reason, the usage if asked for, and ``[DONE]``.

    Then the client leaves.
    """
    kind, with_usage = body.kind, body.stream_options.include_usage
    part = head | {"usage": None} if with_usage else head
    # An empty part wakes the reader at the end.
    answers.add_done_callback(lambda _: parts.put_nowait(""))
    try:
        if kind == protocol.ChatRequest.kind:
            yield protocol.stream_event(kind, part, None)
        while text := await parts.get():
            yield protocol.stream_event(kind, part, text)
        (answer,) = await answers
        yield protocol.stream_event(kind, part, "", answer.ended)
        if with_usage:
            yield protocol.usage_event(kind, head, protocol.usage(asked.prompts.result(), [answer]))
    except AgenticRingError as error:
        yield protocol.event(protocol.error_body(str(error)))
    except Exception:
        logging.getLogger(__name__).exception("a stream failed")
        yield protocol.event(protocol.error_body(protocol.INTERNAL_ERROR, 500))
    finally:
        asked.leave()
    yield "data: [DONE]\n\n"


async def _error_reply(request: Request, error: Any) -> Response:
    """Every error is a reply in OpenAI's format, without a traceback."""
    status, message, code, headers = 400, str(error), None, None
    match error:
        case AbandonedError() | ClientDisconnect():
            return Response(status_code=LEFT)
        case ValidationError():
            faults = error.errors(include_url=False, include_input=False)[:4]  # the first few invalid fields
            unknown = {"extra_forbidden": "is not supported; leave it out"}
            named = ((".".join(map(str, f["loc"])), unknown.get(f["type"], f["msg"])) for f in faults)
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
