"""A model behind a server, which answers, fails, stays silent, or cuts prompts."""

import json
import re
import time
from contextlib import closing

import pytest

from agentic_ring.errors import ConfigError, DataError
from evals.retrieval.documents import plan_lines
from evals.retrieval.endpoint_reader import (
    CHAT_TEMPLATE_TOKENS,
    EndpointReader,
    estimated_tokens,
    token_counter,
)
from tests.data.text.tokenizers_for_tests import sentencepiece
from tests.evals.retrieval.line_server import LineServer

DOCUMENT = plan_lines("LRT-NL", "4k", 0, 12, 12)[0].build(40)
QUESTIONS = [question.text for question in DOCUMENT.questions]
EXPECTED = [question.expected[0] for question in DOCUMENT.questions]
KEY = "sk-a-very-secret-key"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def ask(server, count=1, **options):
    reader = EndpointReader(server.address, "lookup", len, **{"retries": 1, **options})
    answers = dict(reader.answers(DOCUMENT.text, QUESTIONS[:count], 100))
    return [answers[number] for number in range(count)]


@pytest.mark.parametrize("completions", [False, True])
def test_each_question_is_asked_with_its_document_and_answered_in_order(server, completions):
    answers = ask(server, count=3, completions=completions)
    assert all(f"<{number}>" in answer.text for number, answer in zip(EXPECTED, answers, strict=False))
    prompts = [DOCUMENT.text + question for question in QUESTIONS[:3]]
    assert [answer.prompt_tokens for answer in answers] == [len(prompt) for prompt in prompts]
    assert all(answer.seconds > 0 and answer.error is None for answer in answers)
    assert all(answer.cached_tokens == answer.prompt_tokens // 2 for answer in answers)
    assert all(answer.answer_tokens == len(answer.text) for answer in answers)
    common = {"model": "lookup", "max_tokens": 100, "temperature": 0}
    if completions:
        expected = {"path": "/v1/completions", **common, "prompt": prompts[0]}
    else:
        message = {"role": "user", "content": prompts[0]}
        expected = {"path": "/v1/chat/completions", **common, "messages": [message]}
    assert server.requests[0] == expected
    assert server.keys == [f"Bearer {KEY}"] * 3
    reader = EndpointReader("http://localhost:1/v1/", "m", len, completions=completions)
    assert reader.count_tokens("abc", "de") == 5 + (0 if completions else CHAT_TEMPLATE_TOKENS)


def test_without_a_key_none_is_sent_fields_are_added_or_taken_away_and_requests_keep_to_the_rate(
    server, monkeypatch
):
    monkeypatch.delenv("OPENAI_API_KEY")
    fields = {"max_tokens": None, "max_completion_tokens": 9, "top_k": 1}
    began = time.monotonic()
    ask(server, count=3, fields=fields, requests_per_minute=600)
    assert server.keys == [None] * 3
    request = server.requests[0]
    assert "max_tokens" not in request
    assert (request["max_completion_tokens"], request["top_k"], request["temperature"]) == (9, 1, 0)
    # A busy machine may receive two requests at once, but none before its time.
    assert all(at >= began + 0.1 * number for number, at in enumerate(server.times))


FAILURES = {
    ("half", '{"choices": [{"text": "<1>"}]}'): "no reply from http",
    ("silence", 0.4): "no reply from http.* within 0.3 s",
    ("status", 500, f"oops {KEY}\nagain"): r"status 500: oops \*\*\*\\nagain",
    ("status", 429, "slow down"): "status 429: slow down",
    ("hang up",): "no reply from http",
}


@pytest.mark.parametrize("reply", FAILURES, ids=str)
def test_what_may_pass_is_tried_again_and_then_an_error_before_the_next_question(server, reply):
    server.plan.extend([reply, ("lookup",), reply, reply])
    first, failed, third = ask(server, count=3, timeout=0.3, concurrency=1)
    assert f"<{EXPECTED[0]}>" in first.text
    assert first.error is None
    assert first.seconds < 0.3, "only the last attempt is timed"
    assert failed.text == ""
    assert re.match(FAILURES[reply], failed.error)
    assert failed.prompt_tokens == len(DOCUMENT.text + QUESTIONS[1]) + CHAT_TEMPLATE_TOKENS
    assert f"<{EXPECTED[2]}>" in third.text
    assert len(server.requests) == 5


def test_a_reply_without_an_answer_is_an_error(server):
    cached = {"prompt_tokens": 4000, "prompt_tokens_details": {"cached_tokens": 4001}}
    for body in (
        "<html>not JSON</html>",
        "[]",
        '{"choices": []}',
        '{"choices": [{"text": "<1>"}, {"text": "<2>"}]}',
        '{"choices": [{"message": {"content": null}}]}',
        '{"choices": [{"text": "<1>", "finish_reason": "error"}]}',
        json.dumps({"choices": [{"text": "<1>"}], "usage": cached}),
    ):
        server.plan.append(("status", 200, body))
        (answer,) = ask(server)
        assert (answer.text, answer.error is None) == ("", False), body


def test_a_server_that_was_never_there_ends_the_run_and_one_that_goes_away_is_an_error_of_the_answer():
    with LineServer() as server:
        reader = EndpointReader(server.address, "m", len, retries=0)
        answers = reader.answers(DOCUMENT.text, QUESTIONS[:2], 5)
        assert next(answers)[1].error is None
    ((_, answer),) = answers
    assert answer.error.startswith("no ")
    reader = EndpointReader("http://127.0.0.1:9/v1", "m", len, retries=0)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/v1/chat.*server running"):
        list(reader.answers("d", ["q"], 5))


def test_settings_that_cannot_be_are_named(monkeypatch):
    def refused(named, address="http://localhost:1/v1", **settings):
        with pytest.raises(ConfigError, match=re.escape(named)) as caught:
            EndpointReader(address, "m", len, **settings)
        assert "secret" not in str(caught.value)

    for address in ("localhost:8000/v1", "ftp://host/v1", "http://[::1"):
        refused(address, address)
    for name in ("timeout", "concurrency", "requests_per_minute"):
        refused(f"{name} is 0", **{name: 0})
    refused("timeout is nan", timeout=float("nan"))
    refused("'messages'", fields={"messages": []})
    # Neither a password nor a key that no request can send is shown.
    refused("OPENAI_API_KEY", "http://me:secret@host/v1")
    for bad in (f"secret{KEY}\r{KEY}", "secret-ä"):
        monkeypatch.setenv("OPENAI_API_KEY", bad)
        refused("OPENAI_API_KEY")


def test_the_first_question_goes_alone_and_the_others_several_at_a_time(server):
    server.delay = 0.05
    answers = ask(server, concurrency=4, count=12)
    assert all(f"<{number}>" in answer.text for number, answer in zip(EXPECTED, answers, strict=True))
    assert server.at_once[:2] == [1, 1]
    assert max(server.at_once) == 4
    assert server.times[1] - server.times[0] > 0.05


def test_an_interrupted_run_waits_for_no_retry(server):
    reader = EndpointReader(server.address, "m", len, retries=1)
    with closing(reader.answers(DOCUMENT.text, QUESTIONS[:4], 5)) as answers:
        server.plan.extend([("lookup",), ("lookup",), *[("status", 429, "", 3)] * 2])
        assert [next(answers)[1].error for _ in range(2)] == [None, None]
        started = time.monotonic()
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(("exact", "share"), [(False, 0.45), (True, 0.9)])
def test_a_truncated_prompt_is_an_error_and_the_others_are_not_sent(server, exact, share):
    server.context = read = int(share * len(DOCUMENT.text))
    for answer in ask(server, count=3, exact=exact):
        assert answer.text == ""
        assert re.match(rf"the server has read {read:,} tokens .* about \d,\d+: it trunc", answer.error)
    assert len(server.requests) == 1


def test_an_answer_at_the_limit_of_tokens_is_unfinished(server):
    server.starving = True
    (answer,) = ask(server)
    assert answer.unfinished == "the answer was cut off at the limit of tokens"
    assert answer.error is None
    (bare,) = ask(server, completions=True)  # which never comes to an end
    assert bare.unfinished is None
    for content in (None, ""):
        message = {"content": content, "reasoning_content": "Let me see"}
        reply = {"choices": [{"message": message, "finish_reason": "length"}]}
        server.plan.append(("status", 200, json.dumps(reply)))
        assert ask(server)[0].unfinished == "all tokens of the answer went into reasoning"


def test_the_first_of_several_answers_is_read_and_missing_usage_is_counted(server):
    choices = [{"index": n, "message": {"content": text}} for n, text in ((1, "<7>"), (0, "<42>"))]
    for reported in (None, 0):
        body = json.dumps({"choices": choices, "usage": {"prompt_tokens": reported}})
        server.plan.append(("status", 200, body))
        (answer,) = ask(server)
        assert answer.text == "<42>"
        assert answer.prompt_tokens == len(DOCUMENT.text + QUESTIONS[0]) + CHAT_TEMPLATE_TOKENS


def test_a_tokenizer_counts_with_bos_and_all_and_the_estimate_is_a_little_above_llamas(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text('{"model": 3}')
    with pytest.raises(DataError, match=re.escape(str(file))):
        token_counter(tmp_path)
    backend = sentencepiece()._backend
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(file))
    for path in (tmp_path, file):
        assert token_counter(path)("The capital of France is Paris.") == 7
    # LLaMA has 23.18 tokens a line on average in LongChat's files.
    plan = plan_lines("LRT-NL", "4k", 0, 1, 1)[0]
    lines = estimated_tokens(plan.build(2000).text) - estimated_tokens(plan.build(1000).text)
    assert 23.18 < lines / 1000 < 24.2
    assert token_counter(None) is estimated_tokens
