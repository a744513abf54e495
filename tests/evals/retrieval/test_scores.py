"""Figures, tables, files and plots of both reports."""

import json
from dataclasses import replace

import pytest

from agentic_ring.errors import DataError
from agentic_ring.results.rows import read_rows
from evals.retrieval.answers import Prediction, SetScore
from evals.retrieval.reports import LineReport, effective_length, plot_word_partners, ruler_scores


def answered(case, expected, text, **fields):
    common = {"prompt_tokens": 4000, "seconds": 0.5, "document": 0, "task": "line", "prompt_digest": "00"}
    given = {"text": text, "case": case, "depth": case / 1000, "expected": (str(expected),), "score": 0.0}
    return Prediction(**{**common, **given, **fields})


RIGHT = answered(0, 2416, "line key-0 is <2416>.")
WRONG = answered(1, 5, "line 5\nis 7", value_duplicates=2)
NO_NUMBER = answered(2, 9, "I cannot say.")
FAILED = replace(answered(3, 9, ""), error="status 503: busy")
SCORE = SetScore("4k", 169.0, [RIGHT, WRONG, NO_NUMBER, FAILED])


def figures(score):
    return {figure.name: figure.value for figure in LineReport().figures([score])}


def table_row(score):
    return LineReport().table([score], "x").rows[0]


def test_failed_questions_are_in_no_accuracy_and_unparsable_answers_are_wrong(tmp_path):
    """Also in the summary, which has RULER's columns, and the answers as LongEval writes them."""
    assert (SCORE.right("last"), SCORE.right("first")) == ([True, False, False], [False, True, False])
    expected = {"unparsable": 1, "failed": 1, "value_duplicates": 1, "prompt_tokens": 4000}
    assert figures(SCORE).items() >= {f"{name}/4k": value for name, value in expected.items()}.items()
    (tmp_path / "predictions").mkdir()
    failed = replace(SCORE, name="8k", predictions=[FAILED])
    LineReport().write(tmp_path, "a model", [SCORE, failed])
    rows = read_rows(tmp_path / "summary.csv")
    assert [row["Tasks"] for row in rows] == ["lines_4k", "lines_8k"]
    columns = ("Score", "Nulls", "Low", "High", "Last", "First", "Failed", "Duplicates", "Lines")
    found = ("33.33", "1/3", "6.15", "79.23", "33.33", "33.33", "1", "1", "169.0")
    assert tuple(rows[0][name] for name in columns) == found
    for name in ("accuracy.png", "depths.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "word_partners.png").exists()
    assert not any(name.startswith("accuracy") for name in figures(failed))
    assert table_row(failed)["accuracy, last number (95%)"] == "none"
    assert (tmp_path / "predictions" / "8k_response.txt").read_text() == ""
    assert (tmp_path / "predictions" / "4k_response.txt").read_text() == (
        "Label: 2416, Predict: line key-0 is <2416>., Parsed: 2416, prompt length: 4000\n"
        "Label: 5, Predict: line 5 is 7, Parsed: 7, prompt length: 4000\n"
        "Label: 9, Predict: I cannot say., Parsed: -1, prompt length: 4000\n"
        "Accuracy: 0.3333333333333333"
    )


def test_shares_are_drawn_by_lines_that_share_a_word(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.text", lambda axes, x, y, text, **_: drawn.append((y, text)))
    counts = {RIGHT: 0, WRONG: 3, NO_NUMBER: 4, replace(RIGHT, case=4): 128, replace(WRONG, case=5): 500}
    rows = [replace(row, word_partners=count) for row, count in counts.items()]
    plot_word_partners(tmp_path / "some.png", "a model", [replace(SCORE, predictions=rows)], "last")
    assert drawn == [(0, "1/1"), (1, "0/1"), (2, "0/1"), (3, "0/0"), (4, "0/0"), (5, "1/2")]


def test_the_time_to_read_a_document_stands_apart_where_it_is_known():
    read = [replace(RIGHT, reading_seconds=60.0), replace(WRONG, reading_seconds=80.0), NO_NUMBER]
    score = replace(SCORE, predictions=read)
    assert figures(score)["reading_seconds/4k"] == 70.0
    assert figures(score)["seconds_per_question/4k"] == 0.5
    assert table_row(score)["reading, s"] == "70"
    assert "reading_seconds/4k" not in figures(SCORE)
    assert "reading, s" not in table_row(SCORE)


def rung(name: str, score: float, count: int = 100, task: str = "line") -> SetScore:
    rows = [answered(case, 1, "", score=float(case < score * count), task=task) for case in range(count)]
    return SetScore(name, 100.0, rows)


def test_the_effective_length_is_the_last_before_the_first_fall():
    ladder = [rung("4k", 1.0), rung("8k", 0.97), rung("16k", 0.9), rung("32k", 1.0)]
    assert effective_length(ladder) == "8k"  # at 16k, 0.9 of 100 may be as little as 0.826
    assert effective_length(ladder, "line") == "8k"
    assert effective_length([rung("4k", 0.5, 400), rung("8k", 0.55, 400)]) == "8k"
    assert effective_length([rung("4k", 1.0, count=10)]) == "none"  # too few questions to tell
    assert effective_length(ladder[1:]) == ""


def test_the_harness_results_are_read(tmp_path):
    path = tmp_path / "harness.json"
    found = {"niah_single_1": {"4096,none": 0.5, "8192,none": -1, "4096_stderr,none": "N/A", "alias": "x"}}
    path.write_text(json.dumps({"results": found}))
    assert ruler_scores(path) == {"niah_single_1": {4096: 0.5}}
    path.write_text(json.dumps({"results": {"hellaswag": {"acc,none": 0.5}}}))
    with pytest.raises(DataError, match=r"harness\.json has no score"):
        ruler_scores(path)
    with pytest.raises(DataError, match=r"none\.json holds no results"):
        ruler_scores(tmp_path / "none.json")
