"""Runs of line retrieval: answers from a server, resumed, refused and reported; and the log of answers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentic_ring.errors import ConfigError, DataError
from agentic_ring.results.results_file import read_results
from evals import line_retrieval
from evals.retrieval.answers import Answer, PredictionLog, asked_questions
from evals.retrieval.documents import plan_lines, read_cases, write_cases
from evals.retrieval.endpoint_reader import estimated_tokens
from evals.retrieval.run import RunFlags


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def run(server, folder, unplotted):
    """Calls the script's main on the server, into one folder."""
    asked = RunFlags(model="lookup", endpoint=server.address, num_samples=6, output=folder)
    asked = replace(asked, concurrency=1)  # so that the server's plan is kept in order

    def call(ctx="1k", test_file=(), score="last", dry_run=False, prices=None, **flags):
        return line_retrieval.main(replace(asked, **flags), ctx, test_file, 3, score, dry_run, prices)

    return call


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures(folder):
    return {figure.name: figure for figure in read_results(folder / "results.json").figures}


def test_a_run_grows_by_lengths_and_its_folder_holds_what_longeval_users_expect(run, server, folder):
    assert run("1k") == run("2k") == 0
    assert len(server.requests) == 12
    for request in server.requests[-6:]:
        tokens = estimated_tokens(request["messages"][0]["content"])
        assert 2048 - 100 - 64 - 40 < tokens <= 2048 - 100 - 64
        assert request["max_tokens"] == 100
    results = read_results(folder / "results.json")
    for name in ("1k", "2k"):
        accuracy = results.figure(f"accuracy/{name}")
        assert (accuracy.value, accuracy.high, accuracy.n) == (1.0, 1.0, 6)
        assert 0.6 < accuracy.low < 0.7
    names = ["config.json", "results.json", "summary.csv", "stages.json"]
    names += [f"{plot}.png" for plot in ("accuracy", "depths", "word_partners")]
    for length in ("1k", "2k"):
        names += [f"testcases/{length}.jsonl", f"predictions/{length}.jsonl"]
        names += [f"predictions/{length}_response.txt"]
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.*")} == {*names}
    documents = read_cases(folder / "testcases" / "1k.jsonl")
    questions = [(number, question) for number, d in enumerate(documents) for question in d.questions]
    for (number, question), row in zip(questions, rows(folder / "predictions" / "1k.jsonl"), strict=True):
        expected = (number, question.key, [*question.expected], 1.0)
        assert (row["document"], row["key"], row["expected"], row["score"]) == expected


def test_what_failed_is_asked_again_and_the_first_number_counted_without_asking(run, server, folder, capsys):
    server.plan.extend([("status", 400, "too long"), ("answer", "line 17, or 4242"), ("status", 400, "no")])
    assert run(line_idx="LRT") == 1
    said = capsys.readouterr().err
    assert "2 questions have no answer and count in no score; the last error: status 400: no" in said
    found = figures(folder)
    assert (found["failed/1k"].value, found["accuracy/1k"].value, found["accuracy/1k"].n) == (2, 3 / 4, 4)
    assert len(server.requests) == 6, "no such reply is worth another try"
    assert run(line_idx="LRT", score="first") == 0
    assert len(server.requests) == 6 + 2
    found = figures(folder)
    assert (found["failed/1k"].value, found["accuracy_last/1k"].value) == (0, 5 / 6)
    assert found["accuracy/1k"].value == found["accuracy_first/1k"].value < 5 / 6
    assert "Parsed: 17," in (folder / "predictions" / "1k_response.txt").read_text()
    assert read_results(folder / "results.json").config["score"] == "first"


def test_a_dry_run_counts_and_a_run_tells_tokens_and_cost(run, server, folder, capsys):
    prices = (2.0, 0.5, 10.0)
    assert run("1k,2k", dry_run=True, prices=prices) == 0
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
    run(prices=prices)
    row_sums = ("prompt_tokens", "cached_tokens", "answer_tokens")
    found = rows(folder / "predictions" / "1k.jsonl")
    prompts, cached, answers = (sum(row[name] for row in found) for name in row_sums)
    cost = ((prompts - cached) * 2 + cached * 0.5 + answers * 10) / 1e6
    assert figures(folder)["cost/1k"].value == pytest.approx(cost)
    assert figures(folder)["cached_tokens/1k"].value == cached > 0
    assert f"{cost:.4f}" in capsys.readouterr().out
    assert run("1k,2k", dry_run=True) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in printed if words[:1] in (["1k"], ["2k"], ["all"])] == ["0", "6", "6"]


