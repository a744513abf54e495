"""Rotary positions against float64 arithmetic, also at positions where float32 angles are inaccurate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.errors import ArgumentError
from agentic_ring.models.layers import RMSNorm
from agentic_ring.models.self_attention import apply_rotary, attention_factor, inverse_frequencies
from agentic_ring.models.transformer_config import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling

HEAD_DIM = 64
SCALINGS = [
    None,
    LinearScaling(8.0),
    DynamicScaling(4.0, 4096, 1 << 20),
    YarnScaling(16.0, 8192),
    Llama3Scaling(8.0, 1.0, 4.0, 8192),
]


def reference(x, positions, theta, scaling):
    angles = positions[..., None, None].astype(np.float64) * inverse_frequencies(theta, x.shape[-1], scaling)
    sin, cos = (attention_factor(scaling) * f(angles) for f in (np.sin, np.cos))
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.rope_type if s else "plain")
@pytest.mark.parametrize("theta", [1e4, 5e7])
def test_rotation_is_exact_at_any_position(theta, scaling):
    rotate = jax.jit(lambda x, p: apply_rotary(x, p, theta, scaling))
    x = np.random.default_rng(0).standard_normal((1, 8, 2, HEAD_DIM)).astype(np.float32)
    for start in (0, 524_280, 1_048_570, 2**24 - 8):
        positions = np.arange(start, start + 8, dtype=np.int32)[None]
        expected = reference(x, positions, theta, scaling)
        np.testing.assert_allclose(rotate(x, positions), expected, atol=5e-6)


def test_bfloat16_queries_are_rotated_by_exact_angles():
    positions = np.array([[1_000_003]], np.int32)
    x = jnp.ones((1, 1, 1, HEAD_DIM), jnp.bfloat16)
    found = apply_rotary(x, jnp.asarray(positions), 1e4)
    assert found.dtype == jnp.bfloat16
    expected = reference(np.ones((1, 1, 1, HEAD_DIM)), positions, 1e4, None)
    np.testing.assert_allclose(np.float64(found), expected, atol=2**-8)


def test_float64_is_refused_here_and_kept_by_norms():
    with jax.enable_x64(True):
        x, scale = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32, 4, 8))), jnp.arange(1.0, 9.0)
        root = np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(RMSNorm(8, 1e-5).scaled(x, scale), x / root * scale, rtol=1e-12)
        with pytest.raises(ArgumentError, match="x is float64"):
            apply_rotary(x, jnp.arange(32)[None], 1e4)
