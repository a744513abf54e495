"""A server in a thread of the tests, on a free port, whose generator can be held."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from agentic_ring.serve.app import ModelServer
from agentic_ring.serve.generation import TextGenerator
from agentic_ring.serve.load_limits import LimitedConnection
from agentic_ring.serve.prompts import PromptProcess

CONTEXT, CHUNK, BODY_BYTES = 2048, 64, 400_000
NEW = 40
"""Tokens of most answers: those of one length share their programs."""
PROMPT = "the other one"
LONG = "a record of lines, one after the other: " * 6


@contextmanager
def serving(generator: TextGenerator, prompts: PromptProcess, queue_size: int = 1) -> Iterator[str]:
    """Runs the server as the command does; yields the base address."""
    app = ModelServer("tiny", generator, prompts, queue_size, BODY_BYTES)
    config = uvicorn.Config(
        app, port=0, log_level="critical", ws="none", http=LimitedConnection, timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def command_serving(log: Path, *flags: str) -> Iterator[str]:
    """Runs the command on a free port, with its messages in a file; yields the base address."""
    command = [sys.executable, "-m", "agentic_ring.serve", "--port=0", *flags]
    with log.open("w") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            while "running on" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            yield next(word for word in log.read_text().split() if word.startswith("http://"))
        finally:
            process.terminate()
        assert process.wait(60) in (0, -15)


def body(prompt, **options) -> dict:
    return {"model": "tiny", "prompt": prompt, "max_tokens": NEW, "temperature": 0, **options}


def ask(root: str, request: dict) -> dict:
    """Text and finish reason of a reply, whether it is a stream or not; retried while the queue is full."""
    while (reply := httpx.post(f"{root}/v1/completions", json=request, timeout=60)).status_code == 429:
        time.sleep(0.1)
    assert reply.status_code == 200, reply.text
    if not request.get("stream"):
        return {name: reply.json()["choices"][0][name] for name in ("text", "finish_reason")}
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    parts = [event["choices"][0] for event in events]
    return {"text": "".join(part["text"] for part in parts), "finish_reason": parts[-1]["finish_reason"]}


def metrics(root: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    reply = httpx.get(f"{root}/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    samples = [each for family in text_string_to_metric_families(reply.text) for each in family.samples]
    return {(each.name.removeprefix("agentic_ring_"), *each.labels.values()): each.value for each in samples}


class HeldGenerator(TextGenerator):
    """Begins to answer only while ``go_on`` is set."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.go_on = threading.Event()
        self.go_on.set()

    def answer(self, *arguments):
        assert self.go_on.wait(60)
        return super().answer(*arguments)

    def ask_together(self, root: str, calls: list[Callable], refused: int = 0) -> list:
        """The results of calls that wait together behind another one; ``refused`` of them are not queued."""
        self.go_on.clear()
        with ThreadPoolExecutor(len(calls) + 1) as pool:
            try:
                others = [pool.submit(ask, root, body(PROMPT, max_tokens=1)), *map(pool.submit, calls)]
                deadline = time.monotonic() + 30
                while metrics(root)["queue_length",] < len(calls) - refused:
                    assert time.monotonic() < deadline, "they do not wait"
                    time.sleep(0.01)
                time.sleep(0.3)  # they are encoded
            finally:
                self.go_on.set()
            return [other.result() for other in others[1:]]
