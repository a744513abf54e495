import json
import re
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from agentic_ring.errors import ConfigError, DataError
from evals.lines.endpoint_reader import (
    CHAT_TEMPLATE_TOKENS,
    EndpointModel,
    EndpointReader,
)
from evals.lines.longchat_prompt import plan_documents
from evals.lines.request_limits import RequestPolicy
from evals.lines.token_counts import estimated_tokens, token_counter
from tests.evals.lines.line_server import LineServer

DOCUMENT = plan_documents("LRT-NL", "4k", 0, 12, 12)[0].build(40)
QUESTIONS = [question.text for question in DOCUMENT.questions]
EXPECTED = [question.expected for question in DOCUMENT.questions]
QUICK = RequestPolicy(timeout=5.0, attempts=3, first_wait=0.01)
KEY = "sk-a-very-secret-key"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def ask(server, policy=QUICK, count=1, **options):
    reader = EndpointReader(EndpointModel(server.address, "lookup", **options), len, policy)
    answers = dict(reader.answers(DOCUMENT.text, QUESTIONS[:count], 100))
    return [answers[number] for number in range(count)]


@pytest.mark.parametrize("completions", [False, True])
def test_each_question_is_asked_with_its_document_and_answered_in_order(server, completions):
    answers = ask(server, count=3, completions=completions)
    assert all(f"<{number}>" in answer.text for number, answer in zip(EXPECTED, answers, strict=False))
    prompts = [DOCUMENT.text + question for question in QUESTIONS[:3]]
    assert [answer.prompt_tokens for answer in answers] == [len(prompt) for prompt in prompts]
    assert all(answer.seconds > 0 and answer.error is None for answer in answers)
    common = {"model": "lookup", "max_tokens": 100, "temperature": 0}
    if completions:
        expected = {"path": "/v1/completions", **common, "prompt": prompts[0]}
    else:
        message = {"role": "user", "content": prompts[0]}
        expected = {"path": "/v1/chat/completions", **common, "messages": [message]}
    assert server.requests[0] == expected
    assert server.keys == [f"Bearer {KEY}"] * 3


