"""The HTTP server: routes, cancellation, streams and error replies of OpenAI's protocol."""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from agentic_ring.data.text.chat import Turn
from agentic_ring.errors import AgenticRingError, DataError
from agentic_ring.inference.sampling import Sampling
from agentic_ring.serve.generation import GeneratedText, TextGenerator
from agentic_ring.serve.http_limits import BODY_SECONDS, BodyLimits
from agentic_ring.serve.jobs import GenerationJob, GenerationRequest
from agentic_ring.serve.json_body import read_body
from agentic_ring.serve.metrics import CountRequests, Metrics
from agentic_ring.serve.openai_replies import (
    INTERNAL_ERROR,
    Kind,
    error_body,
    event,
    reply_body,
    stream_event,
)
from agentic_ring.serve.openai_requests import DEFAULT_CHAT_TOKENS, ChatRequest, CompletionRequest
from agentic_ring.serve.prompt_process import PromptProcess
from agentic_ring.serve.prompts import ContextLengthError
from agentic_ring.serve.request_queue import AbandonedError, BusyError, RequestQueue

ROUTES = ("/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")

DISCONNECT_CHECK_SECONDS = 0.5
"""Interval at which a waiting request checks whether its client is still connected."""


def make_app(
    name: str,
    generator: TextGenerator,
    prompts: PromptProcess,
    queue_size: int,
    max_body_bytes: int,
    body_seconds: float = BODY_SECONDS,
) -> FastAPI:
    """Returns the server of one model.

    Args:
      name: name by which requests select the model.
      prompts: encodes prompts; without a template, chat requests are refused.
      queue_size: requests that may wait while others are processed.
      max_body_bytes: largest request body.
      body_seconds: longest time that a body may take.
    """
    app = FastAPI(title="agentic_ring", openapi_url=None)
    queue = RequestQueue(queue_size, lambda *batch: metrics.batches.observe(generator.answer(*batch)))
    metrics = Metrics(queue, generator.prefixes)
    routes = _Routes(name, generator, prompts, queue, metrics)
    app.get("/health")(routes.health)
    app.get("/metrics")(routes.metrics_text)
    app.get("/v1/models")(routes.models)
    app.post("/v1/completions")(routes.completions)
    app.post("/v1/chat/completions")(routes.chats)
    app.add_middleware(BodyLimits, max_bytes=max_body_bytes, max_seconds=body_seconds)
    app.add_middleware(CountRequests, metrics=metrics, routes=ROUTES)
    _register_error_handlers(app)
    return app


