"""Requests of the harness give the engine's scores and answers; tasks of our own, where it is installed."""

import json
import math
import sys

import pytest

from agentic_ring.data.text.chat import Turn, chat_template
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ArgumentError, ConfigError, MissingExtraError
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.models.llama import load_pretrained
from evals import harness
from evals.harness_model.engine_requests import HarnessRequests, chat_prompt, read_settings
from tests.data.text.tokenizers_for_tests import byte_level
from tests.models.tiny_llama import write_tiny_model

CONTEXT, CHUNK = 128, 32
QUESTION = "the other one and the user"
TASKS = {
    "our_choices": {
        "output_type": "multiple_choice",
        "doc_to_target": 0,
        "doc_to_choice": [" yes", " no", " maybe"],
        "metric_list": [{"metric": "acc"}],
    },
    "our_answers": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["z"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "our_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), CONTEXT)


@pytest.fixture(scope="module")
def opened(folder):
    engine, tokenizer = TextEngine(load_pretrained(folder), chunk=CHUNK), Tokenizer.load(folder)
    return HarnessRequests(engine, tokenizer, tokenizer.eos_ids, CONTEXT), engine, tokenizer


def test_scores_are_the_engines(opened):
    requests, engine, tokenizer = opened
    context = tokenizer.encode(QUESTION * 5, bos=True)
    assert len(context) > CHUNK
    pairs = [(context, tokenizer.encode(text)) for text in (" yes", " no", " or not")]
    pairs.append((context[:5], tokenizer.encode("er")))
    expected = [(score.total, score.greedy) for score in engine.score(pairs)]
    found = list(requests.scores(pairs))
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    with pytest.raises(ArgumentError, match=f"take {CONTEXT + 1} tokens, but the limit is {CONTEXT}; "):
        list(requests.scores([([1], [2] * 10), ([1], [2] * CONTEXT)]))


def test_an_answer_is_the_engines_up_to_its_stop_string(opened):
    requests, engine, tokenizer = opened
    (whole,) = engine.generate([tokenizer.encode(QUESTION, bos=True)], 12)
    text = tokenizer.decode(whole.tokens)
    greedy = {"do_sample": False, "temperature": 0.7, "max_gen_toks": 12}
    assert requests.answer(QUESTION, greedy) == text
    # What begins with the token that begins texts gets no second one.
    assert requests.answer("<s>" + QUESTION, greedy) == text
    assert requests.answer(QUESTION, greedy | {"until": text[4:6]}) == text[: text.index(text[4:6])]
    end = whole.tokens[6]
    ended = HarnessRequests(engine, tokenizer, [end], CONTEXT).answer(QUESTION, greedy)
    assert ended == tokenizer.decode(whole.tokens[: whole.tokens.index(end)])
    length = len(tokenizer.encode_prompt(QUESTION))
    with pytest.raises(ArgumentError, match=f"take {length + CONTEXT} tokens, but the limit is {CONTEXT}; "):
        requests.answer(QUESTION, {"max_gen_toks": CONTEXT})


def test_settings_of_tasks_are_understood_or_refused():
    settings = {"until": ["\n", "."], "max_gen_toks": 5, "temperature": 0.0, "do_sample": False}
    assert read_settings(settings, 3) == (5, ("\n", "."), Sampling(0.0, 1.0, 3))
    drawn = {"until": "a", "max_tokens": 7, "temperature": 0.5, "do_sample": True, "top_p": 0.9}
    assert read_settings(drawn, 3) == (7, ("a",), Sampling(0.5, 0.9, 3))
    assert read_settings({}, 0) == (256, (), Sampling())
    with pytest.raises(ConfigError, match="the task sets num_beams for its answers"):
        read_settings({"num_beams": 4}, 0)


def test_a_chat_goes_on_where_an_answer_was_begun():
    for name in ("vicuna_v1.1", "llama-3", "plain"):
        template = chat_template(name, byte_level())
        question = Turn("user", "How many?")
        asked = chat_prompt(template, [question])
        assert asked == template.prompt([question])
        begun = chat_prompt(template, [question, Turn("assistant", "There are")])
        assert begun.startswith(asked)
        assert begun.endswith("There are")


@pytest.mark.filterwarnings("default")
def test_the_harness_finds_what_the_engine_says(folder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval", None)
        with pytest.raises(MissingExtraError, match=r"pip install 'agentic_ring\[harness\]'"):
            harness.main(folder, "anything")
    pytest.importorskip("lm_eval")
    with pytest.raises(ConfigError, match="the harness has no tasks not_there"):
        harness.main(folder, "not_there")
    engine, tokenizer = TextEngine(load_pretrained(folder)), Tokenizer.load(folder)
    questions = ["the other one", "is it the user?"]
    prompts = [tokenizer.encode(question, bos=True) for question in questions]
    written = [tokenizer.decode(each.tokens) for each in engine.generate(prompts, 8)]
    file = tmp_path / "questions.jsonl"
    answers = [text.split("z")[0] for text in written]
    answers[1] += "."  # which is wrong
    rows = [{"question": q, "answer": a} for q, a in zip(questions, answers, strict=True)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}}
    source |= {"test_split": "test", "doc_to_text": "{{question}}"}
    for name, task in TASKS.items():  # JSON is YAML
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))
    output = tmp_path / "results.json"
    harness.main(folder, ",".join(TASKS), include_path=tmp_path, output=output)
    results = json.loads(output.read_text())["results"]
    assert results["our_answers"]["exact_match,none"] == 0.5
    chosen = []
    for prompt in prompts:
        pairs = [(prompt, tokenizer.encode(text)) for text in (" yes", " no", " maybe")]
        totals = [score.total for score in engine.score(pairs)]
        chosen.append(totals.index(max(totals)) == 0)
    assert results["our_choices"]["acc,none"] == sum(chosen) / 2
    total = sum(engine.score([(prompt[:1], prompt[1:])])[0].total for prompt in prompts)
    words = sum(len(question.split()) for question in questions)
    assert results["our_texts"]["word_perplexity,none"] == pytest.approx(math.exp(-total / words), rel=1e-3)


def test_prompts_of_ruler_leave_room_unless_lengths_are_given():
    assert harness._ruler_lengths(None, 4096 + 256) == [4096]
    assert harness._ruler_lengths(None, 4096 + 255) == [2048]
    assert harness._ruler_lengths("4k, 512k", 10) == [4096, 524288]
