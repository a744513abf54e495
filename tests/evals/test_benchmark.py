"""The benchmark: rows at tiny sizes, what is kept of them, fair timing, and peers that are not installed."""

import importlib
import inspect
import json
import os
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest

from agentic_ring import device_memory
from agentic_ring.attention import attention
from agentic_ring.attention.kernels import registry
from agentic_ring.attention.kernels.interface import Saved
from agentic_ring.attention.kernels.xla import XlaKernel
from agentic_ring.errors import ArgumentError, UnknownNameError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results import timing
from agentic_ring.results.rows import read_rows
from agentic_ring.results.timing import Spread, time_interleaved
from evals import benchmark
from evals.benchmarks.attention import Contender, Problem, compare, packed_row, ringattention
from evals.benchmarks.exactness import exactness
from evals.benchmarks.rows import all_rows, choose_rows, is_wrong, line_table, measure
from experiments.exorl.presets import PRESETS
from tests.commands import run_python

ROOT = Path(__file__).parents[2]
ROWS = {row.name: row for row in all_rows()}
TINY = Problem(tokens=16, heads=2, kv_heads=1, head_dim=8)
GPU_ROWS = ("gpu/exactness/xla", "gpu_paper")
MEASURED = ("attention/8192", "packed", "decode", "train_step", "rollouts", "llama/4096", *GPU_ROWS)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Lines of every kind of row at tiny sizes, without the peers, in one process."""
    path = tmp_path_factory.mktemp("benchmark") / "rows.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "MATMUL", {"cpu": 64})
        for package in ("ringattention", "transformers"):
            patch.setitem(sys.modules, package, None)
        for row in choose_rows(all_rows(), MEASURED):
            measure(row, tiny=True, path=path)
    return read_rows(path)


def of_row(lines, name):
    return [line for line in lines if line["row"].startswith(name)]


def test_the_row_of_the_papers_update_has_its_sizes():
    settings, preset = ROWS["gpu_paper/chain_step"].settings, PRESETS["paper"]
    assert TransformerConfig(**settings["transformer"]) == preset.transformer
    assert settings["trajectories"] == preset.trajectories


@pytest.mark.slow
def test_rows_have_values_with_their_spread_and_say_where_they_come_from(lines):
    for name in MEASURED:
        assert any(line["value"] for line in of_row(lines, name)), name
    for line in (line for line in lines if not line["left_out"]):
        assert 0 < float(line["value_low"]) <= float(line["value"]) <= float(line["value_high"])
        assert not is_wrong(line)
    assert is_wrong({"value": "nan", "limit": "1.0"})
    assert "cores" in lines[0]["hardware"]
    # A missing peer is left out with its extra.
    assert "* llama/4096, prefill, decode, transformers: left out" in line_table(lines).markdown()
    reasons = {line["contender"]: line["left_out"] for line in lines if line["left_out"]}
    assert "agentic_ring[peers]" in reasons["ringattention"]
    assert "agentic_ring[hf]" in reasons["transformers"]
    assert "2 query and 2 key heads" in reasons["ulysses_ring"]


@pytest.mark.slow
def test_contenders_are_compared_in_the_same_case(lines):
    plain = of_row(lines, "attention/")
    ratios = {(line["case"], line["contender"]): set(json.loads(line["ratios"])) for line in plain}
    assert ratios["forward", "ring"] == {"one device", "jax.nn"}
    assert ratios["forward+backward", "jax.nn"] == {"one device"}
    again = json.loads(of_row(lines, "llama")[3]["ratios"])["encoding again"]
    assert 0 < again[0] < 1, "the question without the document takes less than with it"
    packed = {line["contender"]: line for line in of_row(lines, "packed")}
    striped = packed["documents of 16, block_striped, ring of 2"]
    others = {"documents of 16, zigzag, ring of 2", "one document, block_striped, ring of 2"}
    assert set(json.loads(striped["ratios"])) == others
    assert json.loads(striped["details"])["live"] < 1 <= json.loads(striped["details"])["critical_path"]


def test_ringattention_computes_the_same():
    if find_spec("ringattention") is None:  # our wrapper imports it, after mending it for this JAX
        pytest.skip("needs the extra peers")
    mesh = make_mesh(MeshShape(ring=2), jax.devices()[:2])
    q, k, v, _ = replace(TINY, kv_heads=2).arrays(jax.NamedSharding(mesh, jax.P(None, "ring")))
    segments = jax.numpy.asarray(packed_row(16, 4))
    theirs = jax.jit(partial(ringattention, mesh=mesh))(q, k, v, segments)
    np.testing.assert_allclose(theirs, attention(q, k, v, segment_ids=segments), atol=2e-6)


def test_functions_are_timed_interleaved_after_a_warm_up():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.ratio([3.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == Spread(3.0, 2.0, 3.0), "of the same round"
    calls = []
    first, second = time_interleaved(2, lambda: calls.append("a"), lambda: calls.append("b"), calls=2)
    assert calls == ["a", "a", "b", "b"] * 3
    assert len(first) == len(second) == 2


def test_ratios_and_rates_of_attention_are_those_of_its_seconds(monkeypatch):
    functions = {"product": lambda q, k, v: q * (k + v), "sum": lambda q, k, v: q + k + v}
    contenders = [Contender.of(*named) for named in functions.items()]
    product, total = compare(TINY, contenders, ["sum"], rounds=3, directions=("forward",))
    assert total.ratios == {}
    assert product.value
    assert total.value
    assert product.value.low / total.value.high <= product.ratios["sum"].low <= product.ratios["sum"].high
    assert product.details["tflops"] == pytest.approx(TINY.flops("forward") / product.value.median / 1e12)
    # Two products of 2 T T H operations a head, half of the pairs; then five more of them.
    assert TINY.flops("forward+backward") == (2 + 5) * 2 * 16 * 16 * 8 * 2 / 2
    # What does not fit is left out before it runs.
    monkeypatch.setattr(device_memory, "HOST_SHARE", 1e-9)
    (line,) = compare(TINY, contenders[:1], [], rounds=1, directions=("forward",))
    assert line.left_out == "needs 0.0 GB of 0.0 GB"


def test_rows_are_listed_chosen_by_the_beginning_of_their_names_and_call_their_functions_rightly(capsys):
    assert benchmark.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(ROWS)
    assert benchmark.main(["--list", "--gpu-day"]) == 0
    assert {line.split("/")[0] for line in capsys.readouterr().out.splitlines()} == {"gpu"}
    assert choose_rows(all_rows(), ["decode", "packed/"]) == [ROWS["decode/524288"], ROWS["packed/16384"]]
    with pytest.raises(UnknownNameError, match="'hops'"):
        benchmark.main(["hops"])
    for row in ROWS.values():
        module, name = row.function.split(":")
        function = getattr(importlib.import_module(f"evals.benchmarks.{module}"), name)
        inspect.signature(function).bind(**row.settings)
        assert json.loads(json.dumps(row.settings)) == row.settings, "what a file gives back is equal"


def test_a_row_that_fails_is_named_and_can_be_measured_again(tmp_path, capsys):
    with pytest.raises(ArgumentError, match="gpu/decode/131072 needs a GPU"):
        measure(ROWS["gpu/decode/131072"], tiny=False, path=tmp_path / "rows.csv")
    row = replace(ROWS["packed/16384"], limit_seconds=0.01)
    assert benchmark.measure_all([row], tiny=True, path=tmp_path / "rows.csv") == 1
    printed = capsys.readouterr().out
    assert "packed/16384 was not measured: took longer than 0 s" in printed
    assert "python evals/benchmark.py packed/16384 --tiny --rows-to" in printed


@pytest.mark.slow
def test_rows_run_in_processes_of_their_own_and_measure_attention_with_only_jax(tmp_path):
    path, names = tmp_path / "r.csv", ("gpu/exactness/cudnn", "gpu/decode/131072")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ("evals/benchmark.py", *names, "--tiny", "--missing", "--rows-to", path)
    ended = run_python(*command, cwd=ROOT, env=environment)
    assert ended.returncode == 1, ended.stderr
    assert "1 of 2 rows measured" in ended.stdout
    assert "gpu/exactness/cudnn was not measured: exit status 1" in ended.stdout
    # The row that was measured would be left out the second time.
    assert [benchmark.is_measured(ROWS[name], True, path) for name in names] == [False, True]
    assert not benchmark.is_measured(ROWS[names[1]], False, path)
    absent = "flax,optax,rich,tyro,pydantic,orbax,grain,h5py,dm_control,gymnasium"
    bare = f"import sys; sys.modules.update(dict.fromkeys('{absent}'.split(','))); "
    bare += "from evals import benchmark; import evals.benchmarks.exactness; benchmark.main(sys.argv[1:])"
    path = tmp_path / "bare.csv"
    command = ("-c", bare, names[1], "--tiny", "--in-this-process", "--rows-to", path)
    ended = run_python(*command, cwd=ROOT, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert len(read_rows(path)) == 2


class OwnOutputKernel(XlaKernel):
    """A plausible wrong backward: the output of this hop's keys in the place of the global one."""

    def backward(self, tile, saved):
        own = Saved.of(self.forward(tile).output, saved.logsumexp, saved.d_output)
        return super().backward(tile, own)


@pytest.mark.slow
def test_a_wrong_gradient_of_a_hop_is_beyond_the_tolerance(monkeypatch):
    monkeypatch.setitem(registry._KERNELS, "own output", OwnOutputKernel)
    for line in exactness("own output", ["float32"], 32, [8], [2], masks=["causal", "full"]):
        assert line.details["output"] < 2e-6
        assert line.value
        assert is_wrong({"value": str(line.value.median), "limit": str(line.limit)})
