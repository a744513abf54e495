"""What a GPU must show: exact kernels, their speed, and what the code of a ring adds to them.

A ring that overlaps its transfers takes as long as its hops. All hops of all devices, one after another on
one GPU, therefore show the speed that a ring can reach: smaller tiles, merges in float32, and the sums of
gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention import MaskSpec, attention, inverse_order, order, reference_attention
from agentic_ring.attention.kernels.interface import Kernel, Saved, Tile
from agentic_ring.attention.kernels.registry import select_kernel
from agentic_ring.attention.mask import HopMask, TokenLabels
from agentic_ring.attention.ring.hop import Block, Hop, Origin, Queries, Sums
from agentic_ring.attention.scores import Scores
from agentic_ring.attention.softmax import SoftmaxState
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.results.timing import Spread
from evals.benchmarks.attention import Contender, Problem, compare, first_device, ringattention
from evals.benchmarks.rows import Line, UnsupportedError

TOLERANCES = {
    "float32": (2e-6, 1e-5),
    "bfloat16": (2 * 2**-8, 4 * 2**-8),
    "float16": (2 * 2**-11, 4 * 2**-11),
}
"""Largest error of the output and of a gradient, over the largest number of the reference's."""
HEADS = 8
"""Query heads of the exactness rows."""
RING = 4
"""Devices of the emulated ring of the exactness rows, each of whose hops is two quarters of a zigzag tile."""
QUEUED_FLOPS = 2e13
"""Operations of the calls that are queued in a round: long beside the start of a call."""


def exactness(
    kernel: str, dtypes: Sequence[str], tokens: int, head_dims: Sequence[int], kv_heads: Sequence[int]
) -> list[Line]:
    """Compares ``attention`` and all hops of a ring with the reference, for each size and number of heads.

    The reference computes in float64 from the values that the inputs have in their dtype. Products of float32
    run at JAX's highest precision: the default of a GPU rounds their inputs to TF32.

    Returns:
      The errors over their tolerance, the largest as the value. The details hold the largest relative error
      of each array.

    Raises:
      UnsupportedError: a kernel of another platform.
    """
    try:
        selected = select_kernel(kernel)
    except ArgumentError as refusal:
        raise UnsupportedError(f"the {kernel} kernel does not run on a {jax.default_backend()}") from refusal
    lines = []
    for dtype in dtypes:
        for mask in (MaskSpec(causal=True), MaskSpec(causal=False)):
            local = Contender.of("attention", partial(attention, mask=mask, kernel=kernel)).both
            ring = partial(_in_zigzag_order, EmulatedRing(selected, RING, mask).both)
            worst: dict[str, Any] = dict.fromkeys(("output", "dq", "dk", "dv"), 0.0)
            shares: list[float] = []
            for head_dim, key_heads in ((size, count) for size in head_dims for count in kv_heads):
                arrays = Problem(tokens, HEADS, key_heads, head_dim, dtype).arrays(first_device())
                wanted = _reference(mask, arrays)
                for compute in (local, ring):
                    with jax.default_matmul_precision("highest"):
                        found = jax.jit(compute)(*arrays)
                    for name, got, want in zip(worst, found, wanted, strict=True):
                        error = float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())
                        worst[name] = float(np.maximum(worst[name], error))
                        shares.append(error / TOLERANCES[dtype][name != "output"])
            # A NaN in any array is the largest of all.
            spread = Spread(float(np.max(shares)), float(np.min(shares)), float(np.max(shares)))
            case = f"{dtype}, {'causal' if mask.causal else 'full'}"
            lines.append(Line(case, kernel, spread, "of tolerance", details=worst))
    return lines


