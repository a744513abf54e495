"""Table 3 from flags to files, with findings in place of compilers."""

from itertools import product

import pytest

from agentic_ring.results.rows import read_rows
from evals.compile.machines import machine
from evals.compile.maximum_context import ContextCell, Finding
from experiments import paper, table3_max_context
from experiments.table3.table import COLUMNS, table_rows, text_table
from experiments.table3_max_context import all_rows, context_program, paper_precision
from tests.commands import exit_status, run_python
from tests.experiments.conftest import has_compiler

ROWS = [("8xA100", "7B"), ("TPUv5e-256", "7B"), ("8xH200", "7B")]
MOST = {"ring": 2**19, "blockwise": 2**16, "memory_efficient": 2**15, "vanilla": 2**12}


@pytest.fixture
def done():
    found = {}
    for (hardware, model), column in product(ROWS, COLUMNS):
        cell = ContextCell(hardware, model, column.method, paper_precision(hardware), column.remat)
        most = MOST[cell.method] * (4 if cell.remat == "offload" else 1)
        too_much = Finding(2 * most, "does not fit", 9e9 if cell.method == "ring" else None, 8e9)
        found[cell] = [Finding(most, "fits", 5e9, 8e9, state=10**9), too_much]
    return found


def test_every_row_of_the_paper_is_there():
    rows = {(machine(name).paper, model) for name, model in all_rows() if machine(name).paper}
    assert rows == set(paper.longest_contexts())
    assert len(rows) == 13 < len(all_rows())


def test_the_table_says_how_far_it_is_from_the_paper_and_what_crashed(done):
    first, second, third = table_rows(ROWS, done)
    assert first.paper["ring"] == 256 * 1024
    assert first.ratios() == (2**21 / 2**18, 8, 8)
    assert second.ratios()[2] == 128
    assert third.ratios() == (None, 8, None)
    text = text_table([first, second, third]).markdown()
    assert "| 8xA100 | 7B | 512K (256K) | 2048K | 64K (32K) | 32K (16K) | 4K (2K) | 8x | 8x (8x) |" in text
    assert "| 8xH200 | 7B | 512K | 2048K | 64K | 32K | 4K |  | 8x |" in text
    assert "TPUv5e-256: 256 devices v5e" in text
    crashed = next(cell for cell in done if cell.method == "vanilla")
    done[crashed][1] = Finding(2**13, "error", None, 8e9, message="Check failed: x")
    text = text_table(table_rows(ROWS, done)).markdown()
    assert "4K (error) (2K)" in text
    assert "Check failed: x" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hardware 9xB200", "9xB200"),
        ("--model 9B", "9B"),
        ("--method flash", "flash"),
        ("--check 2048k", "--check"),
        ("--hardware 8xA100 --model 7B --method ring --check 2g", "2g"),
        ("--workers 0", "workers is 0"),
    ],
)
def test_wrong_flags(flags, message, capsys, tmp_path):
    assert exit_status(table3_max_context.main, *flags.split(), "--output", tmp_path) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1


def test_known_findings_make_the_table_without_a_compiler(done, monkeypatch, tmp_path):
    for cell, known in done.items():
        for finding in known:
            context_program(cell, finding.context).keep(tmp_path, finding)

    def search_known(cell, compile_at) -> list[Finding]:  # where the search would start from the formula
        return [compile_at(finding.context) for finding in done[cell]]

    monkeypatch.setattr(table3_max_context, "search", search_known)
    flags = ("--hardware", "8xA100", "8xH200", "--model", "7B", "--output", tmp_path)
    assert exit_status(table3_max_context.main, *flags) == 0
    assert "| 512K (256K) | 2048K |" in (tmp_path / "table.md").read_text()
    rows = read_rows(tmp_path / "findings.csv")
    assert len(rows) == 2 * 2 * len(COLUMNS)
    assert {(row["machine"], row["model"]) for row in rows} == {("8xA100", "7B"), ("8xH200", "7B")}
    assert len(read_rows(tmp_path / "table.csv")) == 2
    for name in ("contexts.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


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
