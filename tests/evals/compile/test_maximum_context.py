"""The search for the maximum context, its findings on disk, and compilers that crash."""

import json
import sys
from dataclasses import asdict, replace

import pytest

from evals.compile.maximum_context import (
    Cell,
    CellCompiler,
    Finding,
    Findings,
    longest,
    search,
    search_finely,
    sweep,
)

CELL = Cell("8xA100", "7B", "ring", "float32")


def finding(context: int, verdict: str = "fits", cell: Cell = CELL, **changes) -> Finding:
    return replace(Finding(cell, context, verdict, needed=1.0, limit=2.0), **changes)


class Compiler:
    """Reports contexts up to a limit to fit, and records the contexts."""

    def __init__(self, most: int, broken: int | None = None):
        self.most, self.broken, self.contexts = most, broken, []

    def __call__(self, cell: Cell, context: int) -> Finding:
        self.contexts.append(context)
        if self.broken is not None and context >= self.broken:
            return finding(context, "error", cell, message="crash")
        return finding(context, "fits" if context <= self.most else "does not fit", cell)


@pytest.mark.parametrize("most", [2**n for n in range(11, 30)])
def test_the_search_finds_the_longest_from_any_side(most):
    compiler = Compiler(most)
    found = list(search(CELL, compiler))
    assert longest(found).context == most
    assert [f.context for f in found if f.verdict == "does not fit"][-1:] in ([2 * most], [])
    assert len(compiler.contexts) == len(set(compiler.contexts))


def test_the_formula_saves_compilations():
    compiler = Compiler(512 * 1024)
    list(search(CELL, compiler))
    assert len(compiler.contexts) <= 3


def test_nothing_fits():
    found = list(search(CELL, Compiler(0)))
    assert longest(found) is None
    assert min(f.context for f in found) == 1024


def test_where_a_compiler_fails_shorter_contexts_are_tried():
    found = list(search(CELL, Compiler(2**30, broken=2**19)))
    assert [f.verdict for f in found if f.context == 2**19] == ["error"]
    assert longest(found).context == 2**18


def test_where_a_compiler_fails_twice_the_search_ends():
    found = list(search(CELL, Compiler(2**30, broken=0)))
    assert [f.verdict for f in found] == ["error", "error"]
    assert longest(found) is None


@pytest.mark.parametrize("reach", [100_000, 123_456, 700_000])
def test_the_fine_search_ends_within_a_grain(reach):
    limit = CELL.machine.hardware.limit

    def compiler(cell: Cell, context: int) -> Finding:
        tokens = context / 8
        needed = 5e9 + (limit - 5e9) * tokens / reach * (1 + 1e-3 * (tokens / reach - 1))
        return finding(context, "fits" if needed <= limit else "does not fit", cell, needed=needed)

    found = list(search_finely(CELL, compiler))
    assert reach - 1024 <= longest(found).context / 8 <= reach
    assert len(found) < 9


def test_findings_are_kept_and_found_again(tmp_path):
    findings, kept = Findings(tmp_path), finding(2048, host=3, message="words")
    assert findings.get(CELL, 2048) is None
    findings.put(kept)
    assert findings.get(CELL, 2048) == kept
    assert findings.get(CELL, 4096) is None
    for other in (
        {"method": "blockwise"},
        {"remat": "offload"},
        {"precision": "bfloat16"},
        {"hardware": "8xH100"},
    ):
        assert findings.get(replace(CELL, **other), 2048) is None


def test_a_damaged_finding_is_compiled_again(tmp_path):
    findings = Findings(tmp_path)
    findings.put(finding(2048))
    findings.path(CELL, 2048).write_text('{"cell": {')
    assert findings.get(CELL, 2048) is None
    findings.path(CELL, 2048).write_text(json.dumps({**asdict(finding(2048)), "unknown": 1}))
    assert findings.get(CELL, 2048) is None


def cell_compiler(tmp_path, program: str) -> CellCompiler:
    return CellCompiler(lambda cell, context: [sys.executable, "-c", program], Findings(tmp_path))


def test_a_process_that_compiles(tmp_path):
    path = Findings(tmp_path).path(CELL, 2048)
    program = f"import pathlib; pathlib.Path({str(path)!r}).write_text({json.dumps(asdict(finding(2048)))!r})"
    compile_at = cell_compiler(tmp_path, program)
    assert compile_at(CELL, 2048) == finding(2048)
    # The second finding comes from disk.
    assert cell_compiler(tmp_path, "raise SystemExit(1)")(CELL, 2048) == finding(2048)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "import os, sys; print('Check failed: x', file=sys.stderr, flush=True); os.abort()",
            "-6: Check failed",
        ),
        ("raise SystemExit('error: no compiler')", "1: error: no compiler"),
        ("pass", "no output"),
    ],
)
def test_a_process_that_dies_is_an_error_and_not_a_lack_of_memory(tmp_path, program, message):
    crashed = cell_compiler(tmp_path, program)(CELL, 2048)
    assert crashed.verdict == "error"
    assert message in crashed.message
    assert Findings(tmp_path).get(CELL, 2048) is None, "it is compiled again the next time"


def test_a_sweep_finds_every_cell():
    cells = [replace(CELL, method=method) for method in ("ring", "blockwise", "vanilla")]
    compiler = Compiler(2**16, broken=2**18)
    done = dict(sweep(cells, lambda cell: search(cell, compiler), workers=2))
    assert set(done) == set(cells)
