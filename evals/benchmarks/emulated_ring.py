"""All hops of a ring one after another on one device: the speed that a ring can reach.

A ring that overlaps its transfers takes as long as its hops. What they add to one kernel call are smaller
tiles, merges in float32, and the sums of gradients.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from agentic_ring.attention import MaskSpec
from agentic_ring.attention.kernels.interface import Kernel, Saved, SoftmaxState
from agentic_ring.attention.mask import TokenLabels
from agentic_ring.attention.ring.hop import Block, Hop, Origin, Queries, Sums
from agentic_ring.attention.scores import Scores


@dataclass(frozen=True)
class EmulatedRing:
    """A ring of ``devices`` whose tiles ``kernel`` computes; the mask is causal or full."""

    kernel: Kernel
    devices: int
    mask: MaskSpec

    @property
    def _hop(self) -> Hop:
        return Hop(self.kernel, self.mask, "zigzag" if self.mask.causal else None)

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> SoftmaxState:
        """Computes attention of q, k, v [B, T, N or K, H], T in zigzag order; the output has q's dtype."""
        scores, (queries, keys_values) = Scores(q.shape[-1] ** -0.5), self._blocks(q, k, v)

        def device(indexed: tuple[jax.Array, jax.Array]) -> SoftmaxState:
            index, query = indexed

            def attend(state: SoftmaxState | None, source: jax.Array, own: bool = False) -> SoftmaxState:
                block = Block(keys_values[source], TokenLabels())
                origin = Origin(index, source, 0 if own else None)
                return self._hop.forward(state, Queries(query, TokenLabels()), block, origin, scores)

            def hop(state: SoftmaxState, number: jax.Array) -> tuple[SoftmaxState, None]:
                return attend(state, (index - number) % self.devices), None

            state, _ = jax.lax.scan(hop, attend(None, index, own=True), jnp.arange(1, self.devices))
            return state._replace(output=state.output.astype(q.dtype))

        states = jax.lax.map(device, (jnp.arange(self.devices), queries))
        return SoftmaxState(*(_joined(x) for x in states))

    def both(self, q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the output and the gradients, in q's dtype and zigzag order."""
        state, scores = self.forward(q, k, v), Scores(q.shape[-1] ** -0.5)
        queries, keys_values = self._blocks(q, k, v)
        rows = (queries, *(self._split(x) for x in (*state, d_output)))

        def device(d_blocks: jax.Array, indexed: tuple) -> tuple[jax.Array, jax.Array]:
            index, query, *saved = indexed

            def differentiate(
                sums: Sums | None, d_blocks: jax.Array, source: jax.Array, own: bool = False
            ) -> tuple[Sums, jax.Array]:
                block, queries = Block(keys_values[source], TokenLabels()), Queries(query, TokenLabels())
                origin = Origin(index, source, 0 if own else None)
                sums, d_block = self._hop.backward(
                    sums, d_blocks[source], queries, Saved.of(*saved), block, origin, scores
                )
                return sums, d_blocks.at[source].set(d_block)

            def hop(carry: tuple[Sums, jax.Array], number: jax.Array) -> tuple[tuple, None]:
                return differentiate(*carry, (index - number) % self.devices), None

            start = differentiate(None, d_blocks, index, own=True)
            (sums, d_blocks), _ = jax.lax.scan(hop, start, jnp.arange(1, self.devices))
            return d_blocks, sums.dq.astype(q.dtype)

        zeros = jnp.zeros_like(keys_values, jnp.float32)
        d_blocks, dq = jax.lax.scan(device, zeros, (jnp.arange(self.devices), *rows))
        dk, dv = (_joined(x).astype(k.dtype) for x in d_blocks.swapaxes(0, 1))
        return state.output, _joined(dq), dk, dv

    def _blocks(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries [devices, B, T / devices, N, H]; keys and values [devices, 2, B, T / devices, K, H]."""
        return self._split(q), jnp.stack((self._split(k), self._split(v)), axis=1)

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], self.devices, -1, *x.shape[2:]).swapaxes(0, 1)


def _joined(x: jax.Array) -> jax.Array:
    """[devices, B, T / devices, ...] -> [B, T, ...]."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
