"""Ring attention: exact attention over a sequence that is sharded over devices (arXiv 2310.01889).

Every device keeps its queries and passes its block of keys and values round the ring:

    hop           0          1          2          3         ring of 4
    device 0   q0 . k0    q0 . k3    q0 . k2    q0 . k1
    device 1   q1 . k1    q1 . k0    q1 . k3    q1 . k2      P blocks seen in P - 1 permutes
    ...

* The permute that fetches the next block is issued before the compute of this hop, on which it
  does not depend, and never inside a conditional: a device that skipped it would stall the ring.
* The backward goes round once more, recomputing scores from the *global* logsumexp. The gradients
  of a block travel with it, one hop behind: the sum of the earlier hops is under way while this hop
  computes what to add to it. After P permutes it is home.
* Everything that is summed across hops is float32 (arXiv 2205.14135 gives the recurrences).

The hops are a scan, not an unrolled loop: one copy of the kernel to compile whatever the ring, and
buffers that do not grow with it. The custom derivative keeps JAX from saving anything but q, k, v,
the output and the logsumexp, also under ``jax.checkpoint`` within a scan over layers.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.attention.arguments import Pair, check_arrays, hop_mask
from agentic_ring.attention.kernels import Gradients, Kernel, select_kernel
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.softmax import SoftmaxState, merge


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str | None,
    mask: MaskSpec,
    positions: Pair = None,
    segment_ids: Pair = None,
    scale: float | None = None,
    kernel: str = "auto",
    query_chunk: int | None = None,
    key_chunk: int | None = None,
) -> jax.Array:
    """Attention of this device's queries to the whole sequence, for use inside ``jax.shard_map``.

    Args:
      q: this device's queries [B, T, N, H].
      k: this device's keys [B, S, K, H], N a multiple of K.
      v: this device's values [B, S, K, H].
      axis_name: mesh axis that the sequence is sharded over; None where it is not.
      mask: static part of the mask.
      positions: of this device's tokens in the whole sequence, int [B, T] or [1, T], or a
        (query, key) pair. Where absent, the devices hold consecutive blocks in ring order.
      segment_ids: of this device's tokens; likewise. A negative id is padding.
      scale: of the scores; 1 / sqrt(H) where absent.
      kernel: one of ``agentic_ring.attention.KERNELS``.
      query_chunk: queries that the kernel works on at a time; chosen by the kernel where absent.
      key_chunk: keys that the kernel works on at a time; likewise.

    Returns:
      [B, T, N, H] in q's dtype; exactly 0 where a query has nothing to attend to.

    Raises:
      ArgumentError: shapes, dtypes or chunk sizes that do not fit.
      UnknownNameError: an unknown kernel.
    """
    check_arrays(q, k, v)
    index = 0 if axis_name is None else jax.lax.axis_index(axis_name)
    first = (index * q.shape[1], index * k.shape[1])
    hop = hop_mask(mask, q, k, positions, segment_ids, first)
    ring = _Ring(
        axis_name=axis_name,
        size=1 if axis_name is None else jax.lax.axis_size(axis_name),
        kernel=select_kernel(kernel, query_chunk, key_chunk),
        mask=mask,
        scale=1 / math.sqrt(q.shape[3]) if scale is None else float(scale),
    )
    return _attend(ring, *_vary_alike((q, k, v, hop.query, hop.key), axis_name))


@dataclass(frozen=True)
class _Ring:
    """What is static about one call."""

    axis_name: str | None
    size: int
    kernel: Kernel
    mask: MaskSpec
    scale: float

    def permute(self, tree: Any) -> Any:
        """Sends every array of the tree to the next device of the ring."""
        pairs = [(device, (device + 1) % self.size) for device in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis_name, pairs), tree)


def _vary_alike(arrays: Any, axis_name: str | None) -> Any:
    """Marks every array as varying over each mesh axis that any of them, or the ring, varies over.

    Hops mix them all, and the carries of a scan must keep their type. Done before the custom
    derivative, so that JAX sums the gradient of an array that was the same on several devices.
    """
    ring = () if axis_name is None else (axis_name,)
    axes = frozenset(ring).union(*(_varying(x) for x in jax.tree.leaves(arrays)))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - _varying(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, arrays)


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    ring: _Ring, q: jax.Array, k: jax.Array, v: jax.Array, query: TokenLabels, key: TokenLabels
) -> jax.Array:
    return _forward(ring, q, k, v, query, key).output.astype(q.dtype)


def _attend_forward(
    ring: _Ring, q: jax.Array, k: jax.Array, v: jax.Array, query: TokenLabels, key: TokenLabels
) -> tuple[jax.Array, tuple]:
    state = _forward(ring, q, k, v, query, key)
    output = state.output.astype(q.dtype)
    return output, (q, k, v, query, key, output, state.logsumexp)


def _attend_backward(ring: _Ring, residuals: tuple, d_output: jax.Array) -> tuple:
    q, k, v, query, key, output, logsumexp = residuals
    gradients = _backward(ring, q, k, v, query, key, output, logsumexp, d_output)
    return *(gradient.astype(q.dtype) for gradient in gradients), None, None


_attend.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.checkpoint, static_argnums=0)
def _forward(
    ring: _Ring, q: jax.Array, k: jax.Array, v: jax.Array, query: TokenLabels, key: TokenLabels
) -> SoftmaxState:
    def attend(block: tuple[jax.Array, TokenLabels]) -> SoftmaxState:
        (k, v), key = block
        return ring.kernel.forward(q, k, v, HopMask(ring.mask, query, key), scale=ring.scale)

    block = (jnp.stack((k, v)), key)  # one array for both: one permute
    if ring.size == 1:
        return attend(block)

    def hop(carry: tuple, _: None) -> tuple[tuple, None]:
        state, block = carry
        following = ring.permute(block)
        return (merge(state, attend(block)), following), None

    nothing = SoftmaxState(jnp.zeros_like(q, jnp.float32), jnp.full_like(q[..., 0], -jnp.inf, jnp.float32))
    (state, block), _ = jax.lax.scan(hop, (nothing, block), length=ring.size - 1)
    return merge(state, attend(block))


def _backward(
    ring: _Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    query: TokenLabels,
    key: TokenLabels,
    output: jax.Array,
    logsumexp: jax.Array,
    d_output: jax.Array,
) -> Gradients:
    def differentiate(block: tuple[jax.Array, TokenLabels]) -> tuple[jax.Array, jax.Array]:
        (k, v), key = block
        mask = HopMask(ring.mask, query, key)
        dq, dk, dv = ring.kernel.backward(q, k, v, output, logsumexp, d_output, mask, scale=ring.scale)
        return dq, jnp.stack((dk, dv))

    def hop(carry: tuple, _: None) -> tuple[tuple, None]:
        dq, d_block, block = carry
        following, d_block = ring.permute((block, d_block))
        d_query, contribution = differentiate(block)
        return (dq + d_query, d_block + contribution, following), None

    block = (jnp.stack((k, v)), key)
    following = ring.permute(block) if ring.size > 1 else block
    dq, d_block = differentiate(block)
    if ring.size > 1:
        (dq, d_block, block), _ = jax.lax.scan(hop, (dq, d_block, following), length=ring.size - 2)
        d_block = ring.permute(d_block)
        d_query, contribution = differentiate(block)
        dq, d_block = dq + d_query, ring.permute(d_block + contribution)
    return Gradients(dq, *d_block)
