import json

import pytest

from agentic_ring.errors import DataError
from evals.retrieval.documents import cases, plan_lines, read_cases, write_cases


def documents(kind="LRT-NL"):
    return [plan.build(30) for plan in plan_lines(kind, "4k", 7, 6, 3)]


def row(**changes):
    case = cases(documents()[0])[1]
    fields = {"random_idx", "expected_number", "num_lines", "correct_line", "prompt"}
    return {name: value for name, value in vars(case).items() if name in fields} | changes


@pytest.mark.parametrize("kind", ["LRT", "LRT-NL"])
def test_what_is_written_reads_back(tmp_path, kind):
    path = tmp_path / "cases.jsonl"
    write_cases(path, documents(kind))
    assert read_cases(path) == documents(kind)


def test_a_row_has_longchats_keys_and_the_whole_prompt(tmp_path):
    path = tmp_path / "cases.jsonl"
    write_cases(path, documents())
    first = json.loads(path.read_text().splitlines()[0])
    assert list(first)[:5] == ["random_idx", "expected_number", "num_lines", "correct_line", "prompt"]
    key, position = first["random_idx"]
    assert first["correct_line"] == f"line {key}: REGISTER_CONTENT is <{first['expected_number']}>\n"
    assert first["prompt"].endswith(
        f"\n\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {key}? "
        "I need the number."
    )
    assert first["prompt"].split("\n")[2 + position] + "\n" == first["correct_line"]


def test_longchats_own_rows_are_read_with_their_other_keys_and_trailing_space(tmp_path):
    path = tmp_path / "200_lines.jsonl"
    changes = {"token_size": 4803, "prompt_length": -1, "prompt": row()["prompt"] + " "}
    path.write_text(json.dumps(row(**changes)) + "\n")
    (document,) = read_cases(path)
    (question,) = document.questions
    assert document.text + question.text == row()["prompt"] + " "
    assert document.seed is None
    assert question.depth == question.position / 30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expected_number": 1}, "correct_line is not that of key"),
        ({"num_lines": 31}, "has 30 lines, not num_lines 31"),
        ({"random_idx": ["other-key", 3]}, "does not end by asking for line other-key"),
        ({"random_idx": [row()["random_idx"][0], 29]}, "line 29 of the record is not correct_line"),
        ({"random_idx": [row()["random_idx"][0], 3000]}, "line 3000 of the record is not correct_line"),
        ({"prompt": row()["prompt"].removeprefix("Below")}, "does not begin with LongChat's header"),
        ({"expected_number": "many"}, "expected_number = .many.: .*valid integer"),
    ],
)
def test_a_malformed_row_is_named_with_its_file_and_line(tmp_path, changes, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(row()) + "\n" + json.dumps(row(**changes)) + "\n")
    with pytest.raises(DataError, match=message) as caught:
        read_cases(path)
    assert str(caught.value).startswith(f"{path}, line 2 ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": "x"}', ""])
def test_what_is_no_case_is_named(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=r"bad.jsonl, line 1 is not a test case"):
        read_cases(path)


def test_missing_empty_and_binary_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"missing.jsonl does not exist"):
        read_cases(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"empty.jsonl is empty"):
        read_cases(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"binary.jsonl, line 1 .* is not UTF-8"):
        read_cases(tmp_path / "binary.jsonl")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_cases(tmp_path)
