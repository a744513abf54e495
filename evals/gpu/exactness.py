"""Error of a kernel's output and gradients against the reference in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from agentic_ring.attention import MaskSpec, attention, inverse_order, order, reference_attention
from agentic_ring.attention.kernels.registry import select_kernel
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import mesh_platform
from evals.gpu.rows import Found
from evals.speed.attention_benchmark import Dtype, Implementation, Problem, UnsupportedError
from evals.speed.one_device_ring import EmulatedRing

TOLERANCES = {
    "float32": (2e-6, 1e-5),
    "bfloat16": (2 * 2**-8, 4 * 2**-8),
    "float16": (2 * 2**-11, 4 * 2**-11),
}
"""Largest error of the output and of a gradient, over the largest number of the reference's."""
HEADS = 8
"""Query heads."""
RING = 4
"""Devices of the emulated ring, each of whose hops is two quarters of a zigzag tile."""
ARRAYS = ("output", "dq", "dk", "dv")


def exactness(
    kernel: str, dtype: Dtype, causal: bool, tokens: int, head_dims: list[int], kv_heads: list[int]
) -> Found:
    """Compares ``attention`` and all hops of a ring with the reference, for each size and number of heads.

    The reference computes in float64 from the values that the inputs have in their dtype. Products of float32
    run at JAX's highest precision: the default of a GPU rounds their inputs to TF32.

    Returns:
      The largest error over its tolerance. The details hold the largest relative error of each array.

    Raises:
      UnsupportedError: a kernel of another platform.
    """
    try:
        selected = select_kernel(kernel)
    except ArgumentError as refusal:
        raise UnsupportedError(f"the {kernel} kernel does not run on a {mesh_platform()}") from refusal
    mask = MaskSpec(causal=causal)
    local = Implementation.of("attention", partial(attention, mask=mask, kernel=kernel)).both
    ring = partial(_in_zigzag_order, EmulatedRing(selected, RING, mask).both)
    worst: dict[str, Any] = dict.fromkeys(ARRAYS, 0.0)
    shares: list[float] = []
    for head_dim in head_dims:
        for key_heads in kv_heads:
            problem = Problem(tokens, HEADS, key_heads, head_dim, dtype)
            arrays = problem.arrays(SingleDeviceSharding(jax.devices()[0]))
            wanted = _reference(mask, arrays)
            for compute in (local, ring):
                with jax.default_matmul_precision("highest"):
                    found = jax.jit(compute)(*arrays)
                for name, got, want in zip(ARRAYS, found, wanted, strict=True):
                    error = float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())
                    worst[name] = float(np.maximum(worst[name], error))
                    shares.append(error / TOLERANCES[dtype][name != "output"])
    # A NaN in any array is the largest of all.
    return Found(float(np.max(shares)), "of tolerance", float(np.min(shares)), float(np.max(shares)), worst)


def _reference(mask: MaskSpec, arrays: tuple[jax.Array, ...]) -> list[np.ndarray]:
    """Output and gradients in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        both = Implementation.of("reference", partial(reference_attention, mask=mask)).both
        return [np.asarray(x) for x in jax.jit(both)(*wide)]


def _in_zigzag_order(both: Callable[..., Any], *arrays: jax.Array) -> list[jax.Array]:
    """Calls a function of arrays in zigzag order with arrays in the order of the text."""
    zigzag = order("zigzag", arrays[0].shape[1], RING)
    return [x[:, inverse_order(zigzag)] for x in both(*(x[:, zigzag] for x in arrays))]
