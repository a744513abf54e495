"""Requests of the harness give the engine's scores and answers, without truncation or repetition."""

import pytest

from agentic_ring.data.text.chat import Turn, chat_template
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ArgumentError, ConfigError
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.models.llama import load_pretrained
from evals.harness_model.engine_requests import Generation, HarnessRequests, chat_prompt
from tests.data.text.tokenizers_for_tests import byte_level
from tests.models.tiny_llama import write_tiny_model

LIMIT, CHUNK = 100, 32
QUESTION = "the other one and the user"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), 128)
    engine, tokenizer = TextEngine(load_pretrained(folder), chunk=CHUNK), Tokenizer.load(folder)
    return HarnessRequests(engine, tokenizer, LIMIT), engine, tokenizer


@pytest.mark.parametrize("times", [1, 5], ids=["short", "long"])
def test_scores_are_the_engines(opened, times):
    requests, engine, tokenizer = opened
    context = tokenizer.encode(QUESTION * times, bos=True)
    assert (len(context) > CHUNK) == (times > 1)
    pairs = [(context, tokenizer.encode(text)) for text in (" yes", " no", " or not")]
    pairs.append((context[:5], tokenizer.encode("er")))
    expected = [(score.total, score.greedy) for score in engine.score(pairs)]
    found = list(requests.scores(pairs))
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_an_answer_is_the_engines_up_to_its_stop_string(opened):
    requests, engine, tokenizer = opened
    (whole,) = engine.generate([tokenizer.encode(QUESTION, bos=True)], 12)
    text = tokenizer.decode(whole.tokens)
    greedy = {"do_sample": False, "temperature": 0.7, "max_gen_toks": 12}
    assert requests.answer(QUESTION, Generation.from_settings(greedy, 0)) == text
    # What begins with the token that begins texts gets no second one.
    assert requests.answer("<s>" + QUESTION, Generation.from_settings(greedy, 0)) == text
    stopped = requests.answer(QUESTION, Generation.from_settings(greedy | {"until": text[4:6]}, 0))
    assert stopped == text[: text.index(text[4:6])]


def test_what_is_too_long_is_an_error(opened):
    requests, _, tokenizer = opened
    length = len(tokenizer.encode_prompt(QUESTION))
    with pytest.raises(ArgumentError, match=f"take {length + 90} tokens, but the limit is {LIMIT}; "):
        requests.answer(QUESTION, Generation.from_settings({"max_gen_toks": 90}, 0))
    with pytest.raises(ArgumentError, match="take 101 tokens"):
        list(requests.scores([([1], [2] * 10), ([1], [2] * 100)]))


def test_settings_of_tasks_are_understood_or_refused():
    until = ["\n", "."]
    settings = {"until": until, "max_gen_toks": 5, "temperature": 0.0, "do_sample": False}
    assert Generation.from_settings(settings, 3) == Generation(5, ("\n", "."), Sampling(0.0, 1.0, 3))
    drawn = {"until": "a", "max_tokens": 7, "temperature": 0.5, "do_sample": True, "top_p": 0.9}
    assert Generation.from_settings(drawn, 3) == Generation(7, ("a",), Sampling(0.5, 0.9, 3))
    assert Generation.from_settings({}, 0) == Generation(256, (), Sampling())
    with pytest.raises(ConfigError, match="the task sets num_beams for its answers"):
        Generation.from_settings({"num_beams": 4}, 0)


@pytest.mark.parametrize("name", ["vicuna_v1.1", "llama-3", "plain"])
def test_a_chat_goes_on_where_an_answer_was_begun(name):
    template = chat_template(name, byte_level())
    question = Turn("user", "How many?")
    asked = chat_prompt(template, [question])
    assert asked == template.prompt([question])
    begun = chat_prompt(template, [question, Turn("assistant", "There are")])
    assert begun.startswith(asked)
    assert begun.endswith("There are")
