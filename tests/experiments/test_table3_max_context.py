"""Table 3 from flags to files, with findings in place of compilers."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from agentic_ring.provenance import provenance
from agentic_ring.results.rows import origin_columns, read_rows
from evals.compile.maximum_context import ContextCell, Finding
from experiments import table3_max_context
from experiments.common.cells import CellPool
from experiments.table3.table import table_rows, text_table
from experiments.table3_max_context import all_rows, context_program
from tests.commands import exit_status, run_python
from tests.experiments.conftest import has_compiler

RESULTS = Path(__file__).parents[2] / "experiments/results"
MACHINES = ("8xA100", "8xH200")
FOUND = ("machine", "model", "method", "precision", "remat", "context", "verdict", "limit", "expected")


def rows_7b(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    rows = [row for row in read_rows(path) if row["machine"] in MACHINES and row["model"] == "7B"]
    return [{name: row[name] for name in columns} for row in rows]


def test_the_committed_findings_give_the_committed_table_without_a_compiler(monkeypatch, tmp_path):
    """The searches ask for just these findings, and the formula expects what is written beside them."""
    findings, table = RESULTS / "table3_findings.csv", RESULTS / "table3.csv"
    assert [(row["machine"], row["model"]) for row in read_rows(table)] == all_rows()
    for row in read_rows(findings):
        cell = ContextCell(*(row[name] for name in ("machine", "model", "method", "precision", "remat")))
        finding = Finding(int(row["context"]), row["verdict"], 1e9, float(row["limit"]))
        assert round(cell.expected_bytes(finding.context)) == int(row["expected"])
        if cell.hardware in MACHINES and cell.model == "7B":
            context_program(cell, finding.context).keep(tmp_path, finding)
    monkeypatch.setattr(CellPool, "run", None)
    flags = ("--hardware", *MACHINES, "--model", "7B", "--output", tmp_path)
    assert exit_status(table3_max_context.main, *flags) == 0
    assert rows_7b(tmp_path / "findings.csv", FOUND) == rows_7b(findings, FOUND)
    columns = [name for name in read_rows(table)[0] if name not in origin_columns(provenance())]
    assert rows_7b(tmp_path / "table.csv", columns) == rows_7b(table, columns)
    assert "| 8xA100 | 7B | 512K (256K) | 2048K | 64K (32K) |" in (tmp_path / "table.md").read_text()
    for name in ("contexts.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_what_crashed_is_in_the_table_and_its_notes():
    cell = ContextCell("8xA100", "7B", "vanilla", "float32")
    found = [Finding(2**12, "fits", 5e9, 8e9), Finding(2**13, "error", None, 8e9, message="Check failed: x")]
    text = text_table(table_rows([("8xA100", "7B")], {cell: found})).markdown()
    assert "| 4K (error) (2K) |" in text
    assert "at 8K: Check failed: x" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2xA100", "TPUv5e-256"])
def test_a_small_model_on_a_real_compiler(name, tmp_path):
    program = context_program(ContextCell(name, "tiny", "ring", "bfloat16"), 2**16)
    ended = run_python(*program.command(tmp_path)[1:], timeout=600)
    if not has_compiler(name):
        assert ended.returncode == 1
        assert "pip install 'agentic_ring[" in ended.stderr
        return
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("fits: ")
    finding = program.kept(tmp_path)
    assert finding.verdict == "fits"
    assert 0 < finding.state < finding.needed < finding.limit
