"""A flood of hostile requests: none is an error of the server, and good ones are answered as before."""

import errno
import json
import os
import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from tests.serve.running_server import PROMPT, ask, body, command_serving
from tests.trust.daily_seed import daily_seed

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
COUNT = int(os.environ.get("AGENTIC_RING_HOSTILE_REQUESTS", "100"))
SECONDS = 30.0
"""A reply that takes longer counts as a hang."""
ANSWERS = {"left", "closed", *map(str, (100, 200, 400, 404, 405, 408, 413, 415, 429))}
"""What a hostile request may get; 429 if the queue is full, 100 if it asks whether to go on."""
GOOD = body(PROMPT, max_tokens=2)
ODD = [None, True, -1, 0, 2**31, 10**30, 1e308, -0.5, float("nan"), float("inf"), "", "x", [], {}, [[]], [{}]]
NAMES = ["stop", "stream", "seed", "top_p", "n", "logprobs", "echo", "logit_bias", "best_of", "tools"]
NAMES += ["stop_token_ids", "top_k", "min_p", "stream_options", "chat_template_kwargs"]
CHARACTERS = ["\ud800", "\udfff", "\x00", "\ufeff", "\u202e", "a", "\U0010ffff"]
HEADERS = [
    *(f"Content-Length: {length}" for length in ("-1", "9" * 20, "x")),
    *(f"X: {'a' * 100_000}", "X: a\r\n" * 4999 + "X: a", "Expect: 100-continue", "X-\x00: \x7f", " folded"),
    *("Upgrade: websocket\r\nConnection: Upgrade", "Connection: close, keep-alive"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Content-Type: text/plain"),
]
METHODS = ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW", "POST"]
PATHS = [CHAT, COMPLETION, "/", "/v1", "/v1/embeddings", "/health", "/metrics", "/../../etc/passwd", "/%00"]
PATHS += [f"{COMPLETION}?{'a=b&' * 500}", "//v1/models", "/v1/models/%ff%fe", "*", "http://a/b", "/" * 9000]
TEMPLATES = ["{{ 7 * 7 }}", "{% for a in range(99999) %}a{% endfor %}", "{{ ''.__class__.__mro__ }}"]
TEMPLATES += ["{0.__class__}", "</s>", "<s>" * 40, "{% raw %}", "{{ raise_exception('a') }}", "%s%n", "<unk>"]
STOPS = [["a" * 1023 + chr(65 + n) for n in range(64)], ["a" * 2**16], ["x"] * 64, ["x"] * 5000, ["", ""]]
STOPS += [[*"abe d"], "the" * 400, [["a"]], [None]]


def data(path, content, method="POST", headers="", length=None) -> bytes:
    """The bytes of a request; ``length`` replaces that of the body."""
    if isinstance(content, dict):
        content = json.dumps(content).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(content) if length is None else length}\r\n\r\n".encode() + content


def chat(content: object = "a", **fields) -> bytes:
    messages = {"messages": [{"role": "user", "content": content}]}
    return data(CHAT, {"model": "tiny", "max_tokens": 2} | messages | fields)


def completion(**fields) -> bytes:
    return data(COMPLETION, GOOD | fields)


