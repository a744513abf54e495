"""Tasks of our own, run by the harness itself: where its package is installed, with `.[harness]`."""

import json
import math
import sys

import pytest

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ConfigError, MissingExtraError
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.models.llama import load_pretrained
from evals import harness
from tests.models.tiny_llama import write_tiny_model

CONTEXT = 128
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{more}
"""
CHOICES = """
doc_to_target: 0
doc_to_choice: [" yes", " no", " maybe"]
metric_list: [{metric: acc}]
"""
ANSWERS = """
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["z"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
TEXTS = """
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), CONTEXT)


def test_without_the_package_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentic_ring\[harness\]'"):
        harness.main(folder, "anything")


@pytest.mark.filterwarnings("default")
def test_the_harness_finds_what_the_engine_says(folder, tmp_path):
    pytest.importorskip("lm_eval")
    engine, tokenizer = TextEngine(load_pretrained(folder)), Tokenizer.load(folder)
    questions = ["the other one", "is it the user?"]
    prompts = [tokenizer.encode(question, bos=True) for question in questions]
    written = [tokenizer.decode(each.tokens) for each in engine.generate(prompts, 8)]
    file = tmp_path / "questions.jsonl"
    rows = [
        {"question": question, "answer": text.split("z")[0]}
        for question, text in zip(questions, written, strict=True)
    ]
    rows[1]["answer"] += "."  # which is wrong
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {
        "our_choices": ("multiple_choice", CHOICES),
        "our_answers": ("generate_until", ANSWERS),
        "our_texts": ("loglikelihood_rolling", TEXTS),
    }
    for name, (kind, more) in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, file=file, kind=kind, more=more))
    output = tmp_path / "results.json"
    harness.main(folder, ",".join(tasks), include_path=tmp_path, output=output)
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


def test_tasks_that_do_not_exist_are_named(folder):
    pytest.importorskip("lm_eval")
    with pytest.raises(ConfigError, match="the harness has no tasks not_there"):
        harness.main(folder, "not_there")


@pytest.mark.parametrize(
    ("asked", "max_length", "lengths"),
    [(None, 4096 + 256, [4096]), (None, 4096 + 255, [2048]), ("4k, 512k", 10, [4096, 524288])],
)
def test_prompts_of_ruler_leave_room_unless_lengths_are_given(asked, max_length, lengths):
    assert harness._ruler_lengths(asked, max_length) == lengths
