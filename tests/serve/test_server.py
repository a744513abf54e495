"""The OpenAI client and the line retrieval reader get the answers of the engine from a real server."""

import json
import re
import shutil
import subprocess
import sys
import time

import httpx
import numpy as np
import openai
import pytest

from agentic_ring.errors import ConfigError, DataError, MissingExtraError
from agentic_ring.inference.prefix_cache import PrefixCache
from agentic_ring.serve.__main__ import main
from agentic_ring.serve.generation import TextGenerator
from agentic_ring.serve.prompt_process import PromptProcess
from agentic_ring.serve.prompts import PromptLimits
from evals import line_retrieval
from tests.serve.running_server import BODY_BYTES, CHUNK, CONTEXT, serving

PROMPT = "the other one"
LONG = "a record of lines, one after the other: " * 6
NEW = 12


@pytest.fixture(scope="module")
def root(engine, tokenizer, prompts):
    with serving(TextGenerator(engine, tokenizer, CONTEXT), prompts, queue_size=0) as root:
        yield root


@pytest.fixture(scope="module")
def address(root):
    return f"{root}/v1"


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answer(engine, tokenizer):
    """Greedy answers of the engine, as text."""

    def text(prompt: str, new: int = NEW) -> str:
        tokens = tokenizer.encode(prompt, bos=not prompt.startswith("<s>"))
        (written,) = engine.generate([tokens], new, stop_tokens=tokenizer.eos_ids)
        return tokenizer.decode(written.tokens)

    return text


def complete(client, prompt, **options):
    options = {"max_tokens": NEW, "temperature": 0} | options
    return client.completions.create(model="tiny", prompt=prompt, **options)


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_completions_are_those_of_the_engine(client, answer, tokenizer):
    several = complete(client, [PROMPT, "the user"])
    assert [choice.text for choice in several.choices] == [answer(PROMPT), answer("the user")]
    assert [choice.index for choice in several.choices] == [0, 1]
    assert {choice.finish_reason for choice in several.choices} == {"length"}
    ids = tokenizer.encode(PROMPT, bos=True)
    assert complete(client, ids).choices[0].text == answer(PROMPT)
    assert several.usage.completion_tokens == 2 * NEW
    assert several.usage.prompt_tokens == len(ids) + len(tokenizer.encode("the user", bos=True))
    assert several.usage.total_tokens == several.usage.prompt_tokens + 2 * NEW
    # A text that begins with the BOS token gets no second one.
    assert complete(client, "<s>" + PROMPT).usage.prompt_tokens == len(ids)


def test_an_answer_ends_before_a_stop_string(client, answer):
    whole = answer(PROMPT)
    stop = whole[4:6]
    choice = complete(client, PROMPT, stop=[stop, "not there"]).choices[0]
    assert (choice.text, choice.finish_reason) == (whole[: whole.index(stop)], "stop")


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


def test_a_prompt_is_scored_without_an_answer(client, tokenizer):
    choice = complete(client, PROMPT, max_tokens=0, logprobs=0, echo=True).choices[0]
    assert choice.text == PROMPT
    # The BOS token was not given and is not returned.
    assert "".join(choice.logprobs.tokens) == PROMPT
    assert len(choice.logprobs.token_logprobs) == len(tokenizer.encode(PROMPT))
    assert None not in choice.logprobs.token_logprobs
    assert choice.logprobs.top_logprobs is None


def test_log_probabilities_of_an_answer_stop_where_it_stops(client, answer):
    whole = answer(PROMPT)
    choice = complete(client, PROMPT, stop=whole[4:6], logprobs=1).choices[0]
    assert choice.text == whole[: whole.index(whole[4:6])]
    # The last one may extend into the stop string.
    assert "".join(choice.logprobs.tokens).startswith(choice.text)
    assert choice.logprobs.text_offset[-1] < len(PROMPT + choice.text)
    assert choice.logprobs.text_offset[0] == len(PROMPT)
    likeliest = [max(top.values()) for top in choice.logprobs.top_logprobs]
    assert choice.logprobs.token_logprobs == likeliest


