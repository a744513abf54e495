"""Attention to sets of keys that are merged, and what is added to scores by head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import (
    MaskSpec,
    alibi_slopes,
    attention,
    attention_with_prefix,
    merge_attention,
    reference_attention,
)
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape, make_mesh


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def test_merged_attention_is_attention_to_all_keys_with_its_gradients():
    q, k, v, d_output = arrays((2, 16, 4, 8), (2, 16, 2, 8), (2, 16, 2, 6), (2, 16, 4, 6))

    def merged(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def of(part: slice) -> tuple[jax.Array, jax.Array]:
            options = {"mask": MaskSpec(), "positions": (jnp.arange(16)[None], jnp.arange(16)[None, part])}
            output, logsumexp = attention(q, k[:, part], v[:, part], return_logsumexp=True, **options)
            return output, logsumexp

        return merge_attention(of(slice(0, 5)), of(slice(5, 16)))[0]

    got, vjp = jax.vjp(merged, q, k, v)
    expected, reference = jax.vjp(reference_attention, q, k, v)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    for a, b in zip(vjp(d_output), reference(d_output), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("ring", [1, 4])
def test_a_shared_prefix_is_as_good_as_a_copy_in_every_row(ring: int):
    q, k, v, prefix_k, prefix_v = arrays((3, 16, 4, 8), (3, 16, 2, 8), (3, 16, 2, 8), (24, 2, 8), (24, 2, 8))
    mesh = make_mesh(MeshShape(ring=ring), devices=jax.devices()[:ring])

    def copied(q: jax.Array, k: jax.Array, v: jax.Array, *prefix: jax.Array) -> jax.Array:
        keys, values = (
            jnp.concatenate((jnp.broadcast_to(p, (3, *p.shape)), x), axis=1)
            for p, x in zip(prefix, (k, v), strict=True)
        )
        positions = 24 + jnp.arange(16)[None], jnp.arange(40)[None]
        return reference_attention(q, keys, values, positions=positions)

    def shared(*arrays: jax.Array) -> jax.Array:
        return attention_with_prefix(*arrays, mesh=mesh)

    inputs = q, k, v, prefix_k, prefix_v
    got, vjp = jax.vjp(jax.jit(shared), *inputs)
    expected, reference = jax.vjp(copied, *inputs)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    for a, b in zip(vjp(q), reference(q), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-5, atol=5e-6)


def test_slopes_of_the_paper():
    np.testing.assert_allclose(alibi_slopes(8), 0.5 ** np.arange(1, 9))
    # Of twelve heads: eight as above, and every other one of sixteen.
    np.testing.assert_allclose(alibi_slopes(12)[8:], 0.5 ** np.array([0.5, 1.5, 2.5, 3.5]), rtol=1e-6)


def test_refusals():
    q, k, prefix = arrays((2, 8, 4, 8), (2, 8, 2, 8), (5, 2, 8))
    with pytest.raises(ArgumentError, match=r"prefix_k has shape \(5, 4, 4\) .* expected \[S, K, H\]"):
        attention_with_prefix(q, k, k, prefix.reshape(5, 4, 4), prefix)
    with pytest.raises(ArgumentError, match="alibi_slopes was given, but a shared prefix does not take it"):
        attention_with_prefix(q, k, k, prefix, prefix, alibi_slopes=alibi_slopes(4))
    with pytest.raises(ArgumentError, match=r"alibi_slopes has shape \(3,\); expected one"):
        attention(q, k, k, alibi_slopes=alibi_slopes(3))
    with pytest.raises(ArgumentError, match="head_windows has 2 entries; expected one per query head, 4"):
        attention(q, k, k, head_windows=(1, 2))
    with pytest.raises(ArgumentError, match="head_windows has 0; it must be at least 1"):
        attention(q, k, k, head_windows=(1, None, 0, 2))
