"""Addresses, replies and errors, in the words of OpenAI's protocol."""

import asyncio
import json
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from agentic_ring.data.text.chat import ChatTemplate, Turn
from agentic_ring.errors import AgenticRingError, DataError
from agentic_ring.inference import Sampling
from agentic_ring.serve.body_limit import BodyLimit
from agentic_ring.serve.protocol import DEFAULT_CHAT_TOKENS, ChatRequest, CompletionRequest
from agentic_ring.serve.request_queue import AbandonedError, BusyError, Turns
from agentic_ring.serve.scored_tokens import ScoredToken
from agentic_ring.serve.writer import ContextLengthError, Job, Writer, Written

Kind = Literal["text_completion", "chat.completion"]

LOOKS_FOR_CLIENT_EVERY = 0.5
"""Seconds between two looks at whether the client is still there."""


def make_app(
    name: str, writer: Writer, template: ChatTemplate | None, places: int, max_body_bytes: int
) -> FastAPI:
    """The server of one model.

    Args:
      name: by which requests ask for the model.
      writer: what answers.
      template: of chats; None where there is none, and chats are refused.
      places: requests that may wait while one is worked on.
      max_body_bytes: of a request.
    """
    app = FastAPI(title="agentic_ring", openapi_url=None)
    app.add_middleware(BodyLimit, most=max_body_bytes)
    turns, started = Turns(places), int(time.time())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": started, "owned_by": "agentic_ring"}
        return {"object": "list", "data": [model]}

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _check_model(name, body.model)
        # Prompts of millions of characters are encoded beside the other requests.
        prompts = await asyncio.to_thread(lambda: [writer.prompt(prompt) for prompt in body.prompts])
        job = Job(
            prompts,
            body.max_tokens,
            _sampling(body),
            body.stop,
            echo=body.echo,
            scored=body.logprobs is not None,
        )
        return await _reply(request, "text_completion", body, job, with_likeliest=body.logprobs == 1)

    @app.post("/v1/chat/completions")
    async def chats(body: ChatRequest, request: Request) -> Response:
        _check_model(name, body.model)
        if template is None:
            raise DataError("the model's folder has no chat template; start the server with --template")
        turns = [Turn(message.role, message.text) for message in body.messages]
        prompt = await asyncio.to_thread(writer.chat_prompt, template, turns)
        new_tokens = body.new_tokens or max(1, min(DEFAULT_CHAT_TOKENS, writer.room(prompt)))
        job = Job([prompt], new_tokens, _sampling(body), body.stop, spaced=False)
        return await _reply(request, "chat.completion", body, job)

    async def _reply(
        request: Request,
        kind: Kind,
        body: CompletionRequest | ChatRequest,
        job: Job,
        with_likeliest: bool = False,
    ) -> Response:
        writer.check(job)
        abandoned = threading.Event()

        def alive() -> None:
            if abandoned.is_set():
                raise AbandonedError

        def leave(task: asyncio.Task) -> None:
            abandoned.set()
            turns.leave(task)

        head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": name}
        if body.stream:
            pieces: asyncio.Queue[str] = asyncio.Queue()
            loop = asyncio.get_running_loop()

            def on_text(text: str) -> None:
                if text:
                    loop.call_soon_threadsafe(pieces.put_nowait, text)

            task = turns.start(lambda: writer.write(job, on_text, alive))
            events = _events(task, pieces, kind, head, partial(leave, task))
            return StreamingResponse(events, media_type="text/event-stream")
        task = turns.start(lambda: writer.write(job, alive=alive))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOKS_FOR_CLIENT_EVERY)
                if await request.is_disconnected():
                    raise AbandonedError
        finally:
            leave(task)
        written = task.result()
        choices = [_choice(kind, index, each, with_likeliest) for index, each in enumerate(written)]
        return JSONResponse({**head, "object": kind, "choices": choices, "usage": _usage(job, written)})

    _answer_errors(app)
    return app