def test_without_a_key_none_is_sent(server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    ask(server)
    assert server.keys == [None]


def test_counts_set_something_aside_for_a_chat_template_only():
    chat = EndpointReader(EndpointModel("http://localhost:1/v1", "m"), len)
    bare = EndpointReader(EndpointModel("http://localhost:1/v1/", "m", completions=True), len)
    assert chat.count_tokens("abc", "de") == 5 + CHAT_TEMPLATE_TOKENS
    assert bare.count_tokens("abc", "de") == 5


@pytest.mark.parametrize(
    "reply",
    [
        ("status", 429, {}, "slow down"),
        ("status", 500, {}, "oops"),
        ("status", 503, {}, ""),
        ("body", "<html>not JSON</html>"),
        ("body", "{}"),
        ("body", "[]"),
        ("body", '{"choices": []}'),
        ("body", '{"choices": [{"message": {"content": null}}]}'),
        ("body", '{"choices": [{"message": {"content": 42}}]}'),
        ("body", '{"choices": 3}'),
        ("body", '{"choices": [{"text": "<1>", "finish_reason": "error"}]}'),
        ("status", 200, {"Content-Encoding": "gzip"}, "damaged"),
        ("hang up",),
    ],
)
def test_what_may_pass_is_tried_again(server, reply):
    server.plan.extend([reply, reply])
    (answer,) = ask(server)
    assert f"<{EXPECTED[0]}>" in answer.text
    assert answer.error is None
    assert len(server.requests) == 3


def test_silence_is_tried_again_and_only_the_last_attempt_is_timed(server):
    server.plan.append(("silence", 0.4))
    (answer,) = ask(server, RequestPolicy(timeout=0.2, attempts=2, first_wait=0.01))
    assert f"<{EXPECTED[0]}>" in answer.text
    assert answer.seconds < 0.2


def test_what_does_not_pass_is_an_answer_with_an_error_and_the_next_question_is_asked(server):
    server.plan.extend([("status", 500, {}, "oops\nagain")] * 3)
    first, second = ask(server, count=2)
    assert (first.text, first.error) == ("", r"status 500: oops\nagain")
    assert first.prompt_tokens == len(DOCUMENT.text + QUESTIONS[0]) + CHAT_TEMPLATE_TOKENS
    assert f"<{EXPECTED[1]}>" in second.text
    assert len(server.requests) == 4


def test_a_request_that_cannot_succeed_is_not_repeated(server):
    server.plan.append(("status", 400, {}, "context of 4096 tokens exceeded"))
    (answer,) = ask(server)
    assert answer.error == "status 400: context of 4096 tokens exceeded"
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_address_or_model_ends_the_run_without_showing_the_key(server, status):
    server.plan.append(("status", status, {}, f"incorrect key {KEY}"))
    with pytest.raises(
        ConfigError, match=rf"status {status}: incorrect key \*\*\*.*OPENAI_API_KEY.*'lookup'"
    ):
        ask(server)


def test_no_error_shows_the_key(server):
    server.plan.append(("status", 400, {}, f"x {KEY} y"))
    assert ask(server)[0].error == "status 400: x *** y"


@pytest.mark.parametrize("key", [f"{KEY}\r{KEY}", "sk-ä"])
def test_a_key_that_no_request_can_send_is_refused_without_showing_it(key, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY has characters") as caught:
        EndpointReader(EndpointModel("http://127.0.0.1:9/v1", "m"), len)
    assert "sk-" not in str(caught.value)


def test_a_server_that_was_never_there_ends_the_run():
    policy = RequestPolicy(attempts=2, first_wait=0.01)
    reader = EndpointReader(EndpointModel("http://127.0.0.1:9/v1", "m"), len, policy)
    with pytest.raises(ConfigError, match=r"no connection to http://127\.0\.0\.1:9/v1/chat.*server running"):
        list(reader.answers("d", ["q"], 5))


def test_a_server_that_goes_away_is_an_error_of_the_answer():
    with LineServer() as server:
        reader = EndpointReader(EndpointModel(server.address, "m"), len, QUICK)
        answers = reader.answers(DOCUMENT.text, QUESTIONS[:2], 5)
        assert next(answers)[1].error is None
    ((_, answer),) = answers
    assert answer.error.startswith(f"no connection to {server.address}/chat/completions: ")


@pytest.mark.parametrize(
    "header", ["0.3", lambda: format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)]
)
def test_retry_after_is_kept_to(server, header):
    text = header if isinstance(header, str) else header()
    server.plan.append(("status", 429, {"Retry-After": text}, ""))
    ask(server)
    assert 0.3 <= server.times[1] - server.times[0] < 3


@pytest.mark.parametrize("header", ["soon", "-5", "nan", "inf", "0", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_a_strange_or_past_retry_after_does_no_harm(server, header):
    server.plan.append(("status", 429, {"Retry-After": header}, ""))
    (answer,) = ask(server)
    assert answer.error is None
    assert server.times[1] - server.times[0] < 0.5


def test_an_endless_retry_after_is_cut(server):
    server.plan.append(("status", 429, {"Retry-After": "86400"}, ""))
    (answer,) = ask(server, RequestPolicy(attempts=2, longest_retry_after=0.05))
    assert answer.error is None


def test_waits_double(server):
    server.plan.extend([("status", 500, {}, "")] * 3)
    ask(server, RequestPolicy(attempts=4, first_wait=0.1))
    first, second, third = (after - before for before, after in pairwise(server.times))
    assert 0.07 < first < second < third < 0.7


def test_requests_keep_to_the_rate(server):
    started = time.monotonic()
    ask(server, RequestPolicy(requests_per_minute=300), count=3)
    assert 0.4 <= time.monotonic() - started < 2
    assert min(after - before for before, after in pairwise(server.times)) > 0.15


@pytest.mark.parametrize("address", ["", "localhost:8000/v1", "ftp://host/v1", "http://", "http://[::1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="endpoint"):
        EndpointModel(address, "m")


def test_an_address_with_a_password_is_refused_without_showing_it():
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as caught:
        EndpointModel("http://me:secret@host/v1", "m")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"attempts": 0}, "attempts 0"),
        ({"requests_per_minute": -1}, "requests_per_minute is -1"),
        ({"concurrency": 0}, "concurrency is 0"),
    ],
)
def test_a_retry_policy_without_attempts_or_time_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        RequestPolicy(**settings)


@pytest.mark.parametrize("reported", [None, 0])
def test_usage_that_is_no_number_is_counted_instead(server, reported):
    usage = {"prompt_tokens": reported}
    server.plan.append(("body", json.dumps({"choices": [{"message": {"content": "7"}}], "usage": usage})))
    (answer,) = ask(server)
    assert answer.prompt_tokens == len(DOCUMENT.text + QUESTIONS[0]) + CHAT_TEMPLATE_TOKENS


def test_the_first_question_goes_alone_and_the_others_several_at_a_time(server):
    server.delay = 0.05
    answers = ask(server, RequestPolicy(concurrency=4), count=12)
    assert all(f"<{number}>" in answer.text for number, answer in zip(EXPECTED, answers, strict=True))
    assert server.at_once[:2] == [1, 1]
    assert max(server.at_once) == 4
    assert server.times[1] - server.times[0] > 0.05


@pytest.mark.parametrize(
    ("delay", "capacity", "retry_after", "most"), [(0.02, 2, "", 12), (0.1, 1, "0.02", 30)]
)
def test_there_are_fewer_at_a_time_while_the_server_has_too_many(server, delay, capacity, retry_after, most):
    server.delay, server.capacity, server.retry_after = delay, capacity, retry_after
    answers = ask(server, RequestPolicy(concurrency=8, first_wait=0.02, attempts=20), count=12)
    assert all(answer.error is None for answer in answers)
    refused = [number for number in server.at_once if number > capacity]
    assert len(refused) < most, "with 8 at a time, nearly each is refused several times"
    assert max(server.at_once[-4:]) <= capacity + 1


def test_an_interrupted_run_waits_for_no_retry(server):
    reader = EndpointReader(EndpointModel(server.address, "m"), len, QUICK)
    with closing(reader.answers(DOCUMENT.text, QUESTIONS[:4], 5)) as answers:
        server.plan.extend([("lookup",), ("lookup",), *[("status", 429, {"Retry-After": "60"}, "")] * 2])
        assert [next(answers)[1].error for _ in range(2)] == [None, None]
        started = time.monotonic()
    assert time.monotonic() - started < 2


def test_a_truncated_prompt_is_an_error_and_the_others_are_not_sent(server):
    server.context = 500
    answers = ask(server, count=3)
    for answer in answers:
        assert answer.text == ""
        assert answer.error is not None
        assert re.match(r"the server has read 500 tokens of a prompt of about \d,\d+: it trunc", answer.error)
    assert len(server.requests) == 1


def test_an_answer_at_the_limit_of_tokens_is_unfinished(server):
    server.starving = True
    (answer,) = ask(server)
    assert answer.unfinished == "the answer was cut off at the limit of tokens"
    assert answer.error is None
    (bare,) = ask(server, completions=True)  # which never comes to an end
    assert bare.unfinished is None


@pytest.mark.parametrize("content", [None, ""])
def test_reasoning_that_leaves_no_tokens_for_the_answer_is_noticed(server, content):
    message = {"content": content, "reasoning_content": "Let me see"}
    reply = {"choices": [{"message": message, "finish_reason": "length"}]}
    server.plan.append(("body", json.dumps(reply)))
    (answer,) = ask(server)
    assert answer.unfinished == "all tokens of the answer went into reasoning"


def chunk(finish_reason=None, **delta):
    return json.dumps({"choices": [{"delta": delta, "finish_reason": finish_reason}]})


def test_a_stream_that_was_not_asked_for_is_read(server):
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 4000, "completion_tokens": 2}})
    last = chunk("stop", content="2>\u2028").replace("\\u2028", "\u2028")
    server.plan.append(("stream", [chunk(content="<4"), last, usage, "[DONE]"]))
    (answer,) = ask(server)
    assert (answer.text, answer.prompt_tokens, answer.answer_tokens) == ("<42>\u2028", 4000, 2)


