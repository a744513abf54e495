"""The kernels of GPUs and TPUs compile for machines that are not there, and refuse what they cannot do.

Only the compiler of a platform can say so: without its package the test is skipped.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from agentic_ring.attention.cache import CachedAttentionInputs, cache_specs, empty_cache
from agentic_ring.attention.cache.cached_attention import attend_chunk
from agentic_ring.attention.kernels.cudnn import CudnnKernel
from agentic_ring.attention.kernels.interface import Saved, Tile
from agentic_ring.attention.kernels.splash import SplashKernel
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.scores import Dropout, Scores
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from evals.compile.machines import HARDWARE, CompilerMissingError, CompileTarget, compile_target
from tests.attention.kernels.tiles import SCALE, arrays, unlabelled

ROOT = Path(__file__).parents[3]
DROPOUT = Dropout(0.1, jnp.zeros(2, jnp.uint32), jnp.int32(0), jnp.int32(0))
FULL, CAUSAL, WINDOW = MaskSpec(causal=False), MaskSpec(), MaskSpec(window=700)


def machine(name: str, arrangement: str | int) -> CompileTarget:
    try:
        return compile_target(HARDWARE[name], arrangement)
    except CompilerMissingError as error:
        pytest.skip(str(error))


def compile_both(machine, kernel, spec, *, offset=0, segments=False, soft_cap=None, tokens=2048):
    """Compiles forward and backward, grouped queries, within a ring; returns the two programs' text."""
    devices, scores = machine.devices, Scores(SCALE, soft_cap)
    mesh = jax.make_mesh((len(devices),), ("ring",), axis_types=(AxisType.Auto,), devices=devices)
    sharding = jax.NamedSharding(mesh, jax.P("ring"))

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((len(devices), tokens, *shape), dtype, sharding=sharding)

    q, k = array(8, 128), array(2, 128)
    logsumexp, ids = array(8, dtype=jnp.float32), array(dtype=jnp.int32)

    def mask(ids):
        labels = TokenLabels(None, ids if segments else None)
        return HopMask(spec, labels, labels, offset)

    def forward(q, k, v, ids):
        return kernel.forward(Tile(q, k, v, mask(ids), scores))

    def backward(q, k, v, output, logsumexp, d_output, ids):
        return kernel.backward(Tile(q, k, v, mask(ids), scores), Saved.of(output, logsumexp, d_output))

    def program(function, *arguments):
        run = jax.shard_map(function, mesh=mesh, in_specs=jax.P("ring"), out_specs=jax.P("ring"))
        return machine.compile(jax.jit(run).lower(*arguments)).as_text()

    return program(forward, q, k, k, ids), program(backward, q, k, k, q, logsumexp, q, ids)


@pytest.mark.parametrize(("gpu", "spec"), [("a100", CAUSAL), ("h100", FULL), ("h200", WINDOW)])
def test_cudnn_compiles(gpu, spec):
    forward, backward = compile_both(machine(gpu, 8), CudnnKernel(), spec)
    assert '"__cudnn$fmhaSoftmax"' in forward
    assert '"__cudnn$fmhaSoftmaxBackward"' in backward


ON_A_GPU = """
from dataclasses import replace
import jax.numpy as jnp
import numpy as np
from agentic_ring.attention.kernels.cudnn import CudnnKernel
from agentic_ring.attention.kernels.interface import Tile
from agentic_ring.attention.kernels.xla import XlaKernel
from agentic_ring.attention.mask import MaskSpec
from agentic_ring.attention.scores import Scores
from tests.attention.kernels.tiles import SCALE, arrays, check, unlabelled

for spec in (MaskSpec(causal=False), MaskSpec(), MaskSpec(window=100)):
    for heads in ((4, 4), (4, 1)):
        given = arrays(384, 384, heads, head_dim=64, dtype=jnp.bfloat16)
        check(CudnnKernel(), unlabelled(spec), *given, tolerance=8e-3)

q, k, v, _ = arrays(256, 384, (4, 2), head_dim=64, dtype=jnp.bfloat16, batch=3)
mask = replace(unlabelled(MaskSpec(causal=False)), key_lengths=jnp.array([384, 100, 0]))
tile = Tile(q, k, v, mask, Scores(SCALE))
for got, wanted in zip(CudnnKernel().forward(tile), XlaKernel().forward(tile), strict=True):
    np.testing.assert_allclose(got, wanted, rtol=8e-3, atol=4e-2)
"""


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no GPU")
def test_cudnn_is_exact():
    """In a process of its own, as the tests run on the CPU."""
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    subprocess.run([sys.executable, "-c", ON_A_GPU], check=True, env=environment, cwd=ROOT)


TPUS = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}


@pytest.mark.parametrize(
    ("tpu", "spec", "options"),
    [
        ("v4", CAUSAL, {}),
        ("v5e", WINDOW, {"offset": 300, "segments": True, "soft_cap": 30.0}),
        ("v5p", FULL, {}),
        ("v6e", CAUSAL, {}),
    ],
)
def test_splash_compiles(tpu, spec, options):
    forward, backward = compile_both(machine(tpu, TPUS[tpu]), SplashKernel(), spec, **options)
    assert "splash_mha_fwd" in forward
    assert "splash_mha_dkv" in backward
    assert "splash_mha_dq" in backward


