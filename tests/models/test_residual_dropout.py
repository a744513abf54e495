"""Dropout of residual branches: its rate, and masks that belong to tokens, whatever computes them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.errors import ConfigError
from agentic_ring.mesh import MeshShape
from agentic_ring.models.layers import ResidualDropout
from agentic_ring.models.model import Model
from tests.models.test_agentic_transformer import STEPS, losses, predict
from tests.models.tiny_agentic_transformer import fresh_params, tiny_config

SEQUENCES, TOKENS, WIDTH, RATE = 3, 50, 64, 0.3


def dropped(layer: int = 0, branch: int = 0, order: np.ndarray | None = None) -> np.ndarray:
    """Ones after dropout, with the tokens in this order, by default that of their positions."""
    order = np.arange(TOKENS) if order is None else order
    sequence = jnp.arange(SEQUENCES, dtype=jnp.uint32)[:, None].repeat(TOKENS, axis=1)
    position = jnp.broadcast_to(jnp.asarray(order, jnp.int32), sequence.shape)
    ones = jnp.ones((SEQUENCES, TOKENS, WIDTH))
    return np.asarray(ResidualDropout(sequence, position, RATE)(jnp.int32(layer), branch, ones))


def test_a_share_is_dropped_and_the_mean_stays():
    values = dropped()
    np.testing.assert_allclose(np.unique(values), [0, 1 / (1 - RATE)], rtol=1e-6)
    # 9,600 draws: a standard deviation of 0.005.
    assert abs((values == 0).mean() - RATE) < 0.02


def test_masks_follow_their_tokens_and_differ_between_tokens_sequences_layers_and_branches():
    order = np.random.default_rng(0).permutation(TOKENS)
    np.testing.assert_array_equal(dropped(order=order), dropped()[:, order])
    masks = np.concatenate(
        [dropped(layer, branch).reshape(-1, WIDTH) for layer in (0, 1) for branch in (0, 1)]
    )
    assert len(np.unique(masks, axis=0)) == 4 * SEQUENCES * TOKENS


@pytest.mark.parametrize(
    ("shape", "accumulation"),
    [
        (MeshShape(data=2, ring=4), 2),
        pytest.param(MeshShape(ring=8), 1, marks=pytest.mark.slow),
        pytest.param(MeshShape(stage=2, ring=4), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_loss_with_dropout_does_not_change_with_mesh_remat_and_accumulation(shape, accumulation):
    whole = losses(replace(tiny_config(), dropout=RATE), MeshShape(), jax.devices()[:1], updates=2)
    parts = losses(
        replace(tiny_config(remat="full"), dropout=RATE), shape, updates=2, accumulation=accumulation
    )
    np.testing.assert_allclose(parts, whole, rtol=2e-5)


def test_dropout_acts_only_where_there_are_seeds():
    model = Model(replace(tiny_config(), dropout=RATE))
    params = fresh_params(model)
    seeds = np.ones(STEPS.position.shape, np.uint32)
    dropped = jax.jit(lambda steps: model.bind(params).action_mixture(steps, None, seeds)[0])(STEPS)
    plain = np.asarray(predict(STEPS))
    assert not np.allclose(dropped[:, :, 0], plain, rtol=1e-2)
    np.testing.assert_array_equal(predict(STEPS, model.config), plain)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(ConfigError, match=rf"dropout is {rate}; expected a share in \[0, 1\)"):
        replace(tiny_config(), dropout=rate)