def test_unfinished_answers_count_in_no_score(run, server, folder, capsys):
    server.starving = True
    assert run() == 1
    assert "6 answers are unfinished and count in no score" in capsys.readouterr().err
    found = figures(folder)
    assert (found["unfinished/1k"].value, found["failed/1k"].value) == (6, 0)
    assert not any(name.startswith("accuracy") for name in found)
    assert run() == 1
    assert len(server.requests) == 6, "the same question would have the same answer"


def test_more_fields_of_requests_are_part_of_the_run(run, server, capsys):
    fields = '{"max_tokens": null, "max_completion_tokens": 200}'
    run(request_json=fields, dry_run=True)
    assert "1,200" in capsys.readouterr().out.split()
    run(request_json=fields)
    assert [request["max_completion_tokens"] for request in server.requests] == [200] * 6
    with pytest.raises(ConfigError, match="request_json"):
        run(request_json='{"top_k": 2}')


def test_an_interrupted_run_goes_on_where_it_was(run, server, folder):
    server.plan.extend([("lookup",)] * 4 + [("status", 401, "no such key")])
    with pytest.raises(ConfigError, match=r"status 401: no such key.*'lookup'"):
        run()
    predictions = folder / "predictions" / "1k.jsonl"
    assert [row["case"] for row in rows(predictions)] == [0, 1, 2, 3]
    predictions.write_text(predictions.read_text()[:-5])  # a kill may come in the middle of a row
    assert run() == 0
    asked = [request["messages"][0]["content"][-80:] for request in server.requests]
    assert len(asked) - 3 in (5, 6), "one more may be on its way when the run ends"
    assert asked[-3:-1] == asked[3:5]
    assert figures(folder)["accuracy/1k"].n == 6


def test_longchats_files_are_asked_as_they_are(run, server, tmp_path, folder):
    path = tmp_path / "20_lines.jsonl"
    write_cases(path, [plan.build(20) for plan in plan_lines("LRT-NL", "x", 5, 4, 1)])
    assert run(None, test_file=(path,)) == 0
    prompts = [row["prompt"] for row in rows(path)]
    assert [request["messages"][0]["content"] for request in server.requests] == prompts
    found = figures(folder)
    assert (found["accuracy/20_lines"].value, found["lines/20_lines"].value) == (1.0, 20)
    assert run(None, test_file=(path,)) == 0, "the same cases again"
    write_cases(path, [plan.build(20) for plan in plan_lines("LRT-NL", "x", 6, 4, 1)])
    with pytest.raises(ConfigError, match="other cases with the name 20_lines"):
        run(None, test_file=(path,))


def test_settings_that_cannot_be_are_refused(run, server):
    for options, message in (
        ({"ctx": ","}, "none"),
        ({"ctx": "200"}, "tokens are needed for 3 lines"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"request_json": "{"}, "request_json is '{'"),
        ({"request_json": "[1]"}, r"request_json is '\[1\]'"),
        ({"prices": (1.0, -1.0, 1.0)}, "price of cached tokens is -1"),
        ({"model": None}, "--model"),
        ({"endpoint": None, "dry_run": True}, "--endpoint"),
        ({"endpoint": None, "prices": (1.0, 1.0, 1.0)}, "--endpoint"),
        ({"endpoint": None, "request_json": "{}"}, "--endpoint"),
        ({"endpoint": None, "model": None, "line_idx": "LRT-UUID"}, "LRT-UUID"),
        ({"adapter": Path("lines")}, "adapter is of a local model"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(**options)
        assert server.requests == []


@pytest.mark.slow
def test_the_embedded_retriever_reaches_98_percent_at_16k(tmp_path, capsys):
    flags = RunFlags(devices=8, seed=5, output=tmp_path)
    assert line_retrieval.main(flags, "16k") == 0
    assert figures(tmp_path)["accuracy/16k"].value >= 0.98
    printed = capsys.readouterr()
    assert "trained on line retrieval" in printed.out
    assert "reading 16,384 tokens takes" in printed.err


def test_the_log_keeps_the_last_row_of_a_case_and_belongs_to_its_questions(tmp_path):
    path = tmp_path / "predictions" / "4k.jsonl"
    asked = asked_questions([plan_lines("LRT-NL", "x", 0, 3, 3)[0].build(20)])
    log = PredictionLog(path, asked)
    first, second, _ = (each.predicted(Answer("8907", 4000, 0.5), "", False) for each in asked)
    for row in (first, replace(second, error="status 500", text=""), second):
        log.add(row)
    assert PredictionLog(path, asked).rows == log.rows == {0: first, 1: second}
    for others in (asked[::-1], asked[:1]):
        with pytest.raises(DataError, match=r"4k\.jsonl, line \d answers another question than case \d"):
            PredictionLog(path, others)
