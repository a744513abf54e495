"""Utilisation and rates computed from fixed seconds."""

from dataclasses import replace

import jax
import pytest

from agentic_ring.errors import ArgumentError, DataError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.llama import LlamaConfig
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results import timing
from agentic_ring.results.rows import write_rows
from agentic_ring.results.timing import Spread, time_interleaved
from evals.utilisation import measured_mfu, measured_rates
from evals.utilisation.measured_mfu import Candidate, known_peak, measure
from evals.utilisation.measured_rates import Probe, probes, rates
from evals.utilisation.projection import Overlap, Step, hop_bytes, project
from evals.utilisation.rates import read_rates
from experiments.table4.plot import Bar, plot_mfu

STACK = TransformerConfig(width=8, layers=2, heads=2, ffn_width=16)
BLOCKWISE = Step(STACK, vocab_size=10, context=64, ring=1, devices=8, itemsize=4)
RING = replace(BLOCKWISE, context=512, ring=8)
NAMES = ("matmul", "layer", "head", "memory", "link", "collective")
KERNELS = tuple(f"{mask}_{way}" for mask in ("causal", "full") for way in ("forward", "backward"))


def never():
    raise AssertionError("the seconds are fixed")


PROBES = {name: Probe(never, 1000.0) for name in (*NAMES, *KERNELS)}


@pytest.fixture
def measure_fixed(monkeypatch):
    """Measures steps of fixed seconds per round, and probes of one second each."""

    def arrange(blockwise, ring):
        seconds = [[0.5] * len(blockwise), blockwise, [0.25] * len(ring), ring]
        seconds += [[1.0] * len(blockwise) for _ in PROBES]
        monkeypatch.setattr(measured_mfu, "_times", lambda makers, turns: seconds)
        candidates = [Candidate("blockwise", BLOCKWISE, never), Candidate("ring", RING, never)]
        return measure(candidates, PROBES, itemsize=4, turns=3)

    return arrange


def test_utilisation_is_of_the_matrix_products_of_the_same_turn(measure_fixed):
    blockwise, ring = measure_fixed([2.0, 4.0, 8.0], [10.0, 10.0, 20.0]).rows
    flops = BLOCKWISE.flops
    # 1000 operations in 1, 1/2 and 1/4 s: one processor that all simulated devices share.
    assert blockwise.paper.median == pytest.approx(flops.paper / 4.0 / 2000)
    assert blockwise.halved == Spread.of(flops.halved / s / 2000 for s in (2.0, 4.0, 8.0))
    assert ring.model.high == pytest.approx(RING.flops.model / 10.0 / 2000)
    assert ring.tokens_a_second == 512 / 10.0


def test_expectations_are_of_the_same_turn(measure_fixed):
    measurement = measure_fixed([2.0, 4.0, 8.0], [10.0, 10.0, 20.0])
    blockwise, ring = measurement.rows
    assert blockwise.over_blockwise_rate is None
    assert blockwise.over_blockwise_parts is None
    more = RING.flops.model / BLOCKWISE.flops.model
    assert ring.over_blockwise_rate == Spread.of(x / more for x in (5.0, 2.5, 2.5))
    shared = measurement.rates.shared_by(8)
    first, second = (project(step, shared, Overlap(False, False)).seconds for step in (BLOCKWISE, RING))
    assert blockwise.over_parts.median == pytest.approx(4.0 / first)
    assert ring.over_parts.median == pytest.approx(10.0 / second)
    assert ring.over_blockwise_parts.median == pytest.approx(2.5 * first / second)


def test_a_known_accelerator_has_its_makers_peak_in_bfloat16_alone(monkeypatch):
    class Device:
        device_kind = "NVIDIA H100 80GB HBM3"

    assert known_peak(2)[0] is None
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert known_peak(2)[0] == 989e12
    assert known_peak(4)[0] is None
    Device.device_kind = "NVIDIA H100 PCIe"
    assert known_peak(2)[0] is None


@pytest.mark.slow
def test_every_part_of_a_step_runs_and_is_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "MATMUL", {"cpu": 64})
    monkeypatch.setattr(measured_rates, "MEMORY_BYTES", 2**12)
    stack = replace(STACK, kv_heads=1, ffn_chunk=4)
    found = probes(LlamaConfig(stack, vocab_size=10, loss_chunk=4), 16, make_mesh(MeshShape(ring=8)))
    assert set(found) == {*NAMES, *KERNELS} - {"collective"}
    assert found["link"].work == hop_bytes(stack, 16, 4)
    assert found["full_backward"].work == 2.5 * found["causal_forward"].work == 2.5 * 8 * 4 * 16**2 / 2 * 8
    times = time_interleaved(1, *(probe.make() for probe in found.values()))
    reached = rates(found, {name: seconds[0] for name, seconds in zip(found, times, strict=True)}, None)
    write_rows(tmp_path / "rates.csv", [vars(reached)])
    assert read_rates(tmp_path / "rates.csv") == reached
    assert reached.peak == found["matmul"].work / times[0][0]


def test_gathers_of_simulated_devices_are_in_other_rates_and_real_ones_are_timed(monkeypatch):
    mesh = make_mesh(MeshShape(ring=8))
    assert rates(probes(LlamaConfig(STACK), 16, mesh), dict.fromkeys(PROBES, 1.0), 1.0).collective == float(
        "inf"
    )
    monkeypatch.setattr(measured_rates, "simulated", lambda: False)
    found = probes(LlamaConfig(STACK), 16, mesh)
    assert found["collective"].work == (4 * 8 * 8 + 3 * 8 * 16) * 4 * 7 / 8
    for name in ("collective", "layer"):
        jax.block_until_ready(found[name].make()())


def test_one_device_has_no_links():
    alone = probes(LlamaConfig(STACK, vocab_size=10), 16, make_mesh(MeshShape(ring=1), jax.devices()[:1]))
    assert not {"link", "collective"} & set(alone)
    assert rates(alone, dict.fromkeys(alone, 1.0), 5.0).link == float("inf")
    assert rates(alone, dict.fromkeys(alone, 1.0), 5.0).peak == 5.0


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ArgumentError, match="turns is 0"):
        measure([], PROBES, itemsize=4, turns=0)
    write_rows(tmp_path / "other.csv", [{"seconds": 1}])
    with pytest.raises(DataError, match=r"holds no rates .* give a rates\.csv"):
        read_rates(tmp_path / "other.csv")
    with pytest.raises(ArgumentError, match="nothing to draw"):
        plot_mfu(tmp_path / "mfu.png", [], [])


def test_measured_and_projected_have_panels_of_their_own(tmp_path):
    bar = Bar("ring", Spread(0.4, 0.3, 0.5), Spread(0.2, 0.2, 0.2))
    for name, bars in (("both", ([bar], [bar, bar])), ("one", ([], [bar]))):
        plot_mfu(tmp_path / f"{name}.png", *bars)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
