"""Runs of both commands: answers from a server or an oracle, resumed, refused and reported."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentic_ring.errors import ConfigError, DataError
from agentic_ring.results.results_file import read_results
from agentic_ring.results.rows import read_rows
from evals import ladder, line_retrieval
from evals.retrieval.answers import Answer, PredictionLog, asked_questions
from evals.retrieval.documents import plan_lines, read_cases, write_cases
from evals.retrieval.endpoint_reader import estimated_tokens
from evals.retrieval.reports import LadderReport
from evals.retrieval.run import RetrievalConfig, RetrievalRun, RunFlags
from evals.retrieval.tasks import TASKS
from tests.commands import kill_once
from tests.evals.retrieval.record_oracle import RecordOracle

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(server, tmp_path):
    """Calls the script's main on the server, into one folder."""
    asked = RunFlags(model="lookup", endpoint=server.address, num_samples=6, output=tmp_path / "run")
    asked = replace(asked, concurrency=1)  # so that the server's plan is kept in order

    def call(ctx="1k", test_file=(), score="last", dry_run=False, prices=None, **flags):
        return line_retrieval.main(replace(asked, **flags), ctx, test_file, 3, score, dry_run, prices)

    return call


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("line_idx", ["LRT", "LRT-NL"])
def test_a_model_that_reads_the_record_is_right_at_every_length(run, server, tmp_path, line_idx, capsys):
    assert run("2k,1k", line_idx=line_idx) == 0
    results = read_results(tmp_path / "run" / "results.json")
    for name in ("1k", "2k"):
        accuracy = results.figure(f"accuracy/{name}")
        assert (accuracy.value, accuracy.high, accuracy.n) == (1.0, 1.0, 6)
        assert 0.6 < accuracy.low < 0.7
    assert results.config["reader"] == "lookup"
    assert results.config["trained_on_task"] is False
    assert results.config["score"] == "last"
    assert set(results.wall_seconds) == {"cases", "1k", "2k"}
    assert len(server.requests) == 12
    for request in server.requests[-6:]:
        tokens = estimated_tokens(request["messages"][0]["content"])
        assert 2048 - 100 - 64 - 40 < tokens <= 2048 - 100 - 64
        assert request["max_tokens"] == 100
    assert "lookup" in capsys.readouterr().out


def test_the_folder_holds_all_that_longeval_and_ruler_users_expect(run, server, tmp_path):
    run("1k")
    run("2k")  # another length joins the run
    assert len(server.requests) == 12
    folder = tmp_path / "run"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "config.json", "results.json", "summary.csv", "stages.json", "accuracy.png", "depths.png",
        "word_partners.png",
        "testcases/1k.jsonl", "testcases/2k.jsonl",
        "predictions/1k.jsonl", "predictions/1k_response.txt",
        "predictions/2k.jsonl", "predictions/2k_response.txt",
    }  # fmt: skip
    documents = read_cases(folder / "testcases" / "1k.jsonl")
    questions = [(number, question) for number, d in enumerate(documents) for question in d.questions]
    for (number, question), row in zip(questions, rows(folder / "predictions" / "1k.jsonl"), strict=True):
        assert (row["document"], row["key"], row["expected"]) == (
            number,
            question.key,
            [*question.expected],
        )
        assert row["score"] == 1.0
    *answers, accuracy = (folder / "predictions" / "1k_response.txt").read_text().splitlines()
    assert accuracy == "Accuracy: 1.0"
    assert len(answers) == 6
    assert all(re.fullmatch(r"Label: (\d+), Predict: .*, Parsed: \1, prompt length: \d+", a) for a in answers)
    summary = read_rows(folder / "summary.csv")
    assert [(row["Tasks"], row["Score"], row["Nulls"]) for row in summary] == [
        ("lines_1k", "100.00", "0/6"),
        ("lines_2k", "100.00", "0/6"),
    ]


def test_the_first_number_can_be_asked_for_without_asking_the_model_again(run, server, tmp_path):
    server.plan.extend([("answer", "line 17, or 4242")] * 6)
    run()
    asked = len(server.requests)
    run(score="first")
    assert len(server.requests) == asked
    text = (tmp_path / "run" / "predictions" / "1k_response.txt").read_text()
    assert "Parsed: 17," in text
    assert read_results(tmp_path / "run" / "results.json").config["score"] == "first"


