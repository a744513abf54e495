"""Masks as ranges of rows that keys are hidden from."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic_ring.attention import MaskSpec, attention, hidden_outside
from agentic_ring.attention.mask import HopMask, TokenLabels
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape, make_mesh

T = 24
T_ROW, S_COLUMN = np.arange(T)[:, None], np.arange(T)[None]
CAUSAL = S_COLUMN <= T_ROW
STARTS = np.repeat([0, 7, 8, 19], [7, 1, 11, 5])  # of the document of each token
ENDS = np.repeat([7, 8, 19, 24], [7, 1, 11, 5])
IN_PREFIX = np.arange(T) < STARTS + 3
SUBTREE = np.array([24, 9, 5, 4, 5, 9, 7, 8, 9, *range(16, 17), *[16] * 6, *range(17, 25)])


def key_mask(mask: HopMask) -> np.ndarray:
    return np.asarray(mask.allowed())[0]


def labelled(spec: MaskSpec, hidden_rows: np.ndarray) -> HopMask:
    positions = jnp.arange(len(hidden_rows))[None]
    ranges = jnp.asarray(hidden_rows).reshape(1, len(hidden_rows), -1, 2)
    hidden = tuple((ranges[:, :, i, 0], ranges[:, :, i, 1]) for i in range(ranges.shape[2]))
    return HopMask(spec, TokenLabels(positions), TokenLabels(positions, hidden=hidden))


PATTERNS = {
    "packed documents": (True, 0, ENDS, CAUSAL & (STARTS[:, None] == STARTS)),
    "documents, each a prefix-LM": (
        False,
        np.where(IN_PREFIX, STARTS, np.arange(T)),
        ENDS,
        (STARTS[:, None] == STARTS) & (CAUSAL | IN_PREFIX),
    ),
    "one question, many answers": (
        True,
        0,
        np.where(np.arange(T) < 7, T, ENDS),
        CAUSAL & ((S_COLUMN < 7) | (STARTS[:, None] == STARTS)),
    ),
    "tree": (True, 0, SUBTREE, CAUSAL & (T_ROW < SUBTREE)),
    "window and global tokens": (
        True,
        0,
        np.where(np.arange(T) % 9 == 0, T, np.arange(T) + 4),
        CAUSAL & ((S_COLUMN % 9 == 0) | (T_ROW - S_COLUMN < 4)),
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_the_documentation(name: str):
    causal, first, end, expected = PATTERNS[name]
    hidden = np.asarray(hidden_outside(first, end))
    assert (key_mask(labelled(MaskSpec(causal), hidden)) == expected).all()


@given(st.data())
def test_chunks_are_skipped_only_where_nothing_attends(data: st.DataObject):
    """And all chunks without a visible pair are, where one range of rows hides every key of the chunk."""
    spec = MaskSpec(causal=data.draw(st.booleans()))
    numbers = data.draw(st.lists(st.integers(0, T), min_size=4 * T, max_size=4 * T))
    mask = labelled(spec, np.array(numbers).reshape(T, 4))
    size = data.draw(st.sampled_from([1, 2, 3, 8]))
    chunks = [labels.map(lambda x: x.reshape(1, -1, size)).bounds() for labels in (mask.query, mask.key)]
    query = jax.tree.map(lambda x: x[0, :, None], chunks[0])
    key = jax.tree.map(lambda x: x[0, None], chunks[1])
    reachable = np.asarray(mask.reachable(query, key))
    attends = key_mask(mask).reshape(T // size, size, T // size, size).any((1, 3))
    assert (reachable >= attends).all()
    if size == 1:
        assert (reachable == attends).all()


@cache
def compiled(causal: bool, layout: str):
    """Attention on a ring of 2, and written out over a mask [T, T]: outputs and three gradients of each."""
    mesh = make_mesh(MeshShape(ring=2), jax.devices()[:2])

    def on_ring(hidden: jax.Array, *arrays: jax.Array) -> tuple:
        output, vjp = jax.vjp(
            lambda *a: attention(
                *a, hidden_rows=hidden, mask=MaskSpec(causal), mesh=mesh, strategy="ring", layout=layout
            ),
            *arrays[:3],
        )
        return output, *vjp(arrays[3])

    def written_out(allowed: jax.Array, *arrays: jax.Array) -> tuple:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            weights = jnp.where(
                allowed, jnp.exp(jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5), 0
            )
            total = weights.sum(-1, keepdims=True)
            return jnp.einsum("bnts,bsnh->btnh", weights / jnp.where(total, total, 1), v)

        output, vjp = jax.vjp(attend, *arrays[:3])
        return output, *vjp(arrays[3])

    return jax.jit(on_ring), jax.jit(written_out)


@pytest.mark.parametrize("layout", ["zigzag", "block_striped"])
@given(st.data())
@settings(max_examples=25)
def test_drawn_masks_forward_and_backward(layout: str, data: st.DataObject):
    causal = data.draw(st.booleans())
    numbers = data.draw(st.lists(st.integers(0, T), min_size=4 * T, max_size=4 * T))
    hidden = np.array(numbers, np.int32).reshape(T, 4)
    arrays = [jax.random.normal(key, (1, T, 2, 4)) for key in jax.random.split(jax.random.key(0), 4)]
    on_ring, written_out = compiled(causal, layout)
    allowed = CAUSAL if causal else np.ones((T, T), bool)
    for first, end in (hidden[:, :2].T, hidden[:, 2:].T):
        allowed = allowed & ~((first <= T_ROW) & (end > T_ROW))
    for found, expected in zip(on_ring(hidden[None], *arrays), written_out(allowed, *arrays), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_refusals():
    q = jnp.zeros((2, 8, 2, 4))
    for hidden, message in (
        (
            jnp.zeros((2, 8, 3), int),
            r"shape \(2, 8, 3\); expected \(2, 8\) or \(1, 8\) and 2 or 4",
        ),
        (jnp.zeros((2, 7, 2), int), "hidden_rows has shape"),
        (jnp.zeros((2, 8, 2)), "hidden_rows has dtype float32; expected integers"),
    ):
        with pytest.raises(ArgumentError, match=message):
            attention(q, q, q, hidden_rows=hidden)
