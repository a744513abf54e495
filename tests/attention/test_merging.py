"""The softmax state of a part of the keys and its merge; attention to sets of keys that are merged."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.attention import alibi_slopes, attention, attention_with_prefix, merge_attention
from agentic_ring.attention.kernels.interface import SoftmaxState, empty_state, merge, with_sinks
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from tests.attention.oracle import differentiated, exact, random_arrays, with_gradients

PLACES = np.arange(16)[None]


def test_merged_attention_is_attention_to_all_keys_with_its_gradients():
    arrays = random_arrays((2, 16, 4, 8), (2, 16, 2, 8), 6)

    def merged(q, k, v):
        parts = []
        for part in (slice(0, 5), slice(5, 16)):
            options = {"return_logsumexp": True, "positions": (PLACES, PLACES[:, part])}
            parts.append(attention(q, k[:, part], v[:, part], **options))
        return merge_attention(*parts)[0]

    for got, expected in zip(differentiated(merged, arrays)[:4], exact(arrays)[:4], strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


def test_a_shared_prefix_is_as_good_as_a_copy_in_every_row():
    q, k, v, d_output = random_arrays((3, 16, 4, 8), (3, 16, 2, 8))
    _, prefix_k, prefix_v, _ = random_arrays((1, 24, 2, 8), (1, 24, 2, 8), seed=1)
    attend = partial(attention_with_prefix, mesh=mesh_on_first_devices(MeshShape(ring=4)))
    output, dq, dk, dv, *d_prefix = with_gradients(attend, d_output, q, k, v, prefix_k[0], prefix_v[0])
    copied = (np.concatenate((p.repeat(3, 0), x), axis=1) for p, x in ((prefix_k, k), (prefix_v, v)))
    expected = exact([q, *copied, d_output], positions=(24 + PLACES, np.arange(40)[None]))
    np.testing.assert_allclose(output, expected.output, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(dq, expected.dq, rtol=5e-5, atol=5e-6)
    for found, of_prefix, want in zip((dk, dv), d_prefix, (expected.dk, expected.dv), strict=True):
        np.testing.assert_allclose(found, want[:, 24:], rtol=5e-5, atol=5e-6)
        np.testing.assert_allclose(of_prefix, want[:, :24].sum(0), rtol=5e-5, atol=5e-6)


def test_slopes_of_the_paper():
    np.testing.assert_allclose(alibi_slopes(8), 0.5 ** np.arange(1, 9))
    # Of twelve heads: eight as above, and every other one of sixteen.
    np.testing.assert_allclose(alibi_slopes(12)[8:], 0.5 ** np.array([0.5, 1.5, 2.5, 3.5]), rtol=1e-6)


join = jax.jit(merge)
EMPTY = SoftmaxState(jnp.zeros((1, 1, 1, 2)), jnp.full((1, 1, 1), -jnp.inf))


def state(scores: np.ndarray, values: np.ndarray) -> SoftmaxState:
    """One query's state over some keys, in float64 on the host."""
    if not len(scores):
        return EMPTY
    weights = np.exp(scores - scores.max())
    output = weights @ values / weights.sum()
    logsumexp = scores.max() + np.log(weights.sum())
    return SoftmaxState(jnp.asarray(output, jnp.float32).reshape(1, 1, 1, 2), jnp.full((1, 1, 1), logsumexp))


@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    spread=st.sampled_from([1e-3, 1.0, 100.0, 1e4]),
)
def test_merging_pieces_gives_the_whole(seed, sizes, spread):
    random = np.random.default_rng(seed)
    scores = random.normal(size=sum(sizes)) * spread
    values = random.normal(size=(sum(sizes), 2))
    ends = np.cumsum(sizes)
    merged = EMPTY
    for start, end in zip(ends - sizes, ends, strict=True):
        piece = state(scores[start:end], values[start:end])
        empty = join(EMPTY, piece), join(piece, EMPTY)
        jax.tree.map(np.testing.assert_array_equal, empty, (piece, piece))
        merged = join(merged, piece)
    whole = state(scores, values)
    np.testing.assert_allclose(merged.logsumexp, whole.logsumexp, rtol=1e-6, atol=1e-6)
    # The difference of two float32 logsumexps errs by their size times 2**-24.
    np.testing.assert_allclose(merged.output, whole.output, rtol=1e-5, atol=1e-6 + 1e-6 * spread)


def test_a_sink_that_is_switched_off_leaves_an_empty_row_at_0():
    state = with_sinks(empty_state(jnp.ones((1, 3, 2, 4)), 4), jnp.array([-jnp.inf, 0.5]))
    np.testing.assert_array_equal(state.output, 0)
    np.testing.assert_array_equal(state.logsumexp[0, 0], [-jnp.inf, 0.5])
