"""Test cases in LongChat's own files: a JSON object a line, each with its whole prompt."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pydantic

from agentic_ring.errors import DataError
from agentic_ring.files import replacing
from evals.lines.longchat_prompt import (
    HEADER,
    QUESTION_START,
    LineDocument,
    LineQuestion,
    line_text,
    question_text,
)


@dataclass(frozen=True)
class LineCase:
    """A line of such a file: LongChat's fields, and ours below them. Other fields are passed over.

    Attributes:
      random_idx: key and position, from 0, of the line that is asked for.
      expected_number: in that line.
      num_lines: of the record.
      correct_line: the line itself, with its end.
      prompt: header, lines and question.
      depth: position as a share of all lines.
      seed: that the record was drawn with.
      value_duplicates: other lines with the same number.
    """

    random_idx: tuple[str | int, int]
    expected_number: int
    num_lines: int
    correct_line: str
    prompt: str
    depth: float | None = None
    seed: int | None = None
    value_duplicates: int | None = None


_ADAPTER = pydantic.TypeAdapter(LineCase)


def cases(document: LineDocument) -> list[LineCase]:
    """One for each question of a document."""
    return [
        LineCase(
            random_idx=(question.key, question.position),
            expected_number=question.expected,
            num_lines=document.num_lines,
            correct_line=line_text(question.key, question.expected),
            prompt=document.text + question.text,
            depth=question.depth,
            seed=document.seed,
            value_duplicates=question.value_duplicates,
        )
        for question in document.questions
    ]


def write_cases(path: Path, documents: Sequence[LineDocument]) -> None:
    """Writes every question of the documents, in order."""
    with replacing(path) as beside, beside.open("w", encoding="utf-8") as file:
        for document in documents:
            file.writelines(json.dumps(asdict(case)) + "\n" for case in cases(document))


def read_cases(path: Path) -> list[LineDocument]:
    """Reads a file of ours or of LongChat's; neighbours with the same record become one document.

    Raises:
      DataError: no such file, no cases in it, or one that is malformed or contradicts itself.
    """
    documents: list[LineDocument] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                document = _document(line, f"{path}, line {number}")
                if documents and documents[-1].text == document.text:
                    questions = documents[-1].questions + document.questions
                    documents[-1] = replace(documents[-1], questions=questions)
                else:
                    documents.append(document)
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist; give one of LongChat's files, such as "
            "longeval/evaluation/lines/testcases/200_lines.jsonl"
        ) from error
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a text file of test cases: {error}") from error
    if not documents:
        raise DataError(f"{path} is empty; a JSON object a line is expected, as LongChat writes them")
    return documents


def _document(line: str, where: str) -> LineDocument:
    """The record of one case with its one question."""
    try:
        case = _ADAPTER.validate_json(line)
    except ValueError as error:
        raise DataError(f"{where} is not a test case of line retrieval: {_first(error)}") from error
    (key, position), expected = case.random_idx, case.expected_number
    text, start, question = case.prompt.rpartition(QUESTION_START)
    question = start + question
    record = text.removeprefix(HEADER)
    faults = {
        "the prompt does not begin with LongChat's header": not text.startswith(HEADER),
        f"the prompt does not end by asking for line {key}": question.rstrip() != question_text(key),
        f"correct_line is not that of key {key} and number {expected}": (
            case.correct_line != line_text(key, expected)
        ),
        f"the record has {record.count(chr(10))} lines, not num_lines {case.num_lines}": (
            record.count("\n") != case.num_lines
        ),
        f"line {position} of the record is not correct_line": (
            record.split("\n")[position : position + 1] != [case.correct_line.rstrip("\n")]
        ),
    }
    wrong = [fault for fault, present in faults.items() if present]
    if wrong:
        raise DataError(f"{where} contradicts itself: {'; '.join(wrong)}. Leave it out or make it anew")
    duplicates = record.count(line_text("", expected).removeprefix("line ")) - 1
    asked = LineQuestion(question, key, position, position / case.num_lines, expected, duplicates)
    return LineDocument(text, case.num_lines, (asked,), case.seed)


def _first(error: ValueError) -> str:
    """What pydantic says first, on one line."""
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{first['msg']} ({'.'.join(map(str, first['loc']))})" if first["loc"] else first["msg"]
    return str(error)
