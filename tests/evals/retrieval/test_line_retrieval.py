import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentic_ring.errors import ConfigError
from agentic_ring.results.results_file import read_results
from agentic_ring.results.rows import read_rows
from evals.line_retrieval import main
from evals.lines.local_reader import EMBEDDED
from evals.lines.longchat_files import read_cases, write_cases
from evals.lines.longchat_prompt import plan_documents
from evals.lines.token_counts import estimated_tokens
from tests.commands import kill_once

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(server, tmp_path):
    """Calls the script's main on the server, into one folder."""

    def call(ctx="1k", **options):
        settings = {"num_samples": 6, "questions_per_document": 3, "output": tmp_path / "run"}
        settings["concurrency"] = 1  # so that the server's plan is kept in order
        return main(ctx, endpoint=server.address, model="lookup", **{**settings, **options})

    return call


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("line_idx", ["LRT", "LRT-ABCindex", "LRT-UUID", "LRT-NL"])
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
    assert "lookup" in capsys.readouterr().out


def test_prompts_fill_the_context_and_leave_room_for_the_answer(run, server, tmp_path):
    run("4k", max_new_tokens=100)
    for request in server.requests:
        tokens = estimated_tokens(request["messages"][0]["content"])
        assert 4096 - 100 - 64 - 40 < tokens <= 4096 - 100 - 64
        assert request["max_tokens"] == 100


def test_the_folder_holds_all_that_longeval_and_ruler_users_expect(run, server, tmp_path):
    run("1k,2k")
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
        assert (row["document"], row["key"], row["expected"]) == (number, question.key, question.expected)
        assert row["last"] == row["first"] == row["expected"]
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
    expected = rows(tmp_path / "run" / "predictions" / "1k.jsonl")[0]["expected"]
    assert expected not in (17, 4242)
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


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_fields_that_are_no_json_object_are_refused(run, text):
    with pytest.raises(ConfigError, match="request_json is"):
        run(request_json=text)


def test_settings_of_an_endpoint_need_one():
    for settings in ({"dry_run": True}, {"prices": (1.0, 1.0, 1.0)}, {"request_json": "{}"}):
        with pytest.raises(ConfigError, match="are of an endpoint"):
            main("1k", **settings)


def test_a_server_that_fails_every_question_leaves_results_without_accuracy(run, server, tmp_path):
    server.plan.extend([("status", 400, {}, "")] * 6)
    assert run() == 1
    names = {figure.name for figure in read_results(tmp_path / "run" / "results.json").figures}
    assert "failed/1k" in names
    assert not any(name.startswith("accuracy") for name in names)


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


def test_another_length_joins_a_run(run, server, tmp_path):
    run("1k")
    run("2k")
    assert len(server.requests) == 12
    figures = read_results(tmp_path / "run" / "results.json").figures
    assert [f.name for f in figures if f.name.startswith("accuracy/")] == ["accuracy/1k", "accuracy/2k"]


def test_other_settings_are_refused_or_start_anew(run, server, tmp_path):
    run()
    with pytest.raises(ConfigError, match=r"other settings \(seed\).*--output"):
        run(seed=1)
    before = (tmp_path / "run" / "testcases" / "1k.jsonl").read_text()
    run(seed=1, resume=False)
    assert (tmp_path / "run.1" / "testcases" / "1k.jsonl").read_text() == before
    assert (tmp_path / "run" / "testcases" / "1k.jsonl").read_text() != before


@pytest.mark.parametrize("kind", ["LRT-NL", "LRT"])
def test_longchats_files_are_asked_as_they_are(run, server, tmp_path, kind):
    path = tmp_path / "20_lines.jsonl"
    write_cases(path, [plan.build(20) for plan in plan_documents(kind, "x", 5, 4, 1)])
    assert run(None, test_file=(path,)) == 0
    prompts = [row["prompt"] for row in rows(path)]
    assert [request["messages"][0]["content"] for request in server.requests] == prompts
    results = read_results(tmp_path / "run" / "results.json")
    assert results.figure("accuracy/20_lines").value == 1.0
    assert results.figure("lines/20_lines").value == 20


def test_other_cases_of_the_same_name_are_refused(run, tmp_path):
    path = tmp_path / "20_lines.jsonl"
    for seed in (0, 1):
        write_cases(path, [plan.build(20) for plan in plan_documents("LRT-NL", "x", seed, 4, 1)])
        if seed == 0:
            run(None, test_file=(path,))
    with pytest.raises(ConfigError, match="other cases with the name 20_lines"):
        run(None, test_file=(path,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ctx": ","}, "sets of cases are none"),
        ({"ctx": "200"}, "tokens are needed for 3 lines"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"requests_per_minute": 0}, "requests_per_minute is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(run, server, options, message):
    with pytest.raises(ConfigError, match=message):
        run(**options)
    assert server.requests == []


def test_an_endpoint_needs_a_model():
    with pytest.raises(ConfigError, match="--model"):
        main("1k", endpoint="http://127.0.0.1:9/v1")


def accuracy(contexts: str, questions: int, output) -> list[float]:
    assert main(contexts, devices=8, num_samples=questions, seed=5, output=output) == 0
    results = read_results(output / "results.json")
    assert results.config["trained_on_task"] is True
    return [results.figure(f"accuracy/{name}").value for name in contexts.split(",")]


@pytest.mark.slow
def test_the_embedded_retriever_answers_questions_about_short_records(tmp_path):
    assert accuracy("1k", 12, tmp_path) == [1.0]


@pytest.mark.slow
def test_the_embedded_retriever_reaches_98_percent_at_4k_and_16k(tmp_path):
    assert min(accuracy("4k,16k", 50, tmp_path)) >= 0.98


def test_the_embedded_retriever_is_small_and_says_what_it_is():
    assert sum(file.stat().st_size for file in EMBEDDED.iterdir()) < 8_000_000
    card = (EMBEDDED / "README.md").read_text()
    assert "experiments/train_retriever.py" in card


def test_keys_that_the_embedded_retriever_was_not_trained_on_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="line_idx is LRT-UUID; the embedded retriever knows only LRT-NL"):
        main("1k", line_idx="LRT-UUID", devices=8, output=tmp_path)
