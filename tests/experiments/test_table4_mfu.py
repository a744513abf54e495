"""Table 4 from flags to files with a model that trains in seconds, and its projections."""

from pathlib import Path

import jax
import pytest

from agentic_ring.results import timing
from agentic_ring.results.rows import read_rows
from evals.compile import llama_step
from evals.compile.llama_step import LlamaStep
from evals.compile.machines import MACHINES
from evals.utilisation.projection import PUBLISHED, Step
from experiments import table4_mfu
from experiments.table4.tables import project_machine, project_paper
from tests.commands import exit_status


@pytest.mark.slow
def test_measured_and_projected_are_printed_and_written_apart(monkeypatch, tmp_path, capsys):
    two = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: two)
    monkeypatch.setitem(llama_step.SHAPES, "tiny", llama_step.Shape(32, 48, 1, 4, vocab_size=96))
    monkeypatch.setattr(timing, "MATMUL", {"cpu": 64})
    monkeypatch.setattr(table4_mfu, "simulate_cpu_devices", lambda devices: None)  # there are eight already
    flags = ("--block", 16, "--turns", 1, "--trace", tmp_path / "trace", "--output", tmp_path)
    assert exit_status(table4_mfu.main, *flags) == 0
    printed = capsys.readouterr().out
    for title in ("Measured: tiny in float32 on 2 x cpu", "Projected, not measured", "(Table 2)"):
        assert title in printed
    blockwise, ring = read_rows(tmp_path / "measured.csv")
    for row, expected in ((blockwise, ["blockwise", "16", "2"]), (ring, ["ring", "32", "1"])):
        assert [row[name] for name in ("method", "context", "sequences")] == expected
        assert 0 < float(row["seconds_low"]) <= float(row["seconds"]) <= float(row["seconds_high"])
    assert float(ring["over_blockwise_rate"]) > 0
    page = (tmp_path / "table4.md").read_text()
    assert "## Measured: longest kernels of one ring step" in page
    assert len(list(tmp_path.glob("trace/*/plugins/profile/*/*.xplane.pb"))) == 2

    again = ("--hardware", "8xH200", "--model", "7B", "--rates", tmp_path / "rates.csv")
    assert exit_status(table4_mfu.main, *again, "--output", tmp_path / "again") == 0
    assert str(tmp_path / "rates.csv") in (tmp_path / "again" / "table4.md").read_text()
    assert not (tmp_path / "again" / "measured.csv").exists()


def test_the_committed_projection_is_computed_again():
    """docs/utilisation.md takes its claims from it, also those on features left out one at a time."""
    committed = read_rows(Path(__file__).parents[2] / "experiments/results/table4_projected.csv")
    for row, shown in zip(project_paper(PUBLISHED), committed, strict=True):
        read = {name: type(value)(shown[name]) for name, value in row.items()}
        assert read == pytest.approx(row)


def test_a_machine_is_projected_at_its_own_peak_and_link():
    ring = project_machine("8xH200", "7B", 65536, PUBLISHED)[1]
    assert (ring["context"], ring["peak"]) == (8 * 65536, MACHINES["8xH200"].hardware.flops)
    computing = sum(ring[f"{part}_seconds"] for part in ("products", "head", "attention"))
    assert 0.99 * ring["seconds"] < computing < ring["seconds"]
    work = Step.of(LlamaStep("7B", "ring", 8 * 65536, (None,) * 8)).flops["halved"]
    assert ring["mfu_halved"] * ring["seconds"] * 8 * ring["peak"] == pytest.approx(work)