async def _events(
    task: asyncio.Task[list[Written]],
    pieces: asyncio.Queue[str],
    kind: Kind,
    head: dict[str, Any],
    leave: Callable[[], None],
) -> AsyncIterator[str]:
    """Server-sent events: the answer in pieces, why it ended, and ``[DONE]``; then it calls ``leave``."""
    chat = kind == "chat.completion"
    head = head | {"object": "chat.completion.chunk" if chat else kind}

    def event(text: str, ended: str | None = None) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": ended}
        choice |= {"delta": {"content": text} if text else {}} if chat else {"text": text, "logprobs": None}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    # Wakes the reader when the last piece is there.
    task.add_done_callback(lambda task: pieces.put_nowait(""))
    try:
        while text := await pieces.get():
            yield event(text)
        (written,) = await task
        yield event("", written.ended)
    except AgenticRingError as error:
        yield f"data: {json.dumps(_error(str(error)))}\n\n"
    except Exception:
        logging.getLogger(__name__).exception("a stream broke off")
        yield f"data: {json.dumps(_error(_OUR_FAULT, 'server_error'))}\n\n"
    finally:
        leave()
    yield "data: [DONE]\n\n"


def _sampling(body: CompletionRequest | ChatRequest) -> Sampling:
    seed = secrets.randbits(32) if body.seed is None else body.seed
    return Sampling(body.temperature, body.top_p, seed)


def _choice(kind: Kind, index: int, written: Written, with_likeliest: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": written.ended, "logprobs": None}
    if kind == "chat.completion":
        return choice | {"message": {"role": "assistant", "content": written.text}}
    if written.scored is not None:
        choice["logprobs"] = _logprobs(written.scored, with_likeliest)
    return choice | {"text": written.text}


def _logprobs(tokens: list[ScoredToken], with_likeliest: bool) -> dict[str, Any]:
    likeliest = [None if token.likeliest is None else dict([token.likeliest]) for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.log_probability for token in tokens],
        "top_logprobs": likeliest if with_likeliest else None,
        "text_offset": [token.offset for token in tokens],
    }


def _usage(job: Job, written: list[Written]) -> dict[str, int]:
    asked, answered = sum(len(prompt.tokens) for prompt in job.prompts), sum(each.tokens for each in written)
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


def _check_model(served: str, asked: str) -> None:
    if asked != served:
        raise HTTPException(404, f"the model {asked!r} is not served here, but {served!r} is")


_OUR_FAULT = "something went wrong here; the server's own output says what"
_TYPES = {404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}


def _error(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _refusal(
    status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    kind = _TYPES.get(status, "invalid_request_error")
    return JSONResponse(_error(message, kind, code), status, headers)


def _answer_errors(app: FastAPI) -> None:
    """Every error becomes a reply in OpenAI's form, without a traceback."""

    def handle(kind: type[Exception], reply: Callable[[Any], Response]) -> None:
        async def handler(request: Request, error: Exception) -> Response:
            return reply(error)

        app.add_exception_handler(kind, handler)

    handle(RequestValidationError, lambda error: _refusal(400, _what_is_wrong(error)))
    handle(HTTPException, lambda error: _refusal(error.status_code, str(error.detail), headers=error.headers))
    handle(AgenticRingError, lambda error: _refusal(400, str(error)))
    handle(ContextLengthError, lambda error: _refusal(400, str(error), "context_length_exceeded"))
    handle(
        BusyError,
        lambda error: _refusal(429, str(error), "busy", {"Retry-After": str(error.retry_after)}),
    )
    handle(AbandonedError, lambda error: Response(status_code=499))
    handle(Exception, lambda error: _refusal(500, _OUR_FAULT))


def _what_is_wrong(error: RequestValidationError) -> str:
    """The first few faults: where each is, and what."""
    faults = []
    for fault in error.errors()[:4]:
        # "body" stands before every name.
        where = ".".join(str(part) for part in fault["loc"][1:])
        faults.append(f"{where}: {fault['msg']}" if where else fault["msg"])
    return "; ".join(faults)
