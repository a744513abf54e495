"""The search for the maximum context, and findings that are kept, damaged, or of a compiler that crashes."""

from dataclasses import replace

import pytest

from agentic_ring.models.model import Model
from evals.compile.llama_step import LlamaStep
from evals.compile.maximum_context import ContextCell, Finding, Program, longest, search
from experiments.table3_max_context import context_program

CELL = ContextCell("8xA100", "7B", "ring", "float32")
PROGRAM = context_program(CELL, 2048)
KEPT = Finding(2048, "fits", 1.0, 2.0, host=3, message="words")


def found_by_search(most: int, broken: int | None = None) -> list[Finding]:
    """Of a compiler by which contexts up to ``most`` fit, and which crashes from ``broken`` on."""

    def compile_at(context: int) -> Finding:
        if broken is not None and context >= broken:
            return Finding(context, "error", None, 2.0, message="crash")
        return Finding(context, "fits" if context <= most else "does not fit", 1.0, 2.0)

    return list(search(CELL, compile_at))


@pytest.mark.parametrize("most", [2**11, 2**19, 2**29])
def test_the_search_finds_the_longest_from_any_side(most):
    found = found_by_search(most)
    assert longest(found) == most
    assert [f.context for f in found if f.verdict == "does not fit"][-1:] in ([2 * most], [])
    assert len(found) == len({f.context for f in found})


def test_where_nothing_fits_or_a_compiler_fails_shorter_contexts_are_tried_until_it_fails_twice():
    found = found_by_search(0)
    assert longest(found) == 0
    assert min(f.context for f in found) == 1024
    found = found_by_search(2**30, broken=2**19)
    assert [f.verdict for f in found if f.context == 2**19] == ["error"]
    assert longest(found) == 2**18
    assert [f.verdict for f in found_by_search(2**30, broken=0)] == ["error", "error"]


def test_every_program_has_a_finding_of_its_own(tmp_path):
    changes = {"method": "blockwise", "remat": "offload", "precision": "bfloat16", "hardware": "8xH100"}
    cells = [replace(CELL, **{name: value}) for name, value in changes.items()]
    programs = [PROGRAM, context_program(CELL, 4096), *(context_program(cell, 2048) for cell in cells)]
    assert len({program.folder(tmp_path) for program in programs}) == len(programs)


def test_a_finding_is_compiled_once_and_again_where_it_is_damaged(tmp_path):
    ran = []

    def run(program: Program) -> str | None:
        ran.append(program)
        program.keep(tmp_path, KEPT)
        return None

    assert PROGRAM.compiled(tmp_path, run) == PROGRAM.compiled(tmp_path, run) == KEPT
    assert ran == [PROGRAM]
    (PROGRAM.folder(tmp_path) / "results.json").write_text('{"cell": {')
    # A process that dies is an error and not a lack of memory; the program is compiled again the next time.
    for failure, message in (("Check failed", "Check failed"), (None, "8xA100 7B ring float32 at 2K")):
        crashed = PROGRAM.compiled(tmp_path, lambda _, failure=failure: failure)
        assert crashed.verdict == "error"
        assert message in crashed.message
        assert PROGRAM.kept(tmp_path) is None
    assert PROGRAM.compiled(tmp_path, run) == KEPT
    assert len(ran) == 2


def test_the_formula_counts_the_parameters():
    for name in ("tiny", "8B"):  # all heads, and grouped ones
        parameters = Model(LlamaStep(name, "vanilla", 128, (None,)).config).parameter_count()
        here, twice = (ContextCell(f"{n}xA100", name, "ring", "float32").expected_bytes(0) for n in (8, 16))
        assert here - twice == pytest.approx(parameters, rel=2e-3), name
