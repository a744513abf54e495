from dataclasses import replace

import pytest

from agentic_ring.results.intervals import wilson_interval
from agentic_ring.results.rows import read_rows
from evals.lines.accuracy_plots import plot_accuracy, plot_depths, plot_word_partners
from evals.lines.prediction_log import Prediction
from evals.lines.scores import (
    UNPARSABLE,
    SetScore,
    parsed_number,
    score_table,
    write_responses,
    write_summary,
)


def answered(case, expected, text, last, first, duplicates=0):
    return Prediction(
        case, 0, f"key-{case}", case / 5, expected, duplicates, text, last, first, 4000, 0.5, "00", None
    )


RIGHT = answered(0, 2416, "line key-0 is <2416>.", 2416, 0)
WRONG = answered(1, 5, "line 5\nis 7", 7, 5, duplicates=2)
NO_NUMBER = answered(2, 9, "I cannot say.", -1, -1)
FAILED = replace(answered(3, 9, "", -1, -1), error="status 503: busy")
SCORE = SetScore("4k", 169.0, [RIGHT, WRONG, NO_NUMBER, FAILED])


def figures(score, rule="last"):
    return {figure.name: figure for figure in score.figures(rule)}


def test_failed_questions_are_in_no_accuracy_and_unparsable_answers_are_wrong():
    found = figures(SCORE)
    share = wilson_interval(1, 3)
    accuracy = found["accuracy/4k"]
    assert (accuracy.value, accuracy.low, accuracy.high, accuracy.n) == (1 / 3, share.low, share.high, 3)
    counts = {
        name: found[f"{name}/4k"].value for name in ("unparsable", "failed", "value_duplicates", "lines")
    }
    assert counts == {"unparsable": 1, "failed": 1, "value_duplicates": 1, "lines": 169}
    assert found["prompt_tokens/4k"].value == 4000
    assert found["seconds_per_question/4k"].value == 0.5


@pytest.mark.parametrize("rule", ["last", "first"])
def test_the_rule_decides_which_accuracy_is_the_score(rule):
    score = SetScore("4k", 169.0, [RIGHT, WRONG, NO_NUMBER, answered(4, 3, "3", 3, 3)])
    found = figures(score, rule)
    assert found["accuracy/4k"].value == found[f"accuracy_{rule}/4k"].value
    assert found["accuracy_last/4k"].value == 0.5
    assert found["accuracy_first/4k"].value == 0.5
    assert score.right("last") == [True, False, False, True]
    assert score.right("first") == [False, True, False, True]


def test_a_set_of_which_all_failed_has_no_accuracy(tmp_path):
    score = SetScore("4k", 169.0, [FAILED])
    assert not any(name.startswith("accuracy") for name in figures(score))
    assert score_table([score], "last", "x").rows[0]["accuracy, last number (95%)"] == "none"
    write_responses(tmp_path / "4k_response.txt", score, "last")
    assert (tmp_path / "4k_response.txt").read_text() == ""
    write_summary(tmp_path / "summary.csv", [score], "last")


def test_responses_are_as_longeval_writes_them(tmp_path):
    path = tmp_path / "4k_response.txt"
    write_responses(path, SCORE, "last")
    assert path.read_text() == (
        "Label: 2416, Predict: line key-0 is <2416>., Parsed: 2416, prompt length: 4000\n"
        "Label: 5, Predict: line 5 is 7, Parsed: 7, prompt length: 4000\n"
        "Label: 9, Predict: I cannot say., Parsed: -1, prompt length: 4000\n"
        "Accuracy: 0.3333333333333333"
    )


def test_the_summary_has_rulers_columns_and_a_row_a_length(tmp_path):
    path = tmp_path / "summary.csv"
    write_summary(path, [SCORE, replace(SCORE, name="8k")], "last")
    rows = read_rows(path)
    assert [row["Tasks"] for row in rows] == ["lines_4k", "lines_8k"]
    assert rows[0]["Score"] == "33.33"
    assert rows[0]["Nulls"] == "1/3"
    assert rows[0]["Failed"] == "1"


def test_the_plots_are_drawn_with_depths_that_nobody_asked_for(tmp_path):
    scores = [SCORE, SetScore("8k", 340.0, [replace(RIGHT, prompt_tokens=8100)])]
    plot_accuracy(tmp_path / "accuracy.png", "a model", scores, "last")
    plot_depths(tmp_path / "depths.png", "a model", scores, "last")
    for name in ("accuracy.png", "depths.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_shares_are_drawn_by_lines_that_share_a_word(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.text", lambda axes, x, y, text, **_: drawn.append((y, text)))
    plot_word_partners(tmp_path / "none.png", "a model", [SCORE], "last")
    assert not (tmp_path / "none.png").exists()
    counts = {RIGHT: 0, WRONG: 3, NO_NUMBER: 4, replace(RIGHT, case=4): 128, replace(WRONG, case=5): 500}
    rows = [replace(row, word_partners=count) for row, count in counts.items()]
    plot_word_partners(tmp_path / "some.png", "a model", [replace(SCORE, predictions=rows)], "last")
    assert drawn == [(0, "1/1"), (1, "0/1"), (2, "0/1"), (3, "0/0"), (4, "0/0"), (5, "1/2")]


def test_the_time_to_read_a_document_stands_apart_where_it_is_known():
    read = [replace(RIGHT, reading_seconds=60.0), replace(WRONG, reading_seconds=80.0), NO_NUMBER]
    score = replace(SCORE, predictions=read)
    assert figures(score)["reading_seconds/4k"].value == 70.0
    assert figures(score)["seconds_per_question/4k"].value == 0.5
    assert score_table([score], "last", "x").rows[0]["reading, s"] == "70"
    assert "reading_seconds/4k" not in figures(SCORE)
    assert "reading, s" not in score_table([SCORE], "last", "x").rows[0]


@pytest.mark.parametrize(
    ("answer", "last", "first"),
    [
        ("The <REGISTER_CONTENT> in line torpid-kid is <2416>.", 2416, 2416),
        ("line 17 is <4242>", 4242, 17),
        ("4242, as line 17 says", 17, 4242),
        ("<00042>", 42, 42),
        ("1,234", 234, 1),
        ("-5", 5, 5),
        ("3.14", 14, 3),
        ("12abc34", 34, 12),
        ("no number", UNPARSABLE, UNPARSABLE),
        ("", UNPARSABLE, UNPARSABLE),
        ("\n\n7\n", 7, 7),
    ],
)
def test_the_number_that_counts_as_the_answer(answer, last, first):
    assert parsed_number(answer, "last") == last
    assert parsed_number(answer, "first") == first


def test_an_endless_number_is_wrong_and_does_not_crash():
    assert parsed_number("9" * 10_000, "last") > 50_000