def test_failed_questions_end_in_status_1_and_are_asked_again(run, server, tmp_path, capsys):
    server.plan.extend([("status", 400, {}, "too long"), ("lookup",), ("status", 400, {}, "no")])
    assert run() == 1
    assert "2 questions have no answer and count in no score; the last error: status 400: no" in (
        capsys.readouterr().err
    )
    results = read_results(tmp_path / "run" / "results.json")
    assert results.figure("failed/1k").value == 2
    assert results.figure("accuracy/1k").n == 4
    asked = len(server.requests)
    assert run() == 0
    assert len(server.requests) == asked + 2
    results = read_results(tmp_path / "run" / "results.json")
    assert results.figure("failed/1k").value == 0
    assert (results.figure("accuracy/1k").value, results.figure("accuracy/1k").n) == (1.0, 6)


def test_a_dry_run_counts_what_is_still_to_be_asked_and_asks_nothing(run, server, capsys):
    assert run("1k,2k", dry_run=True, prices=(2.0, 0.5, 10.0)) == 0
    assert not server.requests
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    (each,) = (words for words in printed if words[:1] == ["1k"])
    _, requests, tokens, repeated, answers, dear, cheap = each
    tokens, repeated = int(tokens.replace(",", "")), int(repeated.replace(",", ""))
    assert (requests, answers) == ("6", "600")
    assert 5000 < tokens < 6 * 1024
    assert repeated == pytest.approx(tokens * 4 / 6, rel=0.01)  # two records of three questions
    assert float(dear) == pytest.approx((tokens * 2 + 600 * 10) / 1e6, abs=0.005)
    assert float(cheap) == pytest.approx(float(dear) - repeated * 1.5 / 1e6, abs=0.01)
    run()
    assert run("1k,2k", dry_run=True) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in printed if words[:1] in (["1k"], ["2k"], ["all"])][-3:] == ["0", "6", "6"]


def test_cost_and_cached_tokens_stand_in_the_results(run, tmp_path, capsys):
    run(prices=(2.0, 0.5, 10.0))
    found = rows(tmp_path / "run" / "predictions" / "1k.jsonl")
    prompts, cached, answers = (
        sum(row[name] for row in found) for name in ("prompt_tokens", "cached_tokens", "answer_tokens")
    )
    results = read_results(tmp_path / "run" / "results.json")
    cost = ((prompts - cached) * 2 + cached * 0.5 + answers * 10) / 1e6
    assert results.figure("cost/1k").value == pytest.approx(cost)
    assert results.figure("cached_tokens/1k").value == cached > 0
    assert f"{cost:.4f}" in capsys.readouterr().out


def test_unfinished_answers_count_in_no_score(run, server, tmp_path, capsys):
    server.starving = True
    assert run() == 1
    assert "6 answers are unfinished and count in no score" in capsys.readouterr().err
    results = read_results(tmp_path / "run" / "results.json")
    assert (results.figure("unfinished/1k").value, results.figure("failed/1k").value) == (6, 0)
    assert not any(figure.name.startswith("accuracy") for figure in results.figures)
    assert run() == 1
    assert len(server.requests) == 6, "the same question would have the same answer"


def test_a_server_that_truncates_is_found_out(run, server, tmp_path, capsys):
    server.context = 300
    assert run() == 1
    assert "it truncates prompts" in capsys.readouterr().err
    assert len(server.requests) == 2  # one a record
    assert read_results(tmp_path / "run" / "results.json").figure("failed/1k").value == 6


def test_more_fields_of_requests_are_part_of_the_run(run, server, tmp_path, capsys):
    limit = '{"max_tokens": null, "max_completion_tokens": 200}'
    run(request_json=limit, dry_run=True, output=tmp_path / "limited")
    assert "1,200" in capsys.readouterr().out.split()
    run(request_json='{"top_k": 1}')
    assert {request["top_k"] for request in server.requests} == {1}
    with pytest.raises(ConfigError, match="request_json"):
        run(request_json='{"top_k": 2}')


