"""Overhead of the ring code over its kernel on one GPU, and speed of a long sequence on one GPU.

    python evals/gpu_attention_speed.py --rows-to gpu.csv

Two sections, each forward and forward+backward, timed as in ``evals.speed.attention_benchmark``:

1. One call of the bare kernel; ``attention`` on one device (the same call with everything around it); all
   hops of all devices of a ring, one after another on this GPU; and JAX's own cuDNN attention. A ring that
   overlaps its transfers takes as long as its hops, so the third is the speed that a ring can reach: smaller
   tiles, merges in float32, and the sums of gradients.
2. One layer of ``attention`` over a long sequence.

On another platform give its kernel and small sizes: ``--kernel xla --tokens 1024 --long-tokens 0 ...``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from agentic_ring import cli
from agentic_ring.attention import attention
from agentic_ring.attention.kernels.interface import Kernel, Saved, Tile
from agentic_ring.attention.kernels.registry import select_kernel
from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.ring.hop import Block, Hop, Origin, Queries
from agentic_ring.attention.scores import Scores
from agentic_ring.attention.softmax import SoftmaxState, merge
from agentic_ring.errors import ArgumentError
from evals.common.rows import write_rows
from evals.speed.attention_benchmark import Dtype, Implementation, Problem, SpeedRow, benchmark, print_rows

CAUSAL = MaskSpec(causal=True)
BARE = "bare kernel"


@dataclass(frozen=True)
class OneCall:
    """One call of a kernel for the whole sequence, without the code around it."""

    kernel: Kernel

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> SoftmaxState:
        """Computes attention of q, k, v [B, T, N or K, H]; the output has q's dtype."""
        state = self.kernel.forward(Tile(q, k, v, _WHOLE, _scores(q)))
        return state._replace(output=state.output.astype(q.dtype))

    def both(self, q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the output and the gradients, in q's dtype."""
        saved = Saved(*self.forward(q, k, v), d_output)
        gradients = self.kernel.backward(Tile(q, k, v, _WHOLE, _scores(q)), saved)
        return saved.output, *(gradient.astype(q.dtype) for gradient in gradients)


@dataclass(frozen=True)
class EmulatedRing:
    """All hops of all devices of a ring, one after another on one device, without the transfers.

    Attributes:
      kernel: kernel that computes the tiles.
      devices: number of devices of the ring.
    """

    kernel: Kernel
    devices: int

    @property
    def _hop(self) -> Hop:
        return Hop(self.kernel, CAUSAL, "zigzag")

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> SoftmaxState:
        """Computes attention of q, k, v [B, T, N or K, H], T in zigzag order; the output has q's dtype."""
        scores, (queries, keys_values) = _scores(q), self._blocks(q, k, v)

        def device(indexed: tuple[jax.Array, jax.Array]) -> SoftmaxState:
            index, query = indexed

            def attend(source: jax.Array, distance: int | None = None) -> SoftmaxState:
                block = Block(keys_values[source], TokenLabels())
                origin = Origin(index, source, distance)
                return self._hop.forward(Queries(query, TokenLabels()), block, origin, scores)

            def hop(state: SoftmaxState, number: jax.Array) -> tuple[SoftmaxState, None]:
                return merge(state, attend((index - number) % self.devices)), None

            own = attend(index, distance=0)
            state, _ = jax.lax.scan(hop, own, jnp.arange(1, self.devices))
            return state._replace(output=state.output.astype(q.dtype))

        states = jax.lax.map(device, (jnp.arange(self.devices), queries))
        return SoftmaxState(*(_joined(x) for x in states))

    def both(self, q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the output and the gradients, in q's dtype and zigzag order."""
        state, scores = self.forward(q, k, v), _scores(q)
        queries, keys_values = self._blocks(q, k, v)
        rows = (queries, *(self._split(x) for x in (*state, d_output)))

        def device(d_blocks: jax.Array, indexed: tuple) -> tuple[jax.Array, jax.Array]:
            index, query, *saved = indexed

            def differentiate(source: jax.Array, distance: int | None = None) -> tuple[jax.Array, jax.Array]:
                block = Block(keys_values[source], TokenLabels())
                origin = Origin(index, source, distance)
                queries = Queries(query, TokenLabels())
                return self._hop.backward(queries, Saved(*saved), block, origin, scores)

            def hop(carry: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple, None]:
                dq, d_blocks = carry
                source = (index - number) % self.devices
                d_query, contribution = differentiate(source)
                return (dq + d_query, d_blocks.at[source].add(contribution)), None

            dq, d_block = differentiate(index, distance=0)
            start = (dq, d_blocks.at[index].add(d_block))
            (dq, d_blocks), _ = jax.lax.scan(hop, start, jnp.arange(1, self.devices))
            return d_blocks, dq.astype(q.dtype)

        zeros = jnp.zeros_like(keys_values, jnp.float32)
        d_blocks, dq = jax.lax.scan(device, zeros, (jnp.arange(self.devices), *rows))
        dk, dv = (_joined(x).astype(k.dtype) for x in d_blocks.swapaxes(0, 1))
        return state.output, _joined(dq), dk, dv

    def _blocks(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries [devices, B, T / devices, N, H]; keys and values [devices, 2, B, T / devices, K, H]."""
        return self._split(q), jnp.stack((self._split(k), self._split(v)), axis=1)

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], self.devices, -1, *x.shape[2:]).swapaxes(0, 1)


_WHOLE = HopMask(CAUSAL, TokenLabels(), TokenLabels())


def _scores(q: jax.Array) -> Scores:
    return Scores(q.shape[-1] ** -0.5)


def _joined(x: jax.Array) -> jax.Array:
    """[devices, B, T / devices, ...] -> [B, T, ...]."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def ring_on_one_device(kernel: str, devices: int, tokens: int) -> list[Implementation]:
    """Returns the implementations of the first section.

    Args:
      kernel: one of ``agentic_ring.attention.KERNELS``.
      devices: number of devices of the emulated ring.
      tokens: sequence length, a multiple of twice as many.

    Raises:
      ArgumentError: the tokens do not divide, or a kernel of another platform.
      UnknownNameError: an unknown kernel.
    """
    if tokens % (2 * devices):
        raise ArgumentError(
            f"tokens is {tokens}, which does not divide over a zigzag ring of {devices}; "
            f"choose a multiple of {2 * devices}"
        )
    selected = select_kernel(kernel)
    bare, ring = OneCall(selected), EmulatedRing(selected, devices)
    implementations = [
        Implementation(BARE, bare.forward, bare.both),
        _local(kernel),
        Implementation(f"emulated ring of {devices}", ring.forward, ring.both),
    ]
    if kernel == "cudnn":
        jax_cudnn: Callable[..., jax.Array] = partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
        )
        implementations.append(Implementation.of("jax.nn cudnn", jax_cudnn))
    return implementations


def _local(kernel: str) -> Implementation:
    return Implementation.of("ours local", partial(attention, kernel=kernel))


def main(
    tokens: int = 16_384,
    long_tokens: int = 524_288,
    ring: int = 8,
    heads: int = 16,
    kv_heads: int | None = None,
    head_dim: int = 128,
    dtype: Dtype = "bfloat16",
    kernel: str = "cudnn",
    turns: int = 10,
    calls: int = 10,
    rows_to: Path | None = None,
) -> None:
    """Times a kernel, the code around it and an emulated ring on one device, then a long sequence.

    Args:
      tokens: Sequence length of the first section; a multiple of twice the ring.
      long_tokens: Sequence length of the second section; 0 leaves the section out.
      ring: Number of devices of the emulated ring.
      heads: Number of query heads.
      kv_heads: Number of key and value heads; as many as query heads if left out.
      head_dim: Size of a head.
      dtype: Type of all arrays, and of the matrix product that rates are compared with.
      kernel: Kernel of all implementations except JAX's.
      turns: Timed rounds of the first section; the second has a third of them.
      calls: Calls of each implementation per round of the first section; the second has one.
      rows_to: CSV file for the rows; none is written if left out.
    """
    problem = Problem(tokens, heads, heads if kv_heads is None else kv_heads, head_dim, dtype)
    sections = [(problem, ring_on_one_device(kernel, ring, tokens), turns, calls)]
    if long_tokens:
        sections.append((replace(problem, tokens=long_tokens), [_local(kernel)], max(1, turns // 3), 1))
    rows: list[SpeedRow] = []
    for problem, implementations, turns, calls in sections:
        found, left_out = benchmark(problem, implementations, (BARE,), turns, calls)
        title = f"causal, {problem.tokens:,} tokens, {heads} heads of {head_dim}, {dtype}, kernel {kernel}"
        print_rows(title, found, left_out)
        rows += found
        if rows_to is not None and rows:
            write_rows(rows_to, [row.columns() for row in rows])


if __name__ == "__main__":
    cli.run(main)