def malformed_json(draw):
    content = bytearray(draw.choice([completion(), chat()]).partition(b"\r\n\r\n")[2])
    for _ in range(draw.randint(1, 6)):
        place = draw.randrange(len(content))
        content[place : place + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
    return data(draw.choice([CHAT, COMPLETION]), bytes(content))


def wrong_types(draw):
    odd = {draw.choice([*GOOD, *NAMES]): draw.choice(ODD)}
    messages = draw.choice([*ODD, {"role": draw.choice(ODD), "content": draw.choice(ODD)}])
    return draw.choice([chat(**odd), chat(messages=[messages]), completion(**odd)])


def long_texts(draw):
    unit = draw.choice(["a", "line ", " ", "\n", "'", "é", "🙂", "</s>", "<"])
    size = draw.choice([20_000, 100_000, 400_000])
    messages = [{"role": ("user", "assistant")[n % 2], "content": unit} for n in range(4001)]
    chats = chat(unit * size), chat([{"type": "text", "text": unit}] * 2000), chat(messages=messages)
    prompts = unit * size, [unit * 100] * 128, [1] * size
    return draw.choice([draw.choice(chats), completion(prompt=draw.choice(prompts))])


def deep_nesting(draw):
    depth, (left, right) = draw.choice([50, 900, 20_000]), draw.choice(["[]", ('{"a":', "}")])
    nested = left * depth + "1" + right * (depth * draw.randint(0, 1))
    fields = f'{{"model": "tiny", "prompt": "a", "{draw.choice(["prompt", "x", "logit_bias"])}": {nested}}}'
    return data(COMPLETION, draw.choice([nested, fields]).encode())


def surrogates(draw):
    text = "".join(draw.choice(CHARACTERS) for _ in range(9))
    fields = draw.choice([{"prompt": text}, {"stop": [text]}, {"model": text}, {text: text}])
    return draw.choice([completion(**fields), chat(text), chat(messages=[{"role": text, "content": "a"}])])


def wrong_headers(draw):
    """Headers that are wrong, huge, repeated, not text; or invalid HTTP amid a request."""
    request = data(COMPLETION, GOOD, headers=f"{draw.choice(HEADERS)}\r\n")
    if draw.random() < 0.3:
        place = draw.randrange(request.index(b"\r\n\r\n"))
        request = request[:place] + draw.randbytes(3) + request[place:]
    chunked = f"POST {COMPLETION} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    chunked += "Transfer-Encoding: chunked\r\n\r\nzz\r\n"
    return draw.choice([request, request, request, chunked.encode()])


def send(address, content: bytes, read: int | None = None, ends: bool = False) -> str:
    """Sends bytes and returns the reply's status, or "closed" without one, or leaves after ``read`` bytes."""
    reply = b""
    with socket.create_connection(address, timeout=SECONDS) as client:
        try:
            client.sendall(content)
            if ends:
                client.shutdown(socket.SHUT_WR)
            while read != 0 and len(reply) < (read or 12) and (part := client.recv(4096)):
                reply += part
        except OSError as error:
            if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                raise
            return "closed"
    if read is not None:
        return "left"
    return reply[9:12].decode() if reply.startswith(b"HTTP/1.1 ") else "closed"


def disconnects(draw, address) -> str:
    """A client that leaves while it waits, amid a stream or within its body."""
    request = completion(max_tokens=200, stream=draw.random() < 0.7, temperature=1)
    cut = draw.choice([len(request), len(request), draw.randrange(len(request))])
    return send(address, request[:cut], read=0 if cut < len(request) else draw.choice([0, 0, 300, 900]))


def slow_clients(draw, address) -> str:
    """Many connections at once that begin a request and stop."""
    begun = data(COMPLETION, b"", length=1000)
    with ExitStack() as held:
        for _ in range(draw.randint(1, 60)):
            client = held.enter_context(socket.create_connection(address, timeout=SECONDS))
            client.sendall(begun[: draw.randint(0, len(begun))] + b"{" * draw.randint(0, 1))
        return send(address, completion())


def bursts(draw, address) -> str:
    with ThreadPoolExecutor(30) as pool:
        statuses = set(pool.map(lambda _: send(address, completion()), range(30)))
    assert statuses <= {"200", "429"}
    return "200"


REQUESTS = {
    **{kind.__name__: kind for kind in (malformed_json, wrong_types, long_texts, deep_nesting, surrogates)},
    "stop_strings": lambda draw: completion(stop=draw.choice(STOPS), stream=draw.random() < 0.5),
    # A body that is longer than its length says.
    "short_bodies": lambda draw: data(COMPLETION, GOOD, length=draw.choice([draw.randrange(60), 0])),
    "wrong_headers": wrong_headers,
    "wrong_routes": lambda draw: data(draw.choice(PATHS), draw.choice([b"", GOOD]), draw.choice(METHODS)),
    "templates": lambda draw: chat("".join(draw.choices(TEMPLATES, k=draw.randint(1, 3)))),
}
CLIENTS = {"disconnects": disconnects, "slow_clients": slow_clients, "bursts": bursts}
KINDS = [*REQUESTS, *CLIENTS]


@pytest.mark.slow
def test_after_hostile_requests_good_ones_are_answered_as_before(folder, tmp_path):
    draw, log, counts = random.Random(daily_seed()), tmp_path / "log", Counter()
    with command_serving(log, f"--model={folder}", "--name=tiny") as url:
        address = urlsplit(url).hostname, urlsplit(url).port
        before = ask(url, GOOD)
        for number in range(COUNT):
            kind = KINDS[number] if number < len(KINDS) else draw.choice(KINDS)
            if kind in CLIENTS:
                status = CLIENTS[kind](draw, address)
            else:
                # Such a request may be incomplete: the server waits for more, and drops it at the end.
                status = send(address, REQUESTS[kind](draw), ends=kind == "wrong_headers")
            assert status in ANSWERS, (kind, status)
            counts[kind, status] += 1
            if number % 100 == 99 or number == COUNT - 1:
                started = time.monotonic()
                assert ask(url, GOOD) == before
                assert time.monotonic() - started < 20
    assert "Traceback" not in log.read_text(), log.read_text()[-4000:]
    for (kind, status), number in sorted(counts.items()):
        print(f"| {kind} | {status} | {number} |")
