"""Error of a kernel's output and gradients against the reference in float64."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention import MaskSpec, attention, inverse_order, order, reference_attention
from agentic_ring.attention.kernels.registry import select_kernel
from agentic_ring.results.timing import Spread
from evals.benchmarks.attention import Contender, Problem
from evals.benchmarks.emulated_ring import EmulatedRing
from evals.benchmarks.rows import Line

TOLERANCES = {"float32": (2e-6, 1e-5), "bfloat16": (2**-7, 2**-6), "float16": (2**-10, 2**-9)}
"""Largest error of the output and of a gradient, over the largest number of the reference's."""
HEADS, RING = 8, 4
"""Query heads, and devices of the emulated ring, each of whose hops is two quarters of a zigzag tile."""


def exactness(
    kernel: str,
    dtypes: Sequence[str],
    tokens: int,
    head_dims: Sequence[int],
    kv_heads: Sequence[int],
    masks: Sequence[Literal["causal", "full"]],
) -> list[Line]:
    """Compares ``attention`` and all hops of a ring with the reference, for each size and number of heads.

    The reference computes in float64 from the values that the inputs have in their dtype. Products of float32
    run at JAX's highest precision: the default of a GPU rounds their inputs to TF32.

    Returns the errors over their tolerance, the largest as the value. The details hold the largest relative
    error of each array.
    """
    lines = []
    for dtype, shape in itertools.product(dtypes, masks):
        mask = MaskSpec(causal=shape == "causal")
        local = Contender.of("attention", partial(attention, mask=mask, kernel=kernel))
        reference = Contender.of("reference", partial(reference_attention, mask=mask)).both
        ring = partial(_in_zigzag_order, EmulatedRing(select_kernel(kernel), RING, mask).both)
        worst: dict[str, Any] = dict.fromkeys(("output", "dq", "dk", "dv"), 0.0)
        shares: list[float] = []
        for head_dim, key_heads in itertools.product(head_dims, kv_heads):
            arrays = Problem(tokens, HEADS, key_heads, head_dim, dtype).arrays(local.sharding)
            with jax.enable_x64(True):
                wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
                wanted = [np.asarray(x) for x in jax.jit(reference)(*wide)]
            for compute in (local.both, ring):
                with jax.default_matmul_precision("highest"):
                    found = jax.jit(compute)(*arrays)
                for name, got, want in zip(worst, found, wanted, strict=True):
                    error = float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())
                    worst[name] = float(np.maximum(worst[name], error))
                    shares.append(error / TOLERANCES[dtype][name != "output"])
        # A NaN in any array is the largest of all.
        spread = Spread(float(np.max(shares)), float(np.min(shares)), float(np.max(shares)))
        lines.append(Line(f"{dtype}, {shape}", kernel, spread, "of tolerance", details=worst, limit=1.0))
    return lines


def _in_zigzag_order(both: Callable[..., Any], *arrays: jax.Array) -> list[jax.Array]:
    """Calls a function of arrays in zigzag order with arrays in the order of the text."""
    zigzag = order("zigzag", arrays[0].shape[1], RING)
    return [x[:, inverse_order(zigzag)] for x in both(*(x[:, zigzag] for x in arrays))]
