"""Requests that are answered together get what each gets alone, whatever the others ask or do."""

import json
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentic_ring.inference.prefix_cache import PrefixCache
from agentic_ring.inference.sampling import Sampling
from agentic_ring.serve.generation import TextGenerator
from agentic_ring.serve.jobs import GenerationJob, GenerationRequest
from agentic_ring.serve.prompts import Prompt
from agentic_ring.serve.request_batch import RequestBatch
from tests.serve.running_server import CHUNK, CONTEXT, serving

LONG = "a record of lines, one after the other: " * 6


class HeldGenerator(TextGenerator):
    """Begins to answer only while ``go_on`` is set."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.go_on = threading.Event()
        self.go_on.set()

    def answer(self, *arguments):
        assert self.go_on.wait(60)
        return super().answer(*arguments)


@pytest.fixture(scope="module")
def generator(engine, tokenizer):
    return HeldGenerator(engine, tokenizer, CONTEXT)


@pytest.fixture(scope="module")
def root(generator, prompts):
    with serving(generator, prompts, queue_size=16) as root:
        yield root


def body(prompt, **options):
    return {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, **options}


def ask(root, request) -> dict:
    """The choice of a reply, of which a stream has the same parts."""
    reply = httpx.post(f"{root}/v1/completions", json=request, timeout=60)
    assert reply.status_code == 200, reply.text
    if not request.get("stream"):
        return {name: reply.json()["choices"][0][name] for name in ("text", "finish_reason")}
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    parts = [event["choices"][0] for event in events]
    return {"text": "".join(part["text"] for part in parts), "finish_reason": parts[-1]["finish_reason"]}


def metric(root, name) -> float:
    families = text_string_to_metric_families(httpx.get(f"{root}/metrics").text)
    return next(each.value for family in families for each in family.samples if each.name == name)


def ask_together(root, generator, calls, refused: int = 0) -> list:
    """The results of calls that wait together behind another one; ``refused`` of them are not queued."""
    generator.go_on.clear()
    with ThreadPoolExecutor(len(calls) + 1) as pool:
        try:
            others = [pool.submit(ask, root, body("the other one", max_tokens=1))]
            others += map(pool.submit, calls)
            deadline = time.monotonic() + 30
            while metric(root, "agentic_ring_queue_length") < len(calls) - refused:
                assert time.monotonic() < deadline, "they do not wait"
                time.sleep(0.01)
            time.sleep(0.3)  # they are encoded
        finally:
            generator.go_on.set()
        return [other.result() for other in others[1:]]


@pytest.fixture(scope="module")
def mixed(root):
    whole = ask(root, body(LONG + "who?", max_tokens=40))["text"]
    sampled = {"temperature": 1, "top_p": 0.9, "max_tokens": 20}
    return [
        body(LONG + "who?", max_tokens=40, stop=[whole[5:7], "not there"]),
        body(LONG + "who is it?", max_tokens=1),
        body(LONG + "when", max_tokens=33, stream=True),
        body(LONG + "where, and who?", seed=3, **sampled),
        body(LONG + "where, and who?", seed=4, **sampled),
        body(LONG + "where, and who?", seed=3, stream=True, **sampled),
        body(LONG + "who?", max_tokens=40, stream=True, stop=whole[20:22]),
    ]


def test_answers_in_a_batch_are_those_of_each_request_alone(root, generator, mixed):
    alone = [ask(root, request) for request in mixed]
    assert {each["finish_reason"] for each in alone} == {"stop", "length"}
    batches, requests = (metric(root, f"agentic_ring_batch_requests_{part}") for part in ("count", "sum"))
    assert batches == requests
    misses = metric(root, "agentic_ring_cache_misses_total")
    assert ask_together(root, generator, [partial(ask, root, each) for each in mixed]) == alone
    assert metric(root, "agentic_ring_batch_requests_sum") - requests == len(mixed) + 1
    # The one that kept the server busy, and one batch.
    assert metric(root, "agentic_ring_batch_requests_count") - batches == 2
    assert metric(root, "agentic_ring_cache_misses_total") == misses
    assert alone[3] != alone[4]


def test_a_client_that_leaves_does_not_harm_the_others(root, generator, mixed):
    alone = [ask(root, request) for request in mixed]

    def leave_half_way():
        request = body(LONG + "who was it?", max_tokens=200, stream=True)
        with httpx.stream("POST", f"{root}/v1/completions", json=request, timeout=60) as reply:
            return next(reply.iter_lines())

    calls = [leave_half_way, *(partial(ask, root, request) for request in mixed)]
    begun, *answers = ask_together(root, generator, calls)
    assert begun.startswith("data: {")
    assert answers == alone
    assert ask(root, mixed[0]) == alone[0]


def test_an_answer_whose_client_has_left_ends(engine, tokenizer):
    generator, tokens = TextGenerator(engine, tokenizer, CONTEXT), tokenizer.encode(LONG + "who?", bos=True)
    parts: list[str] = []

    def request(**options):
        job = GenerationJob([Prompt(array("i", tokens), "")], 30, Sampling())
        return GenerationRequest(job, **options)

    leaver, stayer = request(on_text=parts.append, has_left=lambda: len(parts) == 4), request()
    found = {}
    assert generator.answer(leaver, lambda fits: [stayer] if fits(stayer) else [], found.__setitem__) == 2
    (left,), (whole,) = found[leaver], found[stayer]
    assert (left.tokens, whole.tokens) == (4, 30)
    assert generator.answer(stayer, lambda fits: [], found.__setitem__) == 1
    assert found[stayer] == [whole]


def test_a_request_is_answered_before_the_longest_of_its_batch(root, generator):
    done = []

    def call(name, **options):
        ask(root, body(LONG + name, **options))
        done.append(name)

    slow, quick = partial(call, "slow", max_tokens=200, stream=True), partial(call, "quick", max_tokens=2)
    ask_together(root, generator, [slow, quick])
    assert done == ["quick", "slow"]


def test_a_request_that_is_refused_leaves_the_others(root, generator, mixed):
    def refused():
        return httpx.post(f"{root}/v1/completions", json=body([[5, 64]]), timeout=60).status_code

    alone = [ask(root, request) for request in mixed[:2]]
    calls = [refused, *(partial(ask, root, request) for request in mixed[:2])]
    assert ask_together(root, generator, calls, refused=1) == [400, *alone]


@pytest.fixture
def first(engine, tokenizer):
    """A batch of one long prompt, and the requests that ask it."""
    tokens = tokenizer.encode(LONG + "who?", bos=True)

    def request(prompt, new=8, **options):
        job = GenerationJob([Prompt(prompt, "")], new, Sampling(), **options)
        return GenerationRequest(job)

    prefixes = PrefixCache(engine)
    batch = RequestBatch(prefixes, rows=4, slots=4 * (CHUNK + 8))
    batch.start(request(tokens))
    return batch, tokens, request


def test_a_batch_admits_what_continues_its_text_and_needs_no_more_memory(first):
    batch, tokens, request = first
    other_end = [*tokens[:-3], 5, 6]
    assert batch.admit(request(other_end))
    assert batch.shared == len(tokens) - 3
    assert not batch.admit(request([5, *tokens])), "another text"
    assert not batch.admit(request(tokens[:CHUNK])), "a prompt that is not cached"
    assert not batch.admit(request(tokens, scored=True)), "log probabilities come from a pass of their own"
    assert not batch.admit(request(tokens, new=CHUNK + 6)), "4 rows of 3 and 70 tokens"
    assert batch.admit(request(tokens, new=CHUNK + 5))
    assert batch.admit(request(tokens))
    assert not batch.admit(request(tokens)), "a full batch"
    assert len(batch.requests) == 4


def test_short_prompts_share_a_batch(engine, first):
    _, _, request = first
    batch = RequestBatch(PrefixCache(engine), rows=2, slots=100)
    batch.start(request([1, 2, 3]))
    assert not batch.admit(request([5] * 43))
    assert batch.admit(request([5] * 42))
