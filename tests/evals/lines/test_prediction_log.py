from dataclasses import replace

import pytest

from agentic_ring.errors import DataError
from evals.lines.prediction_log import Prediction, PredictionLog

ROW = Prediction(0, 0, "grass-nutmeg", 0.1, 8907, 0, "It is 8907.", 8907, 8907, 4000, 0.5, "00", None)
PROMPTS = ["00"] * 3


def test_rows_are_there_when_opened_again_and_the_last_about_a_case_counts(tmp_path):
    path = tmp_path / "predictions" / "4k.jsonl"
    log = PredictionLog(path, PROMPTS, Prediction)
    failed = replace(ROW, case=1, error="status 500", text="")
    for row in (ROW, failed, replace(ROW, case=1, key=17)):
        log.add(row)
    assert (
        PredictionLog(path, PROMPTS, Prediction).rows == log.rows == {0: ROW, 1: replace(ROW, case=1, key=17)}
    )
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_last_line_cut_short_is_dropped_and_written_over(tmp_path, kept):
    path = tmp_path / "4k.jsonl"
    log = PredictionLog(path, PROMPTS, Prediction)
    log.add(ROW)
    whole = path.read_bytes()
    log.add(replace(ROW, case=1))
    path.write_bytes(whole + path.read_bytes()[len(whole) :][:kept])
    log = PredictionLog(path, PROMPTS, Prediction)
    assert log.rows == {0: ROW}
    log.add(replace(ROW, case=2))
    assert PredictionLog(path, PROMPTS, Prediction).rows == {0: ROW, 2: replace(ROW, case=2)}


@pytest.mark.parametrize("line", ["{", "[]", '{"case": 0}', ""])
def test_another_line_that_is_no_prediction_is_named(tmp_path, line):
    path = tmp_path / "4k.jsonl"
    PredictionLog(path, PROMPTS, Prediction).add(ROW)
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(DataError, match=r"4k\.jsonl, line 1 (is not JSON|has)"):
        PredictionLog(path, PROMPTS, Prediction)


def test_a_log_of_other_cases_is_refused(tmp_path):
    path = tmp_path / "4k.jsonl"
    log = PredictionLog(path, ["a", "b", "c", "d"], Prediction)
    for case, prompt in enumerate("abcd"):
        log.add(replace(ROW, case=case, prompt_digest=prompt))
    for others in (["d", "a", "b", "c"], ["a", "b", "c"], ["a", "b", "c", "x"]):
        with pytest.raises(DataError, match=r"4k\.jsonl, line \d answers another question than case \d"):
            PredictionLog(path, others, Prediction)