@pytest.mark.parametrize("lines", [[chunk(content="<4")], [chunk(content="<4"), "{half"], []])
def test_a_stream_that_stops_half_way_is_tried_again(server, lines):
    server.plan.append(("stream", lines))
    (answer,) = ask(server)
    assert f"<{EXPECTED[0]}>" in answer.text


def usage(prompt, cached=0):
    return {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}


def other_chunk(text):
    return json.dumps({"choices": [{"index": 1, "delta": {"content": text}, "finish_reason": None}]})


@pytest.mark.parametrize(
    "lines",
    [
        [chunk(content="<4"), chunk("stop", content="2>")],  # without [DONE], but with its end
        [chunk(content="<4"), other_chunk("9"), chunk("stop", content="2>"), other_chunk("9"), "[DONE]"],
        [chunk(content="<42>"), chunk("stop"), chunk("stop", content=""), "[DONE]"],
    ],
)
def test_a_stream_whose_answer_is_whole_is_read(server, lines):
    server.plan.append(("stream", lines))
    assert ask(server)[0].text == "<42>"
    assert len(server.requests) == 1


def test_the_first_of_several_answers_is_read(server):
    choices = [{"index": n, "message": {"content": text}} for n, text in ((1, "<7>"), (0, "<42>"))]
    server.plan.append(("body", json.dumps({"choices": choices})))
    assert ask(server)[0].text == "<42>"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            ("stream", [chunk("stop", content="<42>"), chunk("stop", content="<42>"), "[DONE]"]),
            "a stream that goes on after the end of its answer",
        ),
        (("stream", [chunk(content="<42>"), "[DONE]"]), "a stream that stops before the answer does"),
        (
            (
                "stream",
                [json.dumps({"choices": [], "usage": usage(n)}) for n in (4000, 5000)] + [chunk("stop")],
            ),
            "a stream that reports 4000 and 5000 tokens for one prompt",
        ),
        (
            ("body", json.dumps({"choices": [{"text": "<1>"}, {"text": "<2>"}]})),
            "a reply with 2 answers in place of one",
        ),
        (
            ("body", json.dumps({"choices": [{"text": "<1>"}], "usage": usage(4000, cached=4001)})),
            "a reply with 4001 cached tokens of 4000 tokens of the prompt",
        ),
        (
            ("half", '{"choices": [{"text": "<1>"}]}'),
            r"/chat/completions stops before the end of its reply: .*received 30 bytes",
        ),
    ],
)
def test_a_reply_that_repeats_contradicts_itself_or_stops_is_tried_again_and_then_named(
    server, reply, message
):
    server.plan.append(reply)
    assert f"<{EXPECTED[0]}>" in ask(server)[0].text
    server.plan.extend([reply] * QUICK.attempts)
    (answer,) = ask(server)
    assert answer.text == ""
    assert answer.error is not None
    assert re.search(message, answer.error)