def test_a_killed_run_goes_on_where_it_was(run, server, tmp_path):
    server.plan.extend([("lookup",)] * 4 + [("silence", 20)])
    options = "--ctx 1k --num-samples 6 --questions-per-document 3 --model lookup --concurrency 1"
    command = [sys.executable, "evals/line_retrieval.py", *options.split(), "--endpoint", server.address]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path / "run")], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL
    )
    kill_once(process, lambda: len(server.requests) >= 5, seconds=60)
    predictions = tmp_path / "run" / "predictions" / "1k.jsonl"
    assert [row["case"] for row in rows(predictions)] == [0, 1, 2, 3]
    predictions.write_text(predictions.read_text()[:-5])  # the kill might have come in the middle of a row
    assert run() == 0
    asked = [request["messages"][0]["content"][-80:] for request in server.requests]
    assert len(asked) == 5 + 3
    assert asked[5:7] == asked[3:5]
    assert read_results(tmp_path / "run" / "results.json").figure("accuracy/1k").n == 6


def test_other_settings_are_refused_or_start_anew(run, tmp_path):
    run()
    with pytest.raises(ConfigError, match="seed"):
        run(seed=1)
    before = (tmp_path / "run" / "testcases" / "1k.jsonl").read_text()
    run(seed=1, resume=False)
    assert (tmp_path / "run.1" / "testcases" / "1k.jsonl").read_text() == before
    assert (tmp_path / "run" / "testcases" / "1k.jsonl").read_text() != before