@dataclass(frozen=True)
class _Routes:
    """The routes of one model; fields as in ``make_app``."""

    name: str
    generator: TextGenerator
    prompts: PromptProcess
    queue: RequestQueue[GenerationRequest, list[GeneratedText]]
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))

    async def health(self) -> dict[str, Any]:
        """GET /health."""
        return {"status": "ok", "model": self.name, "waiting": self.queue.waiting}

    async def metrics_text(self) -> Response:
        """GET /metrics."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> dict[str, Any]:
        """GET /v1/models."""
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "agentic_ring"}
        return {"object": "list", "data": [model]}

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await read_body(request, CompletionRequest)
        self._check_model(body.model)
        texts, tokens = body.texts, body.token_prompts
        self.prompts.limits.check_texts(texts)
        for prompt in tokens:
            self.prompts.limits.check_tokens(prompt)

        def make_job(check_connected: Callable[[], None]) -> GenerationJob:
            prompts = self.prompts.texts(texts, check_connected) if texts else []
            return GenerationJob(
                prompts or [self.generator.token_prompt(prompt) for prompt in tokens],
                body.max_tokens,
                _sampling(body),
                body.stop,
                echo=body.echo,
                scored=body.logprobs is not None,
            )

        return await self._reply(request, "text_completion", body, make_job, with_top=body.logprobs == 1)

    async def chats(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await read_body(request, ChatRequest)
        self._check_model(body.model)
        if not self.prompts.has_template:
            raise DataError("the model's folder has no chat template; start the server with --template")
        turns = [Turn(message.role, message.text) for message in body.messages]
        self.prompts.limits.check_chat(turns)

        def make_job(check_connected: Callable[[], None]) -> GenerationJob:
            prompt = self.prompts.chat(turns, check_connected)
            new_tokens = body.new_tokens or max(1, min(DEFAULT_CHAT_TOKENS, self.generator.room(prompt)))
            return GenerationJob([prompt], new_tokens, _sampling(body), body.stop, continues=False)

        return await self._reply(request, "chat.completion", body, make_job)

    def _check_model(self, requested: str) -> None:
        if requested != self.name:
            raise HTTPException(404, f"the model {requested!r} is not served here, but {self.name!r} is")

    async def _reply(
        self,
        request: Request,
        kind: Kind,
        body: CompletionRequest | ChatRequest,
        make_job: Callable[[Callable[[], None]], GenerationJob],
        with_top: bool = False,
    ) -> Response:
        """Queues the job and waits for its answers, or streams them; a disconnect cancels the job.

        ``make_job`` encodes the prompts, in the queue; it takes a function that raises once the client left.
        """
        abandoned = threading.Event()
        parts: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        encoded: asyncio.Future[GenerationJob] = loop.create_future()

        def check_connected() -> None:
            if abandoned.is_set():
                raise AbandonedError

        def on_text(text: str) -> None:
            if text and body.stream:
                loop.call_soon_threadsafe(parts.put_nowait, text)

        def prepare() -> GenerationRequest:
            check_connected()
            job = make_job(check_connected)
            self.generator.check(job)
            loop.call_soon_threadsafe(encoded.set_result, job)
            return GenerationRequest(job, on_text, abandoned.is_set)

        def count(task: asyncio.Task[list[GeneratedText]]) -> None:
            if not (abandoned.is_set() or task.cancelled() or task.exception()):
                self.metrics.prompt_tokens.inc(sum(len(prompt.tokens) for prompt in encoded.result().prompts))
                self.metrics.generated_tokens.inc(sum(answer.tokens for answer in task.result()))

        task = self.queue.submit(prepare)
        task.add_done_callback(count)

        def leave() -> None:
            abandoned.set()
            self.queue.cancel(task)

        head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.name}
        try:
            # Errors of the prompt are replies with a status of their own, also to requests for a stream.
            await _until_any({task, encoded} if body.stream else {task}, request)
        except BaseException:
            leave()
            raise
        if body.stream and not (task.done() and task.exception()):
            return StreamingResponse(_events(task, parts, kind, head, leave), media_type="text/event-stream")
        answers = task.result()
        return JSONResponse(reply_body(kind, head, encoded.result(), answers, with_top))


async def _until_any(futures: Iterable[asyncio.Future], request: Request) -> None:
    """Waits until one is done.

    Raises:
      AbandonedError: the client has disconnected.
    """
    done: set[asyncio.Future] = set()
    while not done:
        done, _ = await asyncio.wait(
            futures, timeout=DISCONNECT_CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if await request.is_disconnected():
            raise AbandonedError


async def _events(
    task: asyncio.Task[list[GeneratedText]],
    parts: asyncio.Queue[str],
    kind: Kind,
    head: dict[str, Any],
    leave: Callable[[], None],
) -> AsyncIterator[str]:
    """Server-sent events: parts of the answer, the finish reason, and ``[DONE]``; then calls ``leave``."""
    # An empty part wakes the reader at the end.
    task.add_done_callback(lambda task: parts.put_nowait(""))
    try:
        while text := await parts.get():
            yield stream_event(kind, head, text)
        (answer,) = await task
        yield stream_event(kind, head, "", answer.ended)
    except AgenticRingError as error:
        yield event(error_body(str(error)))
    except Exception:
        logging.getLogger(__name__).exception("a stream failed")
        yield event(error_body(INTERNAL_ERROR, 500))
    finally:
        leave()
    yield "data: [DONE]\n\n"


def _sampling(body: CompletionRequest | ChatRequest) -> Sampling:
    seed = secrets.randbits(32) if body.seed is None else body.seed
    return Sampling(body.temperature, body.top_p, seed)


def _error(
    status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(error_body(message, status, code), status, headers)


def _register_error_handlers(app: FastAPI) -> None:
    """Makes every error a reply in OpenAI's format, without a traceback."""

    def handle(kind: type[Exception], reply: Callable[[Any], Response]) -> None:
        async def handler(request: Request, error: Exception) -> Response:
            return reply(error)

        app.add_exception_handler(kind, handler)

    handle(ValidationError, lambda error: _error(400, _validation_message(error)))
    handle(HTTPException, lambda error: _error(error.status_code, str(error.detail), headers=error.headers))
    handle(AgenticRingError, lambda error: _error(400, str(error)))
    handle(ContextLengthError, lambda error: _error(400, str(error), "context_length_exceeded"))
    handle(
        BusyError,
        lambda error: _error(429, str(error), "busy", {"Retry-After": str(error.retry_after)}),
    )
    for left in (AbandonedError, ClientDisconnect):
        handle(left, lambda error: Response(status_code=499))
    handle(Exception, lambda error: _error(500, INTERNAL_ERROR))


def _validation_message(error: ValidationError) -> str:
    """Field and message of the first few invalid fields."""
    faults = []
    for fault in error.errors()[:4]:
        where = ".".join(map(str, fault["loc"]))
        faults.append(f"{where}: {fault['msg']}" if where else fault["msg"])
    return "; ".join(faults)
