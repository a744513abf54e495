"""Thousands of hostile requests: none is an error of the server, and good ones are answered as before."""

import logging
import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.models.llama import load_pretrained
from agentic_ring.serve.generation import TextGenerator
from agentic_ring.serve.prompt_process import PromptProcess
from agentic_ring.serve.prompts import PromptLimits
from tests.models.tiny_llama import write_tiny_model
from tests.serve.running_server import serving
from tests.trust.daily_seed import daily_seed
from tests.trust.hostile_requests import COMPLETION, KINDS, completion, dumps, request, send

CONTEXT = 512
ANSWERS = {"left", "closed", *map(str, (100, 200, 400, 404, 405, 408, 413, 415, 429))}
"""What a hostile request may get; 429 if the queue is full, 100 if it asks whether to go on."""
GOOD = {"model": "tiny", "prompt": "the user and the", "max_tokens": 8, "temperature": 0}


def ask(url: str) -> str:
    """A good request's answer, asked for again while the queue is full."""
    started = time.monotonic()
    while True:
        reply = httpx.post(f"{url}{COMPLETION}", json=GOOD, timeout=20)
        if reply.status_code == 200:
            assert time.monotonic() - started < 20
            return reply.json()["choices"][0]["text"]
        assert reply.status_code == 429
        assert time.monotonic() - started < 20
        time.sleep(0.1)


def burst(address: tuple[str, int]) -> list[str]:
    """30 valid requests at once."""
    with ThreadPoolExecutor(30) as pool:
        return list(pool.map(lambda _: send(address, request(COMPLETION, dumps(completion()))), range(30)))


def trial(url: str, count: int) -> Counter:
    """Sends ``count`` requests or a few more, and a good one after each hundred; counts (kind, answer)."""
    address = urlsplit(url).hostname, urlsplit(url).port
    draw = random.Random(daily_seed())
    before, counts, goods = ask(url), Counter(), 0
    while counts.total() < count:
        kind = draw.choice(KINDS)
        status = kind(draw, address)
        assert status in ANSWERS, (kind.__name__, status)
        counts[kind.__name__, status] += 1
        if counts.total() % 500 == 250:
            counts.update(("burst", status) for status in burst(address))
        if counts.total() // 100 > goods:
            goods = counts.total() // 100
            assert ask(url) == before
    assert ask(url) == before
    assert {status for kind, status in counts if kind == "burst"} <= {"200", "429"}
    return counts


def test_a_sample_of_hostile_requests(tmp_path):
    folder = write_tiny_model(tmp_path / "tiny", CONTEXT)
    tokenizer = Tokenizer.load(folder)
    generator = TextGenerator(TextEngine(load_pretrained(folder), chunk=64), tokenizer, CONTEXT)
    errors = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = errors.append
    logger = logging.getLogger("uvicorn.error")
    with (
        PromptProcess(folder, "tokenizer", PromptLimits.of(tokenizer, CONTEXT)) as prompts,
        serving(generator, prompts, queue_size=16) as url,
    ):
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        try:
            trial(url, 40)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
    assert not errors


@pytest.mark.slow
def test_hostile_requests(tmp_path):
    folder = write_tiny_model(tmp_path / "tiny", CONTEXT)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "agentic_ring.serve", f"--model={folder}", "--port=0"]
    with log.open("w") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            while "running on" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            url = next(word for word in log.read_text().split() if word.startswith("http://"))
            counts = trial(url, 2000)
            assert process.poll() is None
            assert httpx.get(f"{url}/health").json()["status"] == "ok"
        finally:
            process.terminate()
        assert process.wait(60) in (0, -15)
    assert "Traceback" not in log.read_text(), log.read_text()[-4000:]
    assert counts.total() >= 2000
    by_kind: dict[str, Counter] = {}
    for (kind, status), number in counts.items():
        by_kind.setdefault(kind, Counter())[status] += number
    for kind, found in sorted(by_kind.items()):
        statuses = ", ".join(f"{number} {status}" for status, number in sorted(found.items()))
        print(f"| {kind} | {found.total()} | {statuses} |")
