"""The retriever that comes with the project: it opens, is labelled, and answers what it was trained for."""

import pytest

from agentic_ring.errors import ConfigError
from evals.common.results import read_results
from evals.line_retrieval import main
from evals.lines.local_reader import EMBEDDED


def accuracy(contexts: str, questions: int, output) -> list[float]:
    assert main(contexts, devices=8, num_samples=questions, seed=5, output=output) == 0
    results = read_results(output / "results.json")
    assert results.config["trained_on_task"] is True
    return [results.figure(f"accuracy/{name}").value for name in contexts.split(",")]


@pytest.mark.slow
def test_it_answers_questions_about_short_records(tmp_path):
    assert accuracy("1k", 12, tmp_path) == [1.0]


@pytest.mark.slow
def test_it_reaches_95_percent_at_4k_and_90_at_16k(tmp_path):
    short, long = accuracy("4k,16k", 50, tmp_path)
    assert short >= 0.95
    assert long >= 0.9


def test_it_is_small_and_says_what_it_is():
    assert sum(file.stat().st_size for file in EMBEDDED.iterdir()) < 8_000_000
    card = (EMBEDDED / "README.md").read_text()
    assert "experiments/train_retriever.py" in card


def test_keys_that_it_was_not_trained_on_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="line_idx is LRT-UUID; the embedded retriever knows only LRT-NL"):
        main("1k", line_idx="LRT-UUID", devices=8, output=tmp_path)