def test_longchats_files_are_asked_as_they_are(run, server, tmp_path):
    path = tmp_path / "20_lines.jsonl"
    write_cases(path, [plan.build(20) for plan in plan_lines("LRT-NL", "x", 5, 4, 1)])
    assert run(None, test_file=(path,)) == 0
    prompts = [row["prompt"] for row in rows(path)]
    assert [request["messages"][0]["content"] for request in server.requests] == prompts
    results = read_results(tmp_path / "run" / "results.json")
    assert results.figure("accuracy/20_lines").value == 1.0
    assert results.figure("lines/20_lines").value == 20
    write_cases(path, [plan.build(20) for plan in plan_lines("LRT-NL", "x", 6, 4, 1)])
    with pytest.raises(ConfigError, match="other cases with the name 20_lines"):
        run(None, test_file=(path,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ctx": ","}, "none"),
        ({"ctx": "200"}, "tokens are needed for 3 lines"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"requests_per_minute": 0}, "requests_per_minute is 0"),
        ({"request_json": "{"}, "request_json is '{'"),
        ({"request_json": "[1]"}, r"request_json is '\[1\]'"),
        ({"model": None}, "--model"),
        ({"endpoint": None, "dry_run": True}, "--endpoint"),
        ({"endpoint": None, "prices": (1.0, 1.0, 1.0)}, "--endpoint"),
        ({"endpoint": None, "request_json": "{}"}, "--endpoint"),
        ({"endpoint": None, "model": None, "line_idx": "LRT-UUID"}, "LRT-UUID"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(run, server, options, message):
    with pytest.raises(ConfigError, match=message):
        run(**options)
    assert server.requests == []


ALL_TASKS = ",".join(TASKS)


def run_oracle(folder, contexts=(4096, 8192), tasks=ALL_TASKS, num_samples=6, seed=0):
    reader = RecordOracle()
    config = RetrievalConfig("ladder", "oracle", False, tasks, "LRT-NL", num_samples, seed, 50)
    run = RetrievalRun(folder, config, reader, LadderReport({"niah_single_1": {4096: 0.25, 32768: 0.5}}))
    with run.prepare(contexts, resume=True) as names:
        assert run.evaluate(names) == 0
        return reader, run.score()


def test_right_answers_have_full_scores_and_each_record_is_read_once(tmp_path, capsys):
    reader, scores = run_oracle(tmp_path / "run")
    assert [score.name for score in scores] == ["4k", "8k"]
    for score in scores:
        assert {row.task for row in score.predictions} == {*TASKS}
        assert all(row.score == 1.0 for row in score.predictions)
        assert score.prompt_tokens < 8192
    assert reader.documents == 4  # lines and JSON, twice
    assert len(reader.asked) == 2 * 6 * len(TASKS)
    printed = capsys.readouterr().out
    assert "0.25" in printed.split("niah_single_1")[1]
    assert "32k" in printed
    results = read_results(tmp_path / "run" / "results.json")
    assert results.figure("score/hop3/8k").value == 1.0
    assert (tmp_path / "run" / "ladder.png").stat().st_size > 1000
    assert len(read_rows(tmp_path / "run" / "summary.csv")) == 2 * (len(TASKS) + 1)


def test_a_resumed_ladder_asks_only_what_has_no_answer(tmp_path):
    run_oracle(tmp_path / "run", (4096,))
    path = tmp_path / "run" / "predictions" / "4k.jsonl"
    before = path.read_text().splitlines(keepends=True)
    path.write_text("".join(before[:-3]) + before[-1][:20])
    reader, scores = run_oracle(tmp_path / "run", (4096,))
    assert len(reader.asked) == 3
    assert len(scores[0].predictions) == len(before)
    with pytest.raises(ConfigError, match="seed"):
        run_oracle(tmp_path / "run", (4096,), seed=1)


def test_short_lengths_take_several_records(tmp_path):
    reader, (score,) = run_oracle(tmp_path / "run", (2048,), num_samples=40, tasks="hop3,line")
    assert reader.documents > 1
    assert len(score.predictions) == 80
    with pytest.raises(ConfigError, match="tokens are needed"):
        run_oracle(tmp_path / "short", (300,))


def test_the_embedded_retriever_takes_any_question_and_answers_the_one_it_knows(tmp_path):
    """Its chat template repeats the line of a question that asks for one, and nothing of another question."""
    flags = RunFlags(max_new_tokens=4, num_samples=2, devices=8, output=tmp_path / "run")
    assert ladder.main(flags, "600", "line,lines,value") == 0
    results = read_results(tmp_path / "run" / "results.json")
    assert results.config["trained_on_task"] is True
    assert results.figure("score/line/600").value == 1.0
    assert results.figure("score/value/600").value == 0.0


@pytest.mark.slow
def test_the_embedded_retriever_reaches_98_percent_at_4k_and_16k(tmp_path, capsys):
    flags = RunFlags(devices=8, seed=5, output=tmp_path)
    assert line_retrieval.main(flags, "4k,16k") == 0
    results = read_results(tmp_path / "results.json")
    assert min(results.figure(f"accuracy/{name}").value for name in ("4k", "16k")) >= 0.98
    printed = capsys.readouterr()
    assert "trained on line retrieval" in printed.out
    assert "reading 16,384 tokens takes" in printed.err


ASKED = asked_questions([plan_lines("LRT-NL", "x", 0, 3, 3)[0].build(20)])


def row(case, **changes):
    return replace(ASKED[case].predicted(Answer("It is 8907.", 4000, 0.5), "", False), **changes)


def test_rows_are_there_when_opened_again_and_the_last_about_a_case_counts(tmp_path):
    path = tmp_path / "predictions" / "4k.jsonl"
    log = PredictionLog(path, ASKED)
    for each in (row(0), row(1, error="status 500", text=""), row(1, key=17)):
        log.add(each)
    assert PredictionLog(path, ASKED).rows == log.rows == {0: row(0), 1: row(1, key=17)}
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("kept", [1, -1])
def test_a_last_line_cut_short_is_dropped_and_written_over(tmp_path, kept):
    path = tmp_path / "4k.jsonl"
    log = PredictionLog(path, ASKED)
    log.add(row(0))
    whole = path.read_bytes()
    log.add(row(1))
    path.write_bytes(whole + path.read_bytes()[len(whole) :][:kept])
    log = PredictionLog(path, ASKED)
    assert log.rows == {0: row(0)}
    log.add(row(2))
    assert PredictionLog(path, ASKED).rows == {0: row(0), 2: row(2)}


@pytest.mark.parametrize("line", ["{", '{"case": 0}'])
def test_another_line_that_is_no_prediction_is_named(tmp_path, line):
    path = tmp_path / "4k.jsonl"
    PredictionLog(path, ASKED).add(row(0))
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(DataError, match=r"4k\.jsonl, line 1 "):
        PredictionLog(path, ASKED)


def test_a_log_of_other_cases_is_refused(tmp_path):
    path = tmp_path / "4k.jsonl"
    log = PredictionLog(path, ASKED)
    for case in range(3):
        log.add(row(case))
    for others in (ASKED[::-1], ASKED[:2], [*ASKED[:2], replace(ASKED[2], digest="x")]):
        with pytest.raises(DataError, match=r"4k\.jsonl, line \d answers another question than case \d"):
            PredictionLog(path, others)
