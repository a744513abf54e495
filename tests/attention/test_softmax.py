"""The softmax state and its merge, whatever the pieces."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.attention.softmax import SoftmaxState, empty_state, merge, with_sinks

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
        merged = merge(merged, state(scores[start:end], values[start:end]))
    whole = state(scores, values)
    np.testing.assert_allclose(merged.logsumexp, whole.logsumexp, rtol=1e-6, atol=1e-6)
    # The difference of two float32 logsumexps errs by their size times 2**-24.
    np.testing.assert_allclose(merged.output, whole.output, rtol=1e-5, atol=1e-6 + 1e-6 * spread)


def test_two_empty_pieces_stay_empty():
    merged = merge(EMPTY, EMPTY)
    assert not merged.output.any()
    assert np.isneginf(merged.logsumexp).all()


def test_an_empty_piece_changes_nothing():
    some = state(np.array([3.0, -1.0]), np.eye(2))
    for merged in (merge(some, EMPTY), merge(EMPTY, some)):
        jax.tree.map(np.testing.assert_array_equal, merged, some)


def test_a_sink_that_is_switched_off_leaves_an_empty_row_at_0():
    state = with_sinks(empty_state(jnp.ones((1, 3, 2, 4)), 4), jnp.array([-jnp.inf, 0.5]))
    np.testing.assert_array_equal(state.output, 0)
    np.testing.assert_array_equal(state.logsumexp[0, 0], [-jnp.inf, 0.5])
