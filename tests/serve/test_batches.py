"""Requests that wait together get what each gets alone, whatever the others ask or do."""

import time
from array import array
from functools import partial

import httpx
import openai
import pytest

from agentic_ring.inference.prefix_cache import PrefixCache
from agentic_ring.inference.sampling import Sampling
from agentic_ring.serve.generation import GenerationRequest, RequestBatch, TextGenerator
from agentic_ring.serve.load_limits import RequestQueue
from agentic_ring.serve.prompts import Prompt
from tests.serve.running_server import CHUNK, CONTEXT, LONG, NEW, HeldGenerator, ask, body, metrics


def request_for(tokens, new=NEW, encoded=True, **options) -> GenerationRequest:
    prompts = [Prompt(array("i", tokens), "")]
    request = GenerationRequest(lambda check_connected: prompts, new, Sampling(), **options)
    if encoded:
        request.prompts.set_result(prompts)
    return request


def test_answers_in_a_batch_are_those_of_each_request_alone(root, generator):
    whole = ask(root, body(LONG + "who?"))["text"]
    sampled = {"temperature": 1, "top_p": 0.9}
    mixed = [
        body(LONG + "who?", stop=[whole[5:7], "not there"]),
        body(LONG + "who is it?", max_tokens=1),
        body(LONG + "when", stream=True),
        body(LONG + "where, and who?", seed=2**40 + 3, **sampled),
        body(LONG + "where, and who?", seed=2**40 + 4, **sampled),
        body(LONG + "who?", stream=True, stop=whole[20:22]),
    ]
    alone = [ask(root, request) for request in mixed]
    assert {each["finish_reason"] for each in alone} == {"stop", "length"}
    for number, end in ((0, whole[5:7]), (5, whole[20:22])):
        assert alone[number]["text"] == whole[: whole.index(end)]
    assert alone[3] != alone[4]
    before, done = metrics(root), []
    assert before["batch_requests_count",] == before["batch_requests_sum",]

    def leave_half_way():
        request = body(LONG + "who was it?", max_tokens=100, stream=True)
        with httpx.stream("POST", f"{root}/v1/completions", json=request, timeout=60) as reply:
            return next(reply.iter_lines())

    def refused():
        return httpx.post(f"{root}/v1/completions", json=body([[5, 64]]), timeout=60).status_code

    def timed(request):
        answer = ask(root, request)
        done.append(request)
        return answer

    slow = body(LONG + "slow", max_tokens=100)
    calls = [leave_half_way, refused, *(partial(timed, request) for request in (slow, *mixed))]
    begun, status, _, *answers = generator.ask_together(root, calls, refused=1)
    assert begun.startswith("data: {")
    assert status == 400
    assert answers == alone
    assert done[-1] is slow, "each is answered when its own answer ends"
    after = metrics(root)
    assert after["batch_requests_sum",] - before["batch_requests_sum",] == len(mixed) + 3
    # The one that kept the server busy, and one batch.
    assert after["batch_requests_count",] - before["batch_requests_count",] == 2
    assert after["cache_misses_total",] == before["cache_misses_total",]
    assert ask(root, mixed[0]) == alone[0]


def test_an_answer_whose_client_has_left_ends(engine, tokenizer):
    generator, tokens = TextGenerator(engine, tokenizer, CONTEXT), tokenizer.encode(LONG + "who?", bos=True)
    parts: list[str] = []

    def on_text(text):
        parts.append(text)
        if len(parts) == 4:
            leaver.leave()

    leaver, stayer = (request_for(tokens, on_text=each) for each in (on_text, lambda text: None))
    for request in (leaver, stayer):
        assert request.answers.set_running_or_notify_cancel()
    assert generator.answer(leaver, lambda fits: fits(stayer)) == 2
    (left,), (whole,) = leaver.answers.result(), stayer.answers.result()
    assert (left.tokens, whole.tokens) == (4, NEW)
    alone = request_for(tokens)
    assert generator.answer(alone, lambda fits: None) == 1
    assert alone.answers.result() == [whole]


def test_a_batch_admits_what_continues_its_text_and_needs_no_more_memory(engine, tokenizer):
    tokens = tokenizer.encode(LONG + "who?", bos=True)
    batch = RequestBatch(PrefixCache(engine), 4, 4 * (CHUNK + 8), request_for(tokens, 12))
    assert batch.admit(request_for([*tokens[:-3], 5, 6], 12))
    assert batch.shared == len(tokens) - 3
    assert not batch.admit(request_for([5, *tokens])), "another text"
    assert not batch.admit(request_for(tokens[:CHUNK])), "a prompt that is not cached"
    assert not batch.admit(request_for(tokens, scored=True)), "log probabilities need a pass"
    assert not batch.admit(request_for(tokens, new=CHUNK + 6)), "4 rows of 3 and 70 tokens"
    assert batch.admit(request_for(tokens, new=CHUNK + 5))
    assert batch.admit(request_for(tokens, 12))
    assert not batch.admit(request_for(tokens, 12)), "a full batch"
    assert len(batch.requests) == 4
    short = RequestBatch(PrefixCache(engine), 2, 100, request_for([1, 2, 3], 7))
    assert not short.admit(request_for([5] * 44, 7))
    assert short.admit(request_for([5] * 43, 7))


def test_a_full_queue_says_when_to_retry_and_a_client_that_leaves_frees_its_place(root, generator):
    generator.go_on.clear()
    try:
        with openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0) as client:
            streams = [client.completions.create(**body("a", stream=True, max_tokens=2)) for _ in range(17)]
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(**body("a"))
            assert int(refused.value.response.headers["Retry-After"]) >= 1
            assert refused.value.code == "busy"
            streams[9].close()
            while metrics(root)["queue_length",] == 16:
                time.sleep(0.05)
            streams.append(client.completions.create(**body("a", stream=True, max_tokens=2)))
            generator.go_on.set()
            streams.pop(9)
            assert {list(stream)[-1].choices[0].finish_reason for stream in streams} == {"length"}
    finally:
        generator.go_on.set()


def test_an_error_is_the_answer_of_all_that_are_not_finished_and_of_no_others(engine, tokenizer):
    class Broken(HeldGenerator):
        def answer(self, request, take):
            assert self.go_on.wait(30)
            others = []
            take(lambda other: len(other.tokens) == 3 and not others.append(other))
            request.finish([])
            if others:
                raise ValueError("broken")
            return 1

    generator = Broken(engine, tokenizer, CONTEXT)
    generator.go_on.clear()
    queue = RequestQueue(generator, 2)
    first, third, other = (request_for([1] * length, encoded=False) for length in (2, 3, 4))
    for each in (first, third, other):
        queue.submit(each)
        each.prompts.result(30)
    generator.go_on.set()
    assert first.answers.result(30) == other.answers.result(30) == []
    with pytest.raises(ValueError, match="broken"):
        third.answers.result(30)
