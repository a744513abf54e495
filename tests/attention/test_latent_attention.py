"""Latent attention against attention with the keys and values written out, and what it sends."""

import re
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import MaskSpec, latent_attention
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from tests.attention.oracle import exact, with_gradients

B, T, N, R, H, P, V = 2, 64, 4, 12, 8, 4, 6
SEGMENTS = np.repeat([0, 1, 2, -1], [20, 30, 10, 4])[None]
SHAPES = (B, T, N, H + P), (B, T, R), (B, T, P), (R, N, H), (R, N, V), (B, T, N, V)
GENERATOR = np.random.default_rng(0)
ARRAYS = [GENERATOR.normal(size=shape).astype(np.float32) for shape in SHAPES]


def expected(**options) -> list[np.ndarray]:
    """The output and the gradients in float64, with keys and values written out."""
    q, latent, rotated, key_weight, value_weight, d_output = (x.astype(np.float64) for x in ARRAYS)
    keys, values = (np.einsum("bsr,rnh->bsnh", latent, weight) for weight in (key_weight, value_weight))
    shared = np.broadcast_to(rotated[:, :, None], (*keys.shape[:3], P))
    found = exact([q, np.concatenate((keys, shared), -1), values, d_output], **options)
    dk, d_rotated = found.dk[..., :H], found.dk[..., H:].sum(2)
    pairs = (dk, key_weight), (found.dv, value_weight)
    d_latent = sum(np.einsum("bsnh,rnh->bsr", d_x, weight) for d_x, weight in pairs)
    weights = (np.einsum("bsr,bsnh->rnh", latent, d_x) for d_x, _ in pairs)
    return [found.output, found.dq, d_latent, d_rotated, *weights]


@pytest.mark.parametrize(
    ("shape", "strategy", "options", "masks"),
    [
        (MeshShape(ring=4), "ring", {}, {}),
        (MeshShape(ring=2, tensor=2), "ring", {}, {"segment_ids": SEGMENTS}),
        (MeshShape(ring=4), "ring", {"layout": "contiguous"}, {"mask": MaskSpec(window=20)}),
        (MeshShape(ring=4), "ulysses", {}, {}),
    ],
)
def test_equals_attention_to_the_expanded_keys(shape, strategy, options, masks):
    options |= {"mesh": mesh_on_first_devices(shape), "strategy": strategy, **masks}
    results = with_gradients(partial(latent_attention, **options), ARRAYS[-1], *ARRAYS[:-1])
    for found, x in zip(results, expected(**masks), strict=True):
        assert np.abs(np.asarray(found, np.float64) - x).max() < 1e-5 * np.abs(x).max()


@pytest.mark.usefixtures("full_compiler")
def test_the_latent_goes_round_the_ring():
    """R + P numbers a token, instead of N * (H + P + V)."""
    mesh = mesh_on_first_devices(MeshShape(ring=4))
    lowered = jax.jit(partial(latent_attention, mesh=mesh, strategy="ring")).lower(*ARRAYS[:5])
    sent = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute\(", lowered.compile().as_text())
    sizes = {prod(map(int, shape.split(","))) for shape in sent}
    assert B * T // 4 * (R + P) in sizes
    queries = B * T // 8 * N * (H + P)  # halves of them move into zigzag order, and of the output back
    assert max(sizes) == max(queries, B * T // 4 * (R + P))


def test_refusals():
    q, latent, rotated, key_weight, value_weight = map(jnp.asarray, ARRAYS[:5])
    with pytest.raises(ArgumentError, match=r"key_weight has shape \(12, 3, 8\)"):
        latent_attention(q, latent, rotated, key_weight[:, :3], value_weight)
    with pytest.raises(ArgumentError, match=r"q has shape \(2, 64, 4, 12\) but k has \(2, 64, 4, 10\)"):
        latent_attention(q, latent, rotated[..., :2], key_weight, value_weight)
    with pytest.raises(ArgumentError, match="latent is bfloat16"):
        latent_attention(q, latent.astype(jnp.bfloat16), rotated, key_weight, value_weight)