PREFILL_KERNELS = {
    "h100": ("__cudnn$fmhaSoftmax", '"mask_type": "CAUSAL"', '"mask_type": "PADDING"'),
    "v5e": ("splash_mha_fwd_residuals", "splash_mha_fwd_segmented_residuals"),
}


@pytest.mark.parametrize(
    ("slots", "transfer"), [(2**17, "all-gather"), (2**14, "collective-permute")], ids=["gathered", "ring"]
)
@pytest.mark.parametrize("name", PREFILL_KERNELS)
def test_prefill_compiles(name, slots, transfer):
    """A chunk of 8192 tokens after those of a bfloat16 cache, with queries gathered or round the ring."""
    target = machine(name, 8 if name == "h100" else "2x4")
    mesh, rules = make_mesh(MeshShape(ring=8), list(target.devices)), ShardingRules()

    def array(*shape, dtype=jnp.bfloat16, spec=jax.P(None, "ring")):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    specs = cache_specs(rules, "bfloat16", layers=1)
    cache = jax.eval_shape(lambda: empty_cache(1, 2, slots, 2, 128, "bfloat16", 8))
    cache = jax.tree.map(lambda x, spec: array(*x.shape, dtype=x.dtype, spec=spec), cache, specs)
    key, positions = array(2, 8192, 2, 128), array(2, 8192, dtype=jnp.int32)
    inputs = CachedAttentionInputs(array(2, 8192, 8, 128), key, key, positions, cache.layer(0))
    with jax.set_mesh(mesh):
        text = target.compile(jax.jit(lambda inputs: attend_chunk(inputs, rules)).lower(inputs)).as_text()
    assert f" {transfer}(" in text or f" {transfer}-start(" in text
    # The chunk against itself, and earlier keys, of which each row has a number of its own.
    for kernel in PREFILL_KERNELS[name]:
        assert kernel in text


@pytest.mark.parametrize("tpu", ["v4", "v5e"])
def test_splash_fits_wide_heads_in_float32(tpu):
    """The largest blocks that the kernel makes; the memory of a core is smallest on these."""
    target = machine(tpu, TPUS[tpu])
    sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
    q = jax.ShapeDtypeStruct((1, 2048, 2, 512), jnp.float32, sharding=sharding)
    logsumexp = jax.ShapeDtypeStruct((1, 2048, 2), jnp.float32, sharding=sharding)
    mask, scores = unlabelled(offset=5), Scores(SCALE, soft_cap=30.0)

    def backward(q, output, logsumexp, d_output):
        return SplashKernel().backward(Tile(q, q, q, mask, scores), Saved.of(output, logsumexp, d_output))

    target.compile(jax.jit(backward).lower(q, q, logsumexp, q))


SEGMENTS = TokenLabels(None, jnp.zeros((2, 128), jnp.int32))
CAPPED, DROPPED = Scores(SCALE, soft_cap=3.0), Scores(SCALE, dropout=DROPOUT)


@pytest.mark.parametrize(
    ("kernel", "named", "case"),
    [
        ("both", "positions", {"mask": unlabelled().placed(128, 128)}),
        ("both", "prefix", {"mask": unlabelled(MaskSpec(prefix=3))}),
        ("both", "dropout", {"scores": DROPPED}),
        ("both", "float64", {"dtype": "float64"}),
        ("cudnn", "segment ids", {"mask": HopMask(FULL, SEGMENTS, SEGMENTS)}),
        ("cudnn", "a window both ways", {"mask": unlabelled(MaskSpec(causal=False, window=9))}),
        ("cudnn", "off the diagonal", {"mask": unlabelled(offset=8)}),
        ("cudnn", "causal tile", {"keys": 32}),
        ("cudnn", "soft cap", {"scores": CAPPED}),
        ("cudnn", "dtype float32", {"dtype": "float32"}),
        ("cudnn", "head dimension 36", {"head_dim": 36}),
        ("splash", "length 100 is no multiple of 128", {"keys": 100}),
        ("splash", "dtype float16", {"dtype": "float16"}),
        ("splash", "attends to any key", {"mask": unlabelled(offset=-128)}),
    ],
)
def test_refusals_name_the_case(kernel, named, case):
    kernels = {"cudnn": CudnnKernel(), "splash": SplashKernel(interpret=True)}
    case = {"mask": unlabelled(), "scores": Scores(SCALE), "keys": 128, "dtype": "bfloat16", **case}
    mask, scores = case.pop("mask"), case.pop("scores")
    for run in kernels.values() if kernel == "both" else [kernels[kernel]]:
        with jax.enable_x64(True):
            q, k, v, d_output = arrays(128, **case)
            tile, saved = Tile(q, k, v, mask, scores), Saved.of(q, q[..., 0], d_output)
            with pytest.raises(NotImplementedError, match=named):
                run.forward(tile)
            with pytest.raises(NotImplementedError, match=named):
                run.backward(tile, saved)
