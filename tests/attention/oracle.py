"""Attention in float64 by NumPy, with its gradients, and the comparison of other attention with it."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention.mask import HopMask, MaskSpec, TokenLabels
from agentic_ring.attention.scores import Dropout


class Result(NamedTuple):
    """Attention and the gradients of its inner product with ``d_output``.

    Where the logsumexp is an output, its inner product with ``d_output.sum(-1)`` is added before.
    """

    output: Any
    dq: Any
    dk: Any
    dv: Any
    d_sinks: Any  # None without sinks
    logsumexp: Any  # of the call under test, None where it is no output


def random_arrays(
    q: tuple[int, ...], k: tuple[int, ...], values: int | None = None, seed=0
) -> list[np.ndarray]:
    """Standard normal q, k, v and gradient of the output, float32."""
    generator, v = np.random.default_rng(seed), values or k[3]
    shapes = q, k, (*k[:3], v), (*q[:3], v)
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


def differentiated(function, arrays, sinks=None, **options) -> Result:
    """``function(q, k, v, **options)`` with its gradients; the arrays are q, k, v and d_output."""
    labels = {name: x for name, x in options.items() if hasattr(jax.tree.leaves(x)[0], "shape")}
    static = tuple((name, x) for name, x in options.items() if name not in labels)
    return _differentiated(function, static, *arrays, sinks, labels)


@partial(jax.jit, static_argnums=(0, 1))
def _differentiated(function, static, q, k, v, d_output, sinks, labels) -> Result:
    def attend(q, k, v, sinks):
        return function(q, k, v, **dict(static), **labels, **({} if sinks is None else {"sinks": sinks}))

    found, vjp = jax.vjp(attend, q, k, v, sinks)
    if not isinstance(found, tuple):
        return Result(found, *vjp(d_output.astype(found.dtype)), None)
    return Result(found[0], *vjp((d_output, d_output.sum(-1).astype(found[1].dtype))), found[1])


@partial(jax.jit, static_argnums=0)
def with_gradients(function, d_output, *arrays) -> tuple:
    """The output of ``function`` and the gradients of its inner product with ``d_output``."""
    output, vjp = jax.vjp(function, *arrays)
    return output, *vjp(d_output)


def exact(
    arrays,
    mask=MaskSpec(),
    *,
    positions=None,
    segment_ids=None,
    hidden_rows=None,
    scale=None,
    soft_cap=None,
    sinks=None,
    alibi_slopes=None,
    head_windows=None,
    dropout_rate=0.0,
    dropout_key=None,
    return_logsumexp=False,
) -> Result:
    """What ``attention`` gives, with the gradients; the logsumexp in any case."""
    q, k, v, d_output = (np.asarray(x, np.float64) for x in arrays)
    lengths, shape, group = (q.shape[1], k.shape[1]), k.shape, q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))

    def pair(labels, absent):
        labels = tuple(absent(n)[None] for n in lengths) if labels is None else labels
        query, key = labels if isinstance(labels, tuple) else (labels, labels)
        return np.asarray(query)[:, :, None], np.asarray(key)[:, None]

    (t, s), (of_t, of_s) = pair(positions, np.arange), pair(segment_ids, np.zeros)
    near = np.ones((), bool)
    if mask.causal:
        near = near & (s <= t)
    if mask.window is not None:
        near = near & (abs(t - s) < mask.window)
    allowed = (near | (s < mask.prefix)) & (of_t == of_s) & (t >= 0) & (s >= 0) & (of_t >= 0) & (of_s >= 0)
    if hidden_rows is not None:
        ranges = np.moveaxis(np.asarray(hidden_rows)[:, None], -1, 0)
        for first, end in zip(ranges[::2], ranges[1::2], strict=True):
            allowed = allowed & ((t < first) | (t >= end))
    allowed, distance = allowed[:, None], abs(t - s)[:, None]  # [B or 1, N or 1, T, S]
    if head_windows is not None:
        windows = [np.inf if window is None else window for window in head_windows]
        allowed = allowed & (distance < np.reshape(windows, (-1, 1, 1)))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale
    slope = np.ones(())
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
        slope = 1 - (scores / soft_cap) ** 2
    if alibi_slopes is not None:
        scores = scores - np.asarray(alibi_slopes, np.float64)[:, None, None] * distance
    scores = np.where(allowed, scores, -np.inf)
    logsumexp = np.logaddexp.reduce(scores, axis=-1)
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64)[:, None]
        logsumexp = np.logaddexp(logsumexp, sinks)
    total = np.where(np.isneginf(logsumexp), 0.0, logsumexp)
    weights, kept = np.exp(scores - total[..., None]), np.ones(())
    if dropout_rate:
        query, key = ((t[..., 0], of_t[..., 0]), (s[:, 0], of_s[:, 0]))
        labels = [TokenLabels(*(jnp.asarray(x, jnp.int32) for x in pair)) for pair in (query, key)]
        dropout = Dropout.from_key(dropout_rate, dropout_key, jnp.int32(0), jnp.int32(0))
        rows, heads = jnp.arange(len(q)), jnp.arange(q.shape[2])[None]
        factors = jax.jit(Dropout.factors)(dropout, HopMask(mask, *labels), rows, heads)
        kept = (np.asarray(factors) > 0) / (1 - dropout_rate)
    output = np.einsum("bnts,bsnh->btnh", weights * kept, v)
    d_total = (d_output.sum(-1) * return_logsumexp - (output * d_output).sum(-1)).swapaxes(1, 2)
    d_weights = kept * np.einsum("btnh,bsnh->bnts", d_output, v) + d_total[..., None]
    d_scores = weights * d_weights * slope * scale

    def of_group(x):
        return x.reshape(*shape[:3], group, -1).sum(3)

    return Result(
        output,
        np.einsum("bnts,bsnh->btnh", d_scores, k),
        of_group(np.einsum("bnts,btnh->bsnh", d_scores, q)),
        of_group(np.einsum("bnts,btnh->bsnh", weights * kept, d_output)),
        None if sinks is None else (np.exp(sinks - total) * d_total).sum((0, 2)),
        logsumexp.swapaxes(1, 2),
    )


def errors(result: Result, expected: Result) -> dict[str, float]:
    """The largest difference over the largest value, by array; infinite where a number is not finite."""
    found = {}
    for name, got, want in zip(Result._fields, result, expected, strict=True):
        if got is not None:
            got, empty = np.asarray(got, np.float64), np.isneginf(want)
            assert (np.isneginf(got) == empty).all()
            got, want = np.where(empty, 0, got), np.where(empty, 0, want)
            off = np.abs(got - want).max()
            found[name] = off / (np.abs(want).max() or 1.0) if np.isfinite(off) else np.inf
    return found
