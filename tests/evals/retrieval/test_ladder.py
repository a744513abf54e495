"""The ladder: records with one right answer to each question, scores with partial credit, and runs."""

import hashlib
import json
import re
from collections import Counter, defaultdict

import jax
import pytest

from agentic_ring.errors import ConfigError, UnknownNameError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.results.results_file import read_results
from agentic_ring.results.rows import read_rows
from evals import ladder
from evals.retrieval.answers import Answer
from evals.retrieval.documents import HEADER, KINDS
from evals.retrieval.ladder_documents import CHAIN_START, JSON_HEADER, JSON_KEY, LIST_START, LadderPlan
from evals.retrieval.reports import LadderReport
from evals.retrieval.run import RetrievalConfig, RetrievalRun, RunFlags
from evals.retrieval.tasks import TASKS, UNPARSABLE, named_tasks, parsed_number

LINES = tuple((task, 9) for task in TASKS if TASKS[task].record == "lines")


def plan(*asked, kind="LRT-NL", name="4k", seed=0, record="lines"):
    return LadderPlan(kind, name, seed, 0, record, asked)


def only(values):
    (value,) = values
    return value


def read_answer(document: str, question: str) -> str:
    """The answer to a question of any task, read as a person would; there must be one only."""
    if document.startswith(JSON_HEADER):
        pairs = json.loads(document.removeprefix(JSON_HEADER), object_pairs_hook=list)
        key = question.removeprefix(JSON_KEY).split('"')[0]
        return only(value for each, value in pairs if each == key)
    contents, keys = defaultdict(list), defaultdict(list)
    for key, content in re.findall(r"line (.+): REGISTER_CONTENT is <(.+)>\n", document.removeprefix(HEADER)):
        contents[key].append(content)
        keys[content].append(key)
    if question.startswith(LIST_START):
        return "\n".join(f"line {key}: {only(contents[key])}" for key in re.findall(r"\nline (.+)", question))
    if found := re.search(r"begin with line (.+)\. Tell .* in number (\d)", question):
        assert len(contents[found[1]]) == 4
        return contents[found[1]][int(found[2]) - 1]
    if found := re.search(r"lines whose <REGISTER_CONTENT> is <(\d+)>", question):
        assert all(len(contents[key]) == 1 for key in keys[found[1]])
        return ", ".join(f"line {key}" for key in keys[found[1]])
    if found := re.search(r"In how many lines is the <REGISTER_CONTENT> <(\d+)>", question):
        return str(len(keys[found[1]]))
    written = [only(contents[re.findall(r"in line (.+)\? I need", question)[0]])]
    while question.startswith(CHAIN_START) and written[-1].startswith("line "):
        written.append(only(contents[written[-1].removeprefix("line ")]))
    return "\n".join(written)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lines", [None, 2000])
def test_the_answer_that_the_record_gives_has_the_full_score(kind, lines):
    each = plan(*LINES, kind=kind, seed=3)
    document = each.build(lines or each.least)
    assert Counter(question.task for question in document.questions) == dict(LINES)
    for question in document.questions:
        found = read_answer(document.text, question.text)
        assert TASKS[question.task].score(question.expected, found) == 1.0, question
        assert 0 <= question.depth < 1
    document = plan(("json", 20), kind=kind, record="json").build(300)
    assert len(document.questions) == 20
    assert all((read_answer(document.text, asked.text),) == asked.expected for asked in document.questions)


def test_two_words_say_where_in_a_chain_an_answer_is():
    text = plan(("hop2", 40), ("hop3", 40)).build(2000).text
    links = re.findall(r"^line (.+): REGISTER_CONTENT is <line (.+)>$", text, re.MULTILINE)
    pairs = [(key.split("-")[-1], content.split("-")[0]) for key, content in links]
    assert len(pairs) == len({*pairs}) == 120


def test_records_are_exactly_reproducible_and_differ_by_seed_and_length():
    def digest(seed: int, name: str) -> str:
        document = plan(*LINES, seed=seed, name=name).build(500)
        text = document.text + "".join(question.text for question in document.questions)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    assert digest(0, "4k") == "247b54e099f26c07"
    assert len({digest(0, "4k"), digest(1, "4k"), digest(0, "8k")}) == 3


def test_scores():
    for task, expected, scores in (
        ("line", "417", {"The content of line 3 is <417>.": 1, "417, in line 3": 0, "none": 0}),
        ("lines", "a-1 b-2 10 20", {"line a-1: 10; line b-2: 20": 1, "20 and 10": 1, "10 20 30 40": 1 / 2}),
        ("lines", "a-1 b-2 10 20", {"line a-1: 10; line b-2: 21": 1 / 2, "": 0}),
        ("lines", "a-1 b-2 10 10", {"10": 1 / 2}),
        ("lines", "16 14 146 14", {"line 16: 146; line 14: 14": 1}),
        ("hop3", "b-2 c-3 30", {"line b-2; line c-3; 30": 1, "It is <30>": 1, "line b-2; line c-31": 1 / 3}),
        ("hop3", "b-2 c-3 30", {"line b-2; line c-3; 31": 2 / 3}),
        ("hop2", "b-30 30", {"line b-30": 1 / 2}),
        ("hop2", "7 47", {"line 7; 47": 1}),
        ("occurrence", "12", {"12": 1}),
        ("value", "a-b c-d", {"line a-b and line c-d": 1, "line a-b": 1 / 2, "line a-bc": 0}),
        ("value", "a-b c-d", {"Line a-b; Line c-d; Line e-f, line g-h": 1 / 2}),
        ("count", "4", {"There are 4.": 1, "3": 3 / 4, "9": 0, "many": 0}),
        ("json", "44", {'"44"': 1, "445": 0}),
        ("json", "1b4e-28ba", {"the value is 1b4e-28ba.": 1}),
    ):
        found = {answer: TASKS[task].score(expected.split(), answer.replace("; ", "\n")) for answer in scores}
        assert found == pytest.approx(scores)


