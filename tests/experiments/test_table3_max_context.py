"""Table 3 from flags to files, with findings in place of compilers."""

import subprocess

import pytest

from agentic_ring.results.rows import read_rows
from evals.compile.machines import MACHINES, machine
from evals.compile.maximum_context import Cell, Finding
from experiments import paper, table3_max_context
from experiments.table3.plots import plot_contexts, plot_memory
from experiments.table3.table import COLUMNS, table_rows, text_table
from experiments.table3_max_context import all_rows, cell_compiler, findings_in, paper_precision
from tests.commands import exit_status
from tests.experiments.conftest import has_compiler

ROWS = [("8xA100", "7B"), ("TPUv5e-256", "7B"), ("8xH200", "30B")]


def found(cell: Cell, most: int) -> list[Finding]:
    return [
        Finding(cell, most, "fits", 5e9, 8e9, state=10**9),
        Finding(cell, 2 * most, "does not fit", 9e9 if cell.method == "ring" else None, 8e9),
    ]


@pytest.fixture
def done():
    contexts = {"ring": 2**19, "blockwise": 2**16, "memory_efficient": 2**15, "vanilla": 2**12}
    cells = (
        Cell(hardware, model, column.method, paper_precision(hardware), column.remat)
        for hardware, model in ROWS
        for column in COLUMNS
    )
    return {
        cell: found(cell, contexts[cell.method] * (4 if cell.remat == "offload" else 1)) for cell in cells
    }


def test_every_row_of_the_paper_is_there():
    rows = all_rows()
    assert len(paper.longest_contexts()) == 13
    assert {(machine(name).paper, model) for name, model in rows if machine(name).paper} == set(
        paper.longest_contexts()
    )
    assert len(rows) > 13


def test_the_table_says_how_far_it_is_from_the_paper(done):
    first, second, third = table_rows(ROWS, done)
    assert first.paper["ring"] == 256 * 1024
    assert first.ratio_to_paper() == 2**21 / 2**18
    assert first.over_best_baseline() == 8
    assert first.paper_over_best_baseline() == 8
    assert second.paper_over_best_baseline() == 128
    assert third.ratio_to_paper() is None
    text = text_table([first, second, third]).markdown()
    assert "| 8xA100 | 7B | 512K (256K) | 2048K | 64K (32K) | 32K (16K) | 4K (2K) | 8x | 8x (8x) |" in text
    assert "| 8xH200 | 30B | 512K | 2048K | 64K | 32K | 4K |  | 8x |" in text
    assert "TPUv5e-256: 256 devices v5e" in text


def test_a_cell_that_crashed_is_marked_and_its_message_kept(done):
    cell = next(cell for cell in done if cell.method == "vanilla")
    done[cell] = [*done[cell][:1], Finding(cell, 2**13, "error", None, 8e9, message="Check failed: x")]
    text = text_table(table_rows(ROWS, done)).markdown()
    assert "4K (error) (2K)" in text
    assert "Check failed: x" in text


def test_pictures(done, tmp_path):
    rows = table_rows(ROWS, done)
    plot_contexts(tmp_path / "contexts.png", rows)
    plot_memory(tmp_path / "memory.png", rows)
    for name in ("contexts.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hardware", "9xB200"], "unknown hardware"),
        (["--model", "9B"], "unknown model"),
        (["--method", "flash"], "unknown method"),
        (["--check", "2048k"], "one --hardware"),
        (["--hardware", "8xA100", "--model", "7B", "--method", "ring", "--check", "2g"], "a context of '2g'"),
        (["--workers", "0"], "workers is 0"),
    ],
)
def test_wrong_flags(flags, message, capsys, tmp_path):
    assert exit_status(table3_max_context.main, *flags, "--output", tmp_path) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1


def test_known_findings_make_the_table_without_a_compiler(done, monkeypatch, tmp_path):
    findings = findings_in(tmp_path)
    for known in done.values():
        for finding in known:
            findings.put(finding)
    # Only known contexts, where the search would start from the formula.
    monkeypatch.setattr(
        table3_max_context,
        "search",
        lambda cell, compile_at: [compile_at(cell, finding.context) for finding in done[cell]],
    )
    left = tmp_path / "table.md.7.partial"  # by a process that was killed
    left.write_bytes(b"")
    flags = ("--hardware", "8xA100", "--model", "7B", "--output", tmp_path)
    assert exit_status(table3_max_context.main, *flags) == 0
    assert not left.exists()
    assert "| 512K (256K) | 2048K |" in (tmp_path / "table.md").read_text()
    rows = read_rows(tmp_path / "findings.csv")
    assert len(rows) == 2 * len(COLUMNS)
    assert {row["machine"] for row in rows} == {"8xA100"}
    for name in ("contexts.png", "memory.png", "table.csv", "table.md"):
        assert (tmp_path / name).stat().st_size > 100


def test_a_missing_compiler_says_what_to_install(capsys, tmp_path):
    missing = [name for name in ("8xA100", "TPUv5e-256") if not has_compiler(name)]
    if not missing:
        pytest.skip("both compilers are installed")
    flags = ["--hardware", missing[0], "--model", "tiny", "--method", "ring", "--check", "64k"]
    assert exit_status(table3_max_context.main, *flags, "--output", tmp_path) == 1
    assert "pip install 'agentic_ring[" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2xA100", "TPUv5e-256"])
def test_a_small_model_on_a_real_compiler(name, tmp_path):
    if not has_compiler(name):
        pytest.skip(f"the compiler for {name} is not installed")
    cell = Cell(name, "tiny", "ring", "bfloat16")
    command = cell_compiler(tmp_path).command(cell, 2**16)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("fits: ")
    finding = findings_in(tmp_path).get(cell, 2**16)
    assert finding.verdict == "fits"
    assert 0 < finding.state < finding.needed < finding.limit


def test_machines_are_named_once():
    assert all(named.name == name for name, named in MACHINES.items())
    assert machine("16xH100").devices == 16
