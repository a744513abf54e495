"""The tables of docs/attention-comparison.md: measured rows, and features that tests hold."""

import re

from agentic_ring.results.rows import read_rows
from tests.docs.pages import ROOT, text

PAGE = "docs/attention-comparison.md"


def tables(first_column: str) -> list[dict[str, str]]:
    """The rows of all tables of the page whose first column has this heading, every cell as text."""
    found = []
    for lines in re.findall(rf"^\| {first_column} \|.*?(?=\n\n|\Z)", text(PAGE), re.MULTILINE | re.DOTALL):
        rows = lines.strip().splitlines()
        header, _, *body = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)
        found += [dict(zip(header, row, strict=True)) for row in body]
    assert found, first_column
    return found


def test_known_bugs_are_the_measured_rows():
    measured = read_rows(ROOT / "experiments/results/attention_known_bugs.csv")
    columns = {
        "bug": "bug",
        "number": "measured",
        "bound": "bound",
        "this library": "this library",
        "`ringattention`": "ringattention",
    }
    for shown, row in zip(tables("bug"), measured, strict=True):
        assert {name: shown[name] for name in columns} == {name: row[key] for name, key in columns.items()}
        for thread in row["thread"].split():
            assert f"](https://github.com/{thread.replace('#', '/issues/')})" in shown["thread"]


def test_what_this_library_has_is_held_by_a_test_that_exists():
    features = {row["feature"]: row["this library"] for row in tables("feature")}
    tests = {row["feature of this library"]: row["tests"] for row in tables("feature of this library")}
    assert set(tests) == {name for name, cell in features.items() if cell != "N"}
    for names in tests.values():
        for path, function in re.findall(r"`(\S+\.py)::(test_\w+)`", names):
            assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE), function
        assert "`" in names