def test_samples_depend_on_the_seed(client):
    def drawn(seed):
        return complete(client, PROMPT, temperature=1, top_p=0.9, seed=seed).choices[0].text

    assert drawn(2**40 + 1) == drawn(2**40 + 1)
    assert len({drawn(seed) for seed in range(4)}) > 1


def test_chats_are_written_by_the_template(client, answer):
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    reply = client.chat.completions.create(model="tiny", messages=messages, max_tokens=NEW, temperature=0)
    assert reply.choices[0].message.content == answer(f"<s>user: {PROMPT}\nassistant:")
    assert reply.object == "chat.completion"


def test_streams_hold_the_same_text(client, answer):
    events = list(complete(client, PROMPT, stream=True))
    assert "".join(event.choices[0].text for event in events) == answer(PROMPT)
    reasons = [event.choices[0].finish_reason for event in events]
    assert [reason for reason in reasons if reason] == ["length"]
    assert len(events) > NEW // 2
    messages = [{"role": "user", "content": PROMPT}]
    options = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": NEW}
    events = client.chat.completions.create(**options, stream=True)
    streamed = "".join(event.choices[0].delta.content or "" for event in events)
    assert streamed == client.chat.completions.create(**options).choices[0].message.content


def test_a_long_text_is_read_once_for_all_that_begins_with_it(engine, client, answer, tokenizer):
    last = PrefixCache(engine)
    read = []
    prompts = [tokenizer.encode(LONG + question, bos=True) for question in ("who?", "who is it?", "when")]
    for prompt in prompts:
        document, rest = last.split(prompt, read.append)
        assert [*prompts[0][: document.length], *rest] == prompt or document.length + len(rest) == len(prompt)
        assert 0 < len(rest) <= CHUNK
    assert read[-1] == len(prompts[0]) - 1
    assert read == sorted(set(read))
    # Another text replaces it, and a short one does not.
    assert last.split(prompts[0][:CHUNK], read.append) == (None, prompts[0][:CHUNK])
    count = len(read)
    last.split([5, *prompts[0]], read.append)
    assert len(read) > count
    for question in ("who?", "who is it?"):
        assert complete(client, LONG + question).choices[0].text == answer(LONG + question)


@pytest.mark.slow
def test_line_retrieval_uses_the_server(address, folder, tmp_path):
    for completions in (True, False):
        output = tmp_path / str(completions)
        status = line_retrieval.main(
            ctx="1k",
            model="tiny",
            endpoint=address,
            completions=completions,
            tokenizer=folder,
            num_samples=2,
            questions_per_document=2,
            max_new_tokens=4,
            output=output,
        )
        # The untrained model never ends an answer, which a chat should do.
        assert status == (0 if completions else 1)
        rows = [json.loads(line) for line in (output / "predictions" / "1k.jsonl").read_text().splitlines()]
        assert [row["error"] for row in rows] == [None, None]
        assert [row["unfinished"] is None for row in rows] == [completions] * 2
        assert all(900 < row["prompt_tokens"] <= 1020 for row in rows)


