"""Limits of the server: what is refused, dropped or ended, so that no request keeps others waiting."""

import json
import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest

from agentic_ring.data.text.chat import Turn
from agentic_ring.errors import DataError
from agentic_ring.serve import load_limits, openai_protocol, prompts
from agentic_ring.serve.generation import TextGenerator
from agentic_ring.serve.prompts import PromptProcess
from tests.models.tiny_llama import tiny_tokenizer
from tests.serve.running_server import CONTEXT, PROMPT, ask, body, serving

ENDLESS = (
    "{% if messages[0].content == 'size' %}{{ 'a' * 10 ** 11 }}{% endif %}"
    "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}"
    "{% endfor %}{% endfor %}{% endfor %}{{ messages[0].content }}"
)


@pytest.fixture(scope="module")
def endless(tokenizer, tmp_path_factory):
    """A process whose chat template takes any time, or any memory."""
    folder = tmp_path_factory.mktemp("endless")
    tiny = tiny_tokenizer()
    tiny.chat_template = ENDLESS
    tiny.save(folder)
    with PromptProcess(folder, "tokenizer", CONTEXT, tokenizer.longest_token) as process:
        yield process


def connect(root: str) -> socket.socket:
    parts = urlsplit(root)
    return socket.create_connection((parts.hostname, parts.port), timeout=20)


def test_encoding_cannot_take_more_than_its_time_and_memory(endless, monkeypatch):
    monkeypatch.setattr(prompts, "SECONDS", 1.0)
    before = endless.encode([PROMPT], lambda: None)
    for text, error in (("a", "time limit of 1 s"), ("size", "Memory")):
        with pytest.raises(DataError, match=error):
            endless.encode([[Turn("user", text)]], lambda: None)
        assert endless.encode([PROMPT], lambda: None) == before


def test_a_template_that_takes_long_blocks_neither_health_nor_metrics(
    engine, tokenizer, endless, monkeypatch
):
    monkeypatch.setattr(prompts, "SECONDS", 60.0)
    chat = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "a"}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with serving(TextGenerator(engine, tokenizer, CONTEXT), endless) as root:
        ask(root, body(PROMPT))
        with connect(root) as client:
            client.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(chat), chat))
            time.sleep(0.5)
            for path in ("health", "metrics"):
                started = time.monotonic()
                assert httpx.get(f"{root}/{path}").status_code == 200
                assert time.monotonic() - started < 2
        # The client has left: its template does not run on to its limit.
        started = time.monotonic()
        ask(root, body(PROMPT))
        assert time.monotonic() - started < 30


def test_slow_clients_do_not_keep_others_out(root):
    before = ask(root, body(PROMPT))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
    rest = b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    with ExitStack() as held:
        for number in range(270):
            held.enter_context(connect(root)).sendall(head + rest * (number % 2))
        started = time.monotonic()
        assert ask(root, body(PROMPT)) == before
        assert time.monotonic() - started < 10


def test_the_time_of_heads_bodies_and_answers_is_limited(engine, tokenizer, prompts, monkeypatch):
    monkeypatch.setattr(load_limits, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(load_limits, "WRITE_SECONDS", 0.3)
    monkeypatch.setattr(openai_protocol, "BODY_SECONDS", 0.3)
    line = b"POST /v1/completions HTTP/1.1\r\n"
    with serving(TextGenerator(engine, tokenizer, CONTEXT), prompts) as root:
        with connect(root) as client:
            client.sendall(line)
            assert client.recv(100) == b""
        with connect(root) as client:
            client.sendall(line + b"Host: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
            assert client.recv(1000).startswith(b"HTTP/1.1 408 ")
        with connect(root) as client:
            # The client asks for more than the buffers hold, and reads nothing.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with pytest.raises(ConnectionError):
                while True:
                    client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
        ask(root, body(PROMPT))
