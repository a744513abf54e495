"""The ladder's run: resumed, scored, and answered without a fault by the constructed retriever."""

import json

import pytest

from agentic_ring.errors import ConfigError, DataError
from agentic_ring.results.results_file import read_results
from evals.constructed_retriever import build
from evals.ladder import main
from evals.ladder_tasks.report import LengthScore, TaskAnswer, effective_length, ruler_scores
from evals.ladder_tasks.run import LadderConfig, LadderRun
from evals.ladder_tasks.tasks import TASKS
from tests.evals.ladder_tasks.record_oracle import RecordOracle


def config(**changes) -> LadderConfig:
    fields = {"tasks": ",".join(TASKS), "num_samples": 6, "max_new_tokens": 50, "seed": 0} | changes
    return LadderConfig("oracle", False, "local", False, None, line_idx="LRT-NL", **fields)


def run_oracle(folder, contexts=(4096, 8192), **changes):
    reader = RecordOracle()
    run = LadderRun(folder, config(**changes), reader)
    with run.prepare(contexts, resume=True) as names:
        for name in names:
            run.ask(name)
        return reader, run.report(), run


def test_right_answers_have_full_scores_and_each_record_is_read_once(tmp_path, capsys):
    reader, scores, run = run_oracle(tmp_path / "run")
    assert [score.name for score in scores] == ["4k", "8k"]
    for score in scores:
        assert {row.task for row in score.rows} == {*TASKS}
        assert all(row.score == 1.0 for row in score.rows)
        assert score.prompt_tokens < 8192
    assert reader.documents == 4  # lines and JSON, twice
    assert len(reader.asked) == 2 * 6 * len(TASKS)
    assert run.conclude(scores, {"niah_single_1": {4096: 0.25, 32768: 0.5}}) == 0
    printed = capsys.readouterr().out
    assert "0.25" in printed.split("niah_single_1")[1]
    assert "32k" in printed
    results = read_results(tmp_path / "run" / "results.json")
    assert results.figure("score/hop3/8k").value == 1.0
    assert (tmp_path / "run" / "ladder.png").stat().st_size > 1000
    summary = (tmp_path / "run" / "summary.csv").read_text().splitlines()
    assert len(summary) == 1 + 2 * (len(TASKS) + 1)


def test_a_resumed_run_asks_only_what_has_no_answer(tmp_path):
    run_oracle(tmp_path / "run", (4096,))
    path = tmp_path / "run" / "predictions" / "4k.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:-3]) + rows[-1][:20])
    reader, scores, _ = run_oracle(tmp_path / "run", (4096,))
    assert len(reader.asked) == 3
    assert len(scores[0].rows) == len(rows)
    with pytest.raises(ConfigError, match="seed"):
        run_oracle(tmp_path / "run", (4096,), seed=1)


def test_short_lengths_take_several_records(tmp_path):
    reader, (score,), _ = run_oracle(tmp_path / "run", (2048,), num_samples=40, tasks="hop3,line")
    assert reader.documents > 1
    assert len(score.rows) == 80
    with pytest.raises(ConfigError, match="tokens are needed"):
        run_oracle(tmp_path / "short", (300,))


def test_the_embedded_retriever_takes_any_question_and_answers_the_one_it_knows(tmp_path):
    """Its chat template repeats the line of a question that asks for one, and nothing of another question."""
    arguments = {"max_new_tokens": 4, "num_samples": 2, "devices": 8, "output": tmp_path / "run"}
    assert main("600", "line,lines,value", **arguments) == 0
    scores = {figure.name: figure.value for figure in read_results(tmp_path / "run" / "results.json").figures}
    assert scores["score/line/600"] == 1.0
    assert scores["score/value/600"] == 0.0


def answers(name: str, score: float, count: int = 100, task: str = "line") -> LengthScore:
    rows = [
        TaskAnswer(case, task, 0.0, ("1",), "", float(case < score * count), 10, 0.1, "", None)
        for case in range(count)
    ]
    return LengthScore(name, rows)


def test_the_effective_length_is_the_last_before_the_first_fall():
    ladder = [answers("4k", 1.0), answers("8k", 0.97), answers("16k", 0.9), answers("32k", 1.0)]
    assert effective_length(ladder) == "8k"  # at 16k, 0.9 of 100 may be as little as 0.826
    assert effective_length(ladder, "line") == "8k"
    assert effective_length([answers("4k", 0.5, 400), answers("8k", 0.55, 400)]) == "8k"
    assert effective_length([answers("4k", 1.0, count=10)]) == "none"  # too few questions to tell
    assert effective_length(ladder[1:]) == ""


def test_the_harness_results_are_read(tmp_path):
    path = tmp_path / "harness.json"
    found = {"niah_single_1": {"4096,none": 0.5, "8192,none": -1, "4096_stderr,none": "N/A", "alias": "x"}}
    path.write_text(json.dumps({"results": found}))
    assert ruler_scores(path) == {"niah_single_1": {4096: 0.5}}
    path.write_text(json.dumps({"results": {"hellaswag": {"acc,none": 0.5}}}))
    with pytest.raises(DataError, match="no score of a RULER task"):
        ruler_scores(path)
    with pytest.raises(DataError, match=r"holds no results of evals/harness\.py"):
        ruler_scores(tmp_path / "none.json")


@pytest.mark.slow
def test_the_constructed_retriever_answers_all_literal_tasks(tmp_path):
    model, output = tmp_path / "constructed", tmp_path / "run"
    build(model)
    arguments = {"max_new_tokens": 40, "num_samples": 20, "devices": 8, "output": output}
    assert main("16k", "literal", model=str(model), **arguments) == 0
    rows = [
        json.loads(line)
        for path in (output / "predictions").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert {row["task"] for row in rows} == {task for task in TASKS if TASKS[task].literal}
    assert [row for row in rows if row["score"] < 1] == []
