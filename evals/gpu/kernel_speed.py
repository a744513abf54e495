"""Speed of a hop's kernel beside JAX's own attention, and of a ring of one device beside local attention."""

from functools import partial
from typing import Any

import jax

from agentic_ring.attention import MaskSpec, attention
from agentic_ring.attention.kernels.registry import select_kernel
from agentic_ring.device_memory import DoesNotFitError
from agentic_ring.mesh import MeshShape, make_mesh
from evals.gpu.rows import Found
from evals.speed.attention_benchmark import Direction, Dtype, Implementation, Problem, SpeedRow, benchmark
from evals.speed.one_device_ring import OneCall

KERNEL, LOCAL, RING = "kernel", "local", "ring of 1"


def hop(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool,
    dtype: Dtype,
    kernel: str,
    direction: Direction,
    rounds: int,
    calls: int,
    peer: str,
) -> Found:
    """Times one call of a kernel as a hop makes it, interleaved with ``jax.nn.dot_product_attention``.

    Args:
      tokens, heads, kv_heads, head_dim, causal, dtype: see ``Problem``.
      kernel: one of ``agentic_ring.attention.KERNELS``.
      direction: what is timed.
      rounds, calls: see ``benchmark``.
      peer: implementation of ``jax.nn.dot_product_attention`` to compare with.

    Returns:
      TFLOP/s. The details have the ratio of the seconds to the peer's: below 1 the kernel is faster.
    """
    problem = Problem(tokens, heads, kv_heads, head_dim, dtype, causal)
    one_call = OneCall(select_kernel(kernel), MaskSpec(causal=causal))
    peer_name = f"jax.nn {peer}"
    dot_product_attention: Any = jax.nn.dot_product_attention
    peer_call = partial(dot_product_attention, is_causal=causal, implementation=peer)
    implementations = [
        Implementation(KERNEL, one_call.forward, one_call.both),
        Implementation.of(peer_name, peer_call),
    ]
    row, left_out = _timed(problem, implementations, KERNEL, peer_name, direction, rounds, calls)
    work = problem.flops(direction) / 1e12
    details: dict[str, Any] = {"seconds": row.seconds.median, "matmul_tflops": row.matmul_rate / 1e12}
    if peer_name in row.ratios:
        details |= {"peer": peer_name, **row.ratios[peer_name].cells("peer_ratio")}
    else:
        details["peer_left_out"] = left_out
    return Found(
        work / row.seconds.median, "TFLOP/s", work / row.seconds.high, work / row.seconds.low, details
    )


def ring_of_one(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool,
    dtype: Dtype,
    kernel: str,
    direction: Direction,
    rounds: int,
    calls: int,
) -> Found:
    """Times ``attention`` with the ring strategy on a ring of one device, interleaved with local attention.

    The arguments are those of ``hop``.

    Returns:
      Seconds over those of local attention, the median of the rounds' ratios.
    """
    problem = Problem(tokens, heads, kv_heads, head_dim, dtype, causal)
    local = partial(attention, mask=MaskSpec(causal=causal), kernel=kernel)
    ring = partial(local, mesh=make_mesh(MeshShape(ring=1), jax.devices()[:1]), strategy="ring")
    implementations = [Implementation.of(LOCAL, local), Implementation.of(RING, ring)]
    row, _ = _timed(problem, implementations, RING, LOCAL, direction, rounds, calls)
    ratio = row.ratios[LOCAL]
    return Found(ratio.median, "x local", ratio.low, ratio.high, {"seconds": row.seconds.median})


def _timed(
    problem: Problem,
    implementations: list[Implementation],
    name: str,
    reference: str,
    direction: Direction,
    rounds: int,
    calls: int,
) -> tuple[SpeedRow, list[str]]:
    """Returns the row of the implementation with this name, and why others were left out."""
    rows, left_out = benchmark(problem, implementations, (reference,), rounds, calls, (direction,))
    for row in rows:
        if row.contender == name:
            return row, left_out
    raise DoesNotFitError("; ".join(left_out))
