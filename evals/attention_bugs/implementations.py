"""What the known bugs are tried on: this library, and the package of the paper's authors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention import MaskSpec, attention
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from evals.attention_bugs.problem import PADDING, Arrays, Options, Result
from evals.speed.attention_benchmark import UnsupportedError
from evals.speed.peers import ringattention

DROPOUT_SEED = 7


def ours(options: Options, arrays: Arrays) -> Result:
    """``agentic_ring.attention.attention`` with the layout and kernel that it chooses itself."""
    return _as_float64(_ours(options, arrays))


@partial(jax.jit, static_argnums=0)
def _ours(options: Options, arrays: Arrays) -> Result:
    queries, keys = arrays.q.shape[1], arrays.k.shape[1]
    last = jnp.arange(keys - queries, keys)[None], jnp.arange(keys)[None]

    def attend(q, k, v, sinks):
        return attention(
            q,
            k,
            v,
            mesh=mesh_on_first_devices(MeshShape(ring=options.ring)),
            strategy=options.strategy,
            mask=MaskSpec(causal=options.causal, window=options.window),
            positions=None if queries == keys else last,
            segment_ids=arrays.segment_ids,
            sinks=sinks,
            dropout_rate=options.dropout_rate,
            dropout_key=jax.random.key(DROPOUT_SEED),
        )

    output, transpose = jax.vjp(attend, *arrays[:3], arrays.sinks)
    return Result(output, *transpose(arrays.d_output))


def authors(options: Options, arrays: Arrays, *, float32_logits: bool = True) -> Result:
    """``ringattention`` 0.1.2: padding is a bias, as its models do it; documents are segment ids.

    Args:
      float32_logits: its argument of this name; scores and sums are in the inputs' dtype without.

    Raises:
      UnsupportedError: the package is missing, or cannot compute this call.
    """
    block, rest = divmod(arrays.q.shape[1], options.ring)
    if options.window is not None:
        raise UnsupportedError("has no argument for a window")
    if arrays.sinks is not None:
        raise UnsupportedError("has no argument for sinks")
    if arrays.q.shape != arrays.k.shape:
        raise UnsupportedError("needs as many queries as keys; decodes with a function of its own")
    if rest:
        raise UnsupportedError(f"{arrays.q.shape[1]} tokens do not divide over {options.ring} devices")
    return _as_float64(_authors(options, block, float32_logits, arrays))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _authors(options: Options, block: int, float32_logits: bool, arrays: Arrays) -> Result:
    with jax.ensure_compile_time_eval():  # the package takes the key as a constant
        dropout_key = jax.random.key(DROPOUT_SEED)
    attend = ringattention(
        mesh_on_first_devices(MeshShape(ring=options.ring)),
        arrays.q.dtype,
        chunk=block,
        causal=options.causal,
        float32_logits=float32_logits,
        dropout_rate=options.dropout_rate,
        dropout_key=dropout_key,
    )
    bias = None
    if arrays.segment_ids is not None:
        least = jnp.finfo(arrays.q.dtype).min
        bias = jnp.where(arrays.segment_ids == PADDING, least, 0)[:, None, None].astype(arrays.q.dtype)
    output, transpose = jax.vjp(lambda *qkv: attend(*qkv, bias, arrays.segment_ids), *arrays[:3])
    return Result(output, *transpose(arrays.d_output))


def _as_float64(result: Result) -> Result:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), result)
