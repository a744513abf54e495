"""Attention of one device's queries to the blocks of all devices, with its custom derivative.

JAX saves q, k, v, the output and the logsumexp, and nothing of any hop, also under ``jax.checkpoint``
within a scan over layers. The backward works from the *global* output and logsumexp; with those of
one hop in their place dq and dk come out wrong while the forward and dv stay right.
"""

import functools
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from agentic_ring.attention.inputs import AttentionInputs
from agentic_ring.attention.kernels.interface import Saved, SoftmaxState, with_sinks
from agentic_ring.attention.kernels.vanilla import VanillaKernel
from agentic_ring.attention.ring.collectives import vary_alike
from agentic_ring.attention.ring.hop import Block, Hop, Queries, join_pair, split_pair
from agentic_ring.attention.ring.transport import Transport
from agentic_ring.attention.scores import Scores
from agentic_ring.errors import ArgumentError

Arrays = TypeVar("Arrays")

SAVED_NAMES = ("attention_output", "attention_logsumexp")
"""Names of the two results of the forward that the backward needs beside q, k and v. Where a policy of
``jax.checkpoint`` saves them, the backward does not compute attention again."""


@dataclass(frozen=True)
class Route:
    """The static part: how blocks of keys arrive, and what is computed with each."""

    transport: Transport
    hop: Hop
    axes: tuple[str, ...]
    """Mesh axes that the sequence is sharded over."""
    logsumexp: bool = False
    """Whether the logsumexp is an output too, with a gradient."""


def attend_to_all_blocks(route: Route, inputs: AttentionInputs, scores: Scores) -> SoftmaxState:
    """Attention of this device's queries to the blocks of keys and values of all devices.

    The inputs are this device's shards; what changes scores is part of ``scores`` already.

    Returns:
      (output [B, T, N, V] in q's dtype, logsumexp [B, T, N] in its ``state_dtype``).
    """
    # Hops combine them all, and the carries of a scan must keep their type. Before the custom derivative, so
    # that JAX sums the gradient of an array that was the same on several devices.
    arrays = inputs, scores
    return _all_blocks(route, *vary_alike(arrays, like=arrays, axes=route.axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_blocks(route: Route, inputs: AttentionInputs, scores: Scores) -> SoftmaxState:
    state = _forward(route, inputs, scores)
    return state._replace(output=state.output.astype(inputs.q.dtype))


def _all_blocks_forward(
    route: Route, inputs: AttentionInputs, scores: Scores
) -> tuple[SoftmaxState, tuple[AttentionInputs, Scores, SoftmaxState]]:
    inputs, scores = _once(route, (inputs, scores))
    state = _forward(route, inputs, scores)
    output = checkpoint_name(state.output.astype(inputs.q.dtype), SAVED_NAMES[0])
    logsumexp = checkpoint_name(state.logsumexp, SAVED_NAMES[1])
    state = SoftmaxState(output, logsumexp)
    return state, (inputs, scores, state)


def _once(route: Route, arrays: Arrays) -> Arrays:
    """The same arrays, of which a second derivative is refused where the kernel has none."""
    return arrays if isinstance(route.hop.kernel, VanillaKernel) else _differentiable_once(arrays)


@jax.custom_jvp
def _differentiable_once(arrays: Arrays) -> Arrays:
    return arrays


@_differentiable_once.defjvp
def _refuse(*_: object) -> NoReturn:
    raise ArgumentError('attention has a second derivative only with kernel="vanilla"; pass that to the call')


# Under jax.checkpoint, so that masks, which depend on no input, are not computed ahead and kept as residuals.
@functools.partial(jax.checkpoint, static_argnums=0)
def _forward(route: Route, inputs: AttentionInputs, scores: Scores) -> SoftmaxState:
    queries = Queries(inputs.q, inputs.query, inputs.expansion)
    block = Block(join_pair(inputs.k, inputs.v), inputs.key)
    state, _ = route.transport.visit_blocks(
        block,
        lambda state, _, block, origin: (route.hop.forward(state, queries, block, origin, scores), None),
    )
    return state if inputs.sinks is None else with_sinks(state, inputs.sinks)


def _all_blocks_backward(
    route: Route, residuals: tuple[AttentionInputs, Scores, SoftmaxState], d_state: SoftmaxState
) -> tuple[AttentionInputs, None]:
    inputs, scores, state = residuals
    d_state = _once(route, d_state)
    k, v, sinks = inputs.k, inputs.v, inputs.sinks
    d_logsumexp = d_state.logsumexp if route.logsumexp else None
    queries = Queries(inputs.q, inputs.query, inputs.expansion)
    saved = Saved.of(*state, d_state.output, d_logsumexp)
    sums, d_block = route.transport.visit_blocks(
        Block(join_pair(k, v), inputs.key),
        lambda sums, d_block, block, origin: route.hop.backward(
            sums, d_block, queries, saved, block, origin, scores
        ),
    )
    primals = inputs.q, k, v, inputs.expansion
    found = sums.dq, *split_pair(d_block, k.shape[3]), sums.d_expansion
    dq, dk, dv, d_expansion = jax.tree.map(lambda d_x, x: d_x.astype(x.dtype), found, primals)
    d_sinks = None
    if sinks is not None:  # a sink's value is 0, so this is probability * (0 - delta), summed
        probability = jnp.exp(sinks.astype(saved.total.dtype) - saved.total)
        d_sinks = -(probability * saved.delta).sum((0, 1)).astype(sinks.dtype)
    gradients = {"q": dq, "k": dk, "v": dv, "expansion": d_expansion, "sinks": d_sinks}
    return replace(inputs, **gradients, query=None, key=None), None


_all_blocks.defvjp(_all_blocks_forward, _all_blocks_backward)