def _reference(mask: MaskSpec, arrays: tuple[jax.Array, ...]) -> list[np.ndarray]:
    """Output and gradients in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        both = Contender.of("reference", partial(reference_attention, mask=mask)).both
        return [np.asarray(x) for x in jax.jit(both)(*wide)]


def _in_zigzag_order(both: Callable[..., Any], *arrays: jax.Array) -> list[jax.Array]:
    """Calls a function of arrays in zigzag order with arrays in the order of the text."""
    zigzag = order("zigzag", arrays[0].shape[1], RING)
    return [x[:, inverse_order(zigzag)] for x in both(*(x[:, zigzag] for x in arrays))]


def kernel_and_ring(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    kernel: str,
    jax_nn: str,
    others: Sequence[str],
    rounds: int,
) -> list[Line]:
    """Times one kernel call, as a hop makes it, beside the code around it and JAX's own attention.

    Args:
      tokens, heads, kv_heads, head_dim, dtype: see ``Problem``.
      kernel: one of ``agentic_ring.attention.KERNELS``.
      jax_nn: implementation of ``jax.nn.dot_product_attention``.
      others: further contenders: "emulated ring of 8" and "ringattention".
      rounds: number of timed rounds.
    """
    problem, selected = Problem(tokens, heads, kv_heads, head_dim, dtype), select_kernel(kernel)
    one_call, emulated = OneCall(selected), EmulatedRing(selected, 8)
    mesh = make_mesh(MeshShape(ring=1), jax.devices()[:1])
    local = partial(attention, kernel=kernel)
    dot_product_attention: Any = jax.nn.dot_product_attention
    peer = partial(dot_product_attention, is_causal=True, implementation=jax_nn)
    contenders = [
        Contender("kernel", one_call.forward, one_call.both),
        Contender.of("one device", local),
        Contender.of("ring of 1", partial(local, mesh=mesh, strategy="ring")),
        Contender.of(f"jax.nn {jax_nn}", peer),
    ]
    optional = {
        "emulated ring of 8": Contender("emulated ring of 8", emulated.forward, emulated.both),
        "ringattention": Contender.of("ringattention", partial(ringattention, mesh=mesh)),
    }
    contenders += [optional[name] for name in others]
    calls = max(1, min(50, round(QUEUED_FLOPS / (2 * problem.flops("forward")))))
    references = ["kernel", "one device", f"jax.nn {jax_nn}", *others]
    return compare(problem, contenders, references, rounds, calls)


@dataclass(frozen=True)
class OneCall:
    """One call of a kernel for the whole sequence, without the code around it.

    Attributes:
      kernel: the kernel.
      mask: which keys a query attends to.
    """

    kernel: Kernel
    mask: MaskSpec = MaskSpec(causal=True)

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> SoftmaxState:
        """Computes attention of q, k, v [B, T, N or K, H]; the output has q's dtype."""
        state = self.kernel.forward(self._tile(q, k, v))
        return state._replace(output=state.output.astype(q.dtype))

    def both(self, q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the output and the gradients, in q's dtype."""
        saved = Saved.of(*self.forward(q, k, v), d_output)
        gradients = self.kernel.backward(self._tile(q, k, v), saved)
        return saved.output, *(gradient.astype(q.dtype) for gradient in gradients)

    def _tile(self, q: jax.Array, k: jax.Array, v: jax.Array) -> Tile:
        return Tile(q, k, v, HopMask(self.mask, TokenLabels(), TokenLabels()), _scores(q))


@dataclass(frozen=True)
class EmulatedRing:
    """All hops of all devices of a ring, one after another on one device, without the transfers.

    Attributes:
      kernel: kernel that computes the tiles.
      devices: number of devices of the ring.
      mask: causal or full.
    """

    kernel: Kernel
    devices: int
    mask: MaskSpec = MaskSpec(causal=True)

    @property
    def _hop(self) -> Hop:
        return Hop(self.kernel, self.mask, "zigzag" if self.mask.causal else None)

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> SoftmaxState:
        """Computes attention of q, k, v [B, T, N or K, H], T in zigzag order; the output has q's dtype."""
        scores, (queries, keys_values) = _scores(q), self._blocks(q, k, v)

        def device(indexed: tuple[jax.Array, jax.Array]) -> SoftmaxState:
            index, query = indexed

            def attend(state: SoftmaxState | None, source: jax.Array, own: bool = False) -> SoftmaxState:
                block = Block(keys_values[source], TokenLabels())
                origin = Origin(index, source, 0 if own else None)
                return self._hop.forward(state, Queries(query, TokenLabels()), block, origin, scores)

            def hop(state: SoftmaxState, number: jax.Array) -> tuple[SoftmaxState, None]:
                return attend(state, (index - number) % self.devices), None

            own = attend(None, index, own=True)
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

            def differentiate(
                sums: Sums | None, d_blocks: jax.Array, source: jax.Array, own: bool = False
            ) -> tuple[Sums, jax.Array]:
                block = Block(keys_values[source], TokenLabels())
                origin = Origin(index, source, 0 if own else None)
                queries = Queries(query, TokenLabels())
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


def _scores(q: jax.Array) -> Scores:
    return Scores(q.shape[-1] ** -0.5)


def _joined(x: jax.Array) -> jax.Array:
    """[devices, B, T / devices, ...] -> [B, T, ...]."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
