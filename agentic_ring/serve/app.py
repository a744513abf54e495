"""The HTTP server: routes, cancellation, streams and error replies of OpenAI's protocol."""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentic_ring.data.text.chat import ChatTemplate, Turn
from agentic_ring.errors import AgenticRingError, DataError
from agentic_ring.inference import Sampling
from agentic_ring.serve.generation import ContextLengthError, GeneratedText, GenerationJob, TextGenerator
from agentic_ring.serve.openai_replies import (
    INTERNAL_ERROR,
    Kind,
    error_body,
    event,
    reply_body,
    stream_event,
)
from agentic_ring.serve.openai_requests import DEFAULT_CHAT_TOKENS, ChatRequest, CompletionRequest
from agentic_ring.serve.request_queue import AbandonedError, BusyError, RequestQueue

DISCONNECT_CHECK_SECONDS = 0.5
"""Interval at which a waiting request checks whether its client is still connected."""


def make_app(
    name: str, generator: TextGenerator, template: ChatTemplate | None, queue_size: int, max_body_bytes: int
) -> FastAPI:
    """Returns the server of one model.

    Args:
      name: name by which requests select the model.
      template: chat template; with None, chat requests are refused.
      queue_size: requests that may wait while one is processed.
      max_body_bytes: largest request body.
    """
    app = FastAPI(title="agentic_ring", openapi_url=None)
    app.add_middleware(_BodyLimit, max_bytes=max_body_bytes)
    routes = _Routes(name, generator, template, RequestQueue(queue_size))
    app.get("/v1/models")(routes.models)
    app.post("/v1/completions")(routes.completions)
    app.post("/v1/chat/completions")(routes.chats)
    _register_error_handlers(app)
    return app


@dataclass(frozen=True)
class _BodyLimit:
    """Refuses a request body once it exceeds ``max_bytes``, with an error in OpenAI's format.

    FastAPI's own limit answers in plain text, which clients of this protocol cannot read.
    """

    app: ASGIApp
    max_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise HTTPException(413, f"the request is larger than {self.max_bytes} bytes")
            return message

        await self.app(scope, limited, send)


@dataclass(frozen=True)
class _Routes:
    """The routes of one model; fields as in ``make_app``."""

    name: str
    generator: TextGenerator
    template: ChatTemplate | None
    queue: RequestQueue
    created: int = field(default_factory=lambda: int(time.time()))

    async def models(self) -> dict[str, Any]:
        """GET /v1/models."""
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "agentic_ring"}
        return {"object": "list", "data": [model]}

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions."""
        self._check_model(body.model)
        # Encoding a prompt of millions of characters must not block other requests.
        prompts = await asyncio.to_thread(lambda: [self.generator.prompt(prompt) for prompt in body.prompts])
        job = GenerationJob(
            prompts,
            body.max_tokens,
            _sampling(body),
            body.stop,
            echo=body.echo,
            scored=body.logprobs is not None,
        )
        return await self._reply(request, "text_completion", body, job, with_top=body.logprobs == 1)

    async def chats(self, body: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions."""
        self._check_model(body.model)
        if self.template is None:
            raise DataError("the model's folder has no chat template; start the server with --template")
        turns = [Turn(message.role, message.text) for message in body.messages]
        prompt = await asyncio.to_thread(self.generator.chat_prompt, self.template, turns)
        new_tokens = body.new_tokens or max(1, min(DEFAULT_CHAT_TOKENS, self.generator.room(prompt)))
        job = GenerationJob([prompt], new_tokens, _sampling(body), body.stop, continues=False)
        return await self._reply(request, "chat.completion", body, job)

    def _check_model(self, requested: str) -> None:
        if requested != self.name:
            raise HTTPException(404, f"the model {requested!r} is not served here, but {self.name!r} is")

    async def _reply(
        self,
        request: Request,
        kind: Kind,
        body: CompletionRequest | ChatRequest,
        job: GenerationJob,
        with_top: bool = False,
    ) -> Response:
        """Queues the job and waits for its answers, or streams them; a disconnect cancels the job."""
        self.generator.check(job)
        abandoned = threading.Event()

        def check_connected() -> None:
            if abandoned.is_set():
                raise AbandonedError

        def leave(task: asyncio.Task) -> None:
            abandoned.set()
            self.queue.cancel(task)

        head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self.name}
        if body.stream:
            parts: asyncio.Queue[str] = asyncio.Queue()
            loop = asyncio.get_running_loop()

            def on_text(text: str) -> None:
                if text:
                    loop.call_soon_threadsafe(parts.put_nowait, text)

            task = self.queue.submit(lambda: self.generator.generate(job, on_text, check_connected))
            events = _events(task, parts, kind, head, partial(leave, task))
            return StreamingResponse(events, media_type="text/event-stream")
        task = self.queue.submit(lambda: self.generator.generate(job, check_connected=check_connected))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=DISCONNECT_CHECK_SECONDS)
                if await request.is_disconnected():
                    raise AbandonedError
        finally:
            leave(task)
        return JSONResponse(reply_body(kind, head, job, task.result(), with_top))


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

    handle(RequestValidationError, lambda error: _error(400, _validation_message(error)))
    handle(HTTPException, lambda error: _error(error.status_code, str(error.detail), headers=error.headers))
    handle(AgenticRingError, lambda error: _error(400, str(error)))
    handle(ContextLengthError, lambda error: _error(400, str(error), "context_length_exceeded"))
    handle(
        BusyError,
        lambda error: _error(429, str(error), "busy", {"Retry-After": str(error.retry_after)}),
    )
    handle(AbandonedError, lambda error: Response(status_code=499))
    handle(Exception, lambda error: _error(500, INTERNAL_ERROR))


def _validation_message(error: RequestValidationError) -> str:
    """Field and message of the first few invalid fields."""
    faults = []
    for fault in error.errors()[:4]:
        # Every location starts with "body".
        where = ".".join(str(part) for part in fault["loc"][1:])
        faults.append(f"{where}: {fault['msg']}" if where else fault["msg"])
    return "; ".join(faults)
