"""The tables of docs/attention-comparison.md are the measured rows."""

import re

from evals.common.rows import read_rows
from tests.docs.pages import ROOT, text

PAGE = "docs/attention-comparison.md"


def table(first_column: str) -> list[dict[str, str]]:
    """The rows of the page's table whose first column has this heading, every cell as text."""
    lines = re.search(rf"^\| {first_column} \|.*?\n\n", text(PAGE), re.MULTILINE | re.DOTALL)
    assert lines is not None, first_column
    header, _, *body = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines[0].splitlines() if line
    )
    return [dict(zip(header, row, strict=True)) for row in body]


def test_known_bugs_are_the_measured_rows():
    measured = read_rows(ROOT / "experiments/results/attention_known_bugs.csv")
    columns = {
        "bug": "bug",
        "number": "measured",
        "bound": "bound",
        "this library": "this library",
        "`ringattention`": "ringattention",
    }
    for shown, row in zip(table("bug"), measured, strict=True):
        assert {name: shown[name] for name in columns} == {name: row[key] for name, key in columns.items()}
        for thread in row["thread"].split():
            assert f"](https://github.com/{thread.replace('#', '/issues/')})" in shown["thread"]