INVALID_COMPLETIONS = [
    ({"prompt": "a", "n": 2}, "n is not supported"),
    ({"prompt": "a", "best_of": 3}, "best_of is not supported"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [64]}, "token 64 is outside the model's vocabulary of 64"),
    ({"prompt": [-1]}, "prompt.* greater than or equal to 0"),
    ({"prompt": "a", "temperature": -1}, "temperature: .* greater than or equal to 0"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "logprobs": 5}, "logprobs: .* less than or equal to 1"),
    ({"prompt": "a", "stream": True, "echo": True}, "a stream supports one prompt"),
    ({"prompt": "a", "max_tokens": CONTEXT}, f"together they may be {CONTEXT}"),
    ({}, "prompt: Field required"),
]
INVALID_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "the user first"),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools is not supported"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        *(("completions", body, 400, message) for body, message in INVALID_COMPLETIONS),
        ("completions", {"prompt": ""}, 200, ""),
        (
            "completions",
            {"prompt": "a", "model": "gpt"},
            404,
            "the model 'gpt' is not served here, but 'tiny' is",
        ),
        ("completions", {"prompt": "a" * BODY_BYTES}, 413, f"larger than {BODY_BYTES} bytes"),
        *(("chat/completions", body, 400, message) for body, message in INVALID_CHATS),
        ("embeddings", {}, 404, "Not Found"),
    ],
)
def test_invalid_requests_are_errors_in_openais_format(path, body, status, message, address):
    reply = httpx.post(f"{address}/{path}", json={"model": "tiny", "max_tokens": 2, **body}, timeout=60)
    assert reply.status_code == status
    if status != 200:
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in reply.text
        assert re.search(message, error["message"])


def test_a_body_that_is_not_json_is_refused(address):
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{address}/completions", content=b"{", headers=headers)
    assert reply.status_code == 400
    assert "JSON" in reply.json()["error"]["message"]


def test_a_full_queue_says_when_to_retry_and_a_disconnect_frees_a_place(client):
    stream = complete(client, PROMPT, stream=True, max_tokens=1900)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as refused:
        complete(client, PROMPT)
    assert int(refused.value.response.headers["Retry-After"]) >= 1
    assert refused.value.code == "busy"
    stream.close()
    patient = client.with_options(max_retries=10)
    started = time.monotonic()
    assert complete(patient, PROMPT).choices[0].finish_reason == "length"
    assert time.monotonic() - started < 60


def test_without_a_template_chats_are_refused(engine, folder, tokenizer):
    with (
        PromptProcess(folder, None, PromptLimits.of(tokenizer, CONTEXT)) as prompts,
        serving(TextGenerator(engine, tokenizer, CONTEXT), prompts) as root,
    ):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        reply = httpx.post(f"{root}/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert "start the server with --template" in reply.json()["error"]["message"]


def test_an_internal_error_reveals_nothing(engine, tokenizer, prompts):
    class Broken(TextGenerator):
        def answer(self, *arguments, **options):
            raise RuntimeError("secret")

    with serving(Broken(engine, tokenizer, CONTEXT), prompts) as root:
        reply = httpx.post(f"{root}/v1/completions", json={"model": "tiny", "prompt": "a"})
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert reply.json()["error"]["type"] == "server_error"


def test_the_command_serves_a_folder(folder):
    command = [sys.executable, "-m", "agentic_ring.serve", f"--model={folder}", "--port=0", "--name=it"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stderr.readline, "")
            said = next(line for line in lines if "running on" in line)
            address = next(word for word in said.split() if word.startswith("http"))
            assert address.startswith("http://127.0.0.1:")
            models = httpx.get(f"{address}/v1/models").json()
            assert [model["id"] for model in models["data"]] == ["it"]
        finally:
            process.terminate()
            process.stderr.close()
    assert process.wait(30) in (0, -15)


def test_the_command_refuses_a_tokenizer_without_the_tokens_of_its_template(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("<|im_start|>user {{ messages[0].content }}<|im_end|>")
    with pytest.raises(DataError, match=r"writes <\|im_start\|>, <\|im_end\|>, which the tokenizer does not"):
        main(tmp_path)


def test_the_command_says_what_is_missing(folder, monkeypatch):
    with pytest.raises(ConfigError, match=f"made for {CONTEXT}; give --allow-extrapolation"):
        main(folder, max_context=CONTEXT + 1)
    with pytest.raises(ConfigError, match="--batch-size is 0"):
        main(folder, batch_size=0)
    with pytest.raises(ConfigError, match="--queue-size is -1"):
        main(folder, queue_size=-1)
    with pytest.raises(ConfigError, match="--port is 70000"):
        main(folder, port=70_000)
    # Imports then behave as if the package were missing.
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentic_ring\[serve\]'"):
        main(folder)