def test_tasks_are_named_in_the_ladders_order():
    assert named_tasks("json, line") == ["line", "json"]
    assert named_tasks("all") == [*TASKS]
    assert named_tasks("literal,count") == ["line", "lines", "hop2", "hop3", "count", "json"]
    with pytest.raises(UnknownNameError, match="hop9"):
        named_tasks("line,hop9")


def test_the_number_that_counts_as_the_answer():
    for answer, numbers in {
        "line 17 is <00042>": (42, 17),
        "1,234": (234, 1),
        "-5": (5, 5),
        "12abc34\n": (34, 12),
        "no number": (UNPARSABLE, UNPARSABLE),
        "9" * 10_000: (int("9" * 100),) * 2,  # Python refuses to convert all of them
    }.items():
        assert (parsed_number(answer, "last"), parsed_number(answer, "first")) == numbers


class RecordOracle:
    """A reader that answers in the forms that the questions ask for."""

    name, trained_on_task = "oracle", False

    def __init__(self):
        self.documents, self.asked = 0, 0

    def count_tokens(self, document, question):
        return len(document + question) // 4

    def answers(self, document, questions, max_new_tokens):
        self.documents += 1
        for number, question in enumerate(questions):
            self.asked += 1
            yield number, Answer(read_answer(document, question), self.count_tokens(document, question), 0.1)


def run_oracle(folder, contexts=(4096, 8192), tasks=TASKS, num_samples=6, seed=0):
    reader = RecordOracle()
    config = RetrievalConfig("ladder", "oracle", False, ",".join(tasks), "LRT-NL", num_samples, seed, 50)
    run = RetrievalRun(folder, config, reader, LadderReport({"niah_single_1": {4096: 0.25, 32768: 0.5}}))
    with run.prepare(contexts, resume=True) as names:
        assert run.evaluate(names) == 0
        return reader, run.score()


def test_right_answers_have_full_scores_and_each_record_is_read_once(tmp_path, capsys, request):
    folder = tmp_path / "run"
    reader, scores = run_oracle(folder)
    assert [score.name for score in scores] == ["4k", "8k"]
    for score in scores:
        assert {row.task for row in score.predictions} == {*TASKS}
        assert all(row.score == 1.0 for row in score.predictions)
        assert score.prompt_tokens < 8192
    assert reader.documents == 4  # lines and JSON, twice
    assert reader.asked == 2 * 6 * len(TASKS)
    printed = capsys.readouterr().out
    assert "0.25" in printed.split("niah_single_1")[1]
    assert "32k" in printed
    assert read_results(folder / "results.json").figure("score/hop3/8k").value == 1.0
    assert (folder / "ladder.png").stat().st_size > 1000
    assert len(read_rows(folder / "summary.csv")) == 2 * (len(TASKS) + 1)
    # Resumed, it asks only what has no answer.
    request.getfixturevalue("unplotted")
    path = folder / "predictions" / "4k.jsonl"
    before = path.read_text().splitlines(keepends=True)
    path.write_text("".join(before[:-3]) + before[-1][:20])
    reader, (score, _) = run_oracle(folder)
    assert reader.asked == 3
    assert len(score.predictions) == len(before)
    with pytest.raises(ConfigError, match="seed"):
        run_oracle(folder, seed=1)
    # Short lengths take several records.
    reader, (score,) = run_oracle(tmp_path / "short", (2048,), num_samples=40, tasks=("hop3", "line"))
    assert reader.documents > 1
    assert len(score.predictions) == 80
    with pytest.raises(ConfigError, match="tokens are needed"):
        run_oracle(tmp_path / "shorter", (300,))


@pytest.mark.slow
def test_the_embedded_retriever_takes_any_question_and_answers_the_one_it_knows(tmp_path, monkeypatch):
    """Its chat template repeats the line of a question that asks for one, and nothing of another question."""
    ring = make_mesh(MeshShape(ring=2), jax.devices()[:2])
    monkeypatch.setattr("evals.retrieval.local_reader.make_mesh", lambda shape: ring)
    monkeypatch.setattr("evals.retrieval.local_reader.CHUNK", 64)  # so that several chunks are prefilled
    flags = RunFlags(max_new_tokens=4, num_samples=3, devices=8, output=tmp_path / "run")
    assert ladder.main(flags, "600", "line,value") == 0
    results = read_results(tmp_path / "run" / "results.json")
    assert results.config["trained_on_task"] is True
    assert results.figure("score/line/600").value == 1.0
    assert results.figure("score/value/600").value == 0.0