def test_cached_and_answered_tokens_are_kept(server):
    (answer,) = ask(server)
    assert answer.cached_tokens == answer.prompt_tokens // 2
    assert answer.answer_tokens == len(answer.text)


def test_more_fields_go_into_requests_and_null_takes_one_away(server):
    ask(server, fields={"max_tokens": None, "max_completion_tokens": 9, "top_k": 1})
    (request,) = server.requests
    assert "max_tokens" not in request
    assert (request["max_completion_tokens"], request["top_k"], request["temperature"]) == (9, 1, 0)


def test_fields_of_the_question_are_not_replaced():
    with pytest.raises(ConfigError, match="'messages' of a request is this program's"):
        EndpointModel("http://localhost:1/v1", "m", fields={"messages": []})


def test_a_tokenizer_counts_with_bos_and_neither_cuts_nor_fills_up(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert token_counter(path)("one two three four five six") == 7


def test_a_folder_without_tokenizer_and_a_file_that_is_none_are_named(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer.json does not exist"):
        token_counter(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"tokenizer.json cannot be read as a tokenizer"):
        token_counter(tmp_path)


def test_the_estimate_is_a_little_above_llamas_tokens_a_line():
    # LLaMA has 23.18 on average in LongChat's files.
    document = plan_documents("LRT-NL", "4k", 0, 1, 1)[0]
    lines = estimated_tokens(document.build(2000).text) - estimated_tokens(document.build(1000).text)
    assert 23.18 < lines / 1000 < 24.2
    assert token_counter(None) is estimated_tokens
