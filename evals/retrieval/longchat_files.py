"""Files of test cases in LongChat's format: one JSON object per line, with its whole prompt."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import pydantic

from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import json_fault, json_row, parse_json
from evals.retrieval.documents import (
    HEADER,
    QUESTION_START,
    Document,
    line_question,
    line_text,
    question_text,
)


@dataclass(frozen=True)
class LineCase:
    """One test case: LongChat's fields, then our own. Any other fields are ignored.

    Attributes:
      random_idx: key, and position from 0, of the requested line.
      expected_number: the number in that line.
      num_lines: number of lines in the record.
      correct_line: the line itself, with its newline.
      prompt: header, lines and question.
      depth: position divided by the number of lines.
      seed: seed of the record.
      value_duplicates: how many other lines have the same number.
    """

    random_idx: tuple[str | int, Annotated[int, pydantic.Field(ge=0)]]
    expected_number: int
    num_lines: Annotated[int, pydantic.Field(ge=1)]
    correct_line: str
    prompt: str
    depth: float | None = None
    seed: int | None = None
    value_duplicates: int | None = None


def cases(document: Document) -> list[LineCase]:
    """The test cases of a document, one for each question."""
    return [
        LineCase(
            random_idx=(question.key, question.position),
            expected_number=int(question.expected[0]),
            num_lines=document.num_lines,
            correct_line=line_text(question.key, question.expected[0]),
            prompt=document.text + question.text,
            depth=question.depth,
            seed=document.seed,
            value_duplicates=question.value_duplicates,
        )
        for question in document.questions
        if question.key is not None and question.position is not None
    ]


def write_cases(path: Path, documents: Sequence[Document]) -> None:
    """Writes a test case for every question of the documents, in order."""
    with replacing(path) as beside, beside.open("w", encoding="utf-8") as file:
        for document in documents:
            file.writelines(json_row(asdict(case)) for case in cases(document))


def read_cases(path: Path) -> list[Document]:
    """Reads one of our files or of LongChat's; consecutive cases with the same record form one document.

    Raises:
      DataError: the file does not exist or is empty, or a case is malformed or contradicts itself.
    """
    documents: list[Document] = []
    try:
        with path.open("rb") as file:
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
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not documents:
        raise DataError(f"{path} is empty; expected one JSON object per line, as LongChat writes them")
    return documents


def _document(line: bytes, where: str) -> Document:
    """The document of one case, with its one question."""
    try:
        case = parse_json(line, LineCase, foreign=True)
    except ValueError as error:
        raise DataError(f"{where} is not a test case of line retrieval: it {json_fault(error)}") from error
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
        raise DataError(
            f"{where} contradicts itself: {'; '.join(wrong)}. Remove the line or generate the file again"
        )
    occurrences = record.count(line_text("", expected).removeprefix("line "))
    asked = line_question(question, key, position, case.num_lines, expected, occurrences)
    return Document(text, case.num_lines, (asked,), case.seed)
