"""Latent attention against attention with the keys and values written out, and what it sends."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import MaskSpec, latent_attention, reference_attention
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape, mesh_on_first_devices

B, T, N, R, H, P, V = 2, 64, 4, 12, 8, 4, 6
SEGMENTS = jnp.asarray(np.repeat([0, 1, 2, -1], [20, 30, 10, 4]))[None]


def arrays() -> list[jax.Array]:
    shapes = (B, T, N, H + P), (B, T, R), (B, T, P), (R, N, H), (R, N, V), (B, T, N, V)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def written_out(q, latent, rotated, key_weight, value_weight, **options):
    keys = jnp.einsum("bsr,rnh->bsnh", latent, key_weight)
    shared = jnp.broadcast_to(rotated[:, :, None], (*keys.shape[:3], P))
    values = jnp.einsum("bsr,rnh->bsnh", latent, value_weight)
    return reference_attention(q, jnp.concatenate((keys, shared), -1), values, **options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (MeshShape(), {}),
        (MeshShape(ring=4), {"strategy": "ring", "layout": "contiguous", "mask": MaskSpec(window=20)}),
        (MeshShape(ring=2, tensor=2), {"strategy": "ring", "segment_ids": SEGMENTS}),
        (MeshShape(ring=4), {"strategy": "ring"}),
        (MeshShape(ring=4), {"strategy": "ulysses"}),
    ],
    ids=str,
)
def test_equals_attention_to_the_expanded_keys(shape: MeshShape, options: dict):
    """In float64, with the gradients of queries, latents, rotated keys and both weights."""
    *inputs, d_output = arrays()
    masks = {name: options[name] for name in ("mask", "segment_ids") if name in options}
    mesh = mesh_on_first_devices(shape)
    got, vjp = jax.vjp(jax.jit(lambda *x: latent_attention(*x, mesh=mesh, **options)), *inputs)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in inputs]
        expected, reference = jax.vjp(lambda *x: written_out(*x, **masks), *exact)
        exact = [np.asarray(x) for x in (expected, *reference(jnp.asarray(np.asarray(d_output, np.float64))))]
    for found, x in zip((got, *vjp(d_output)), exact, strict=True):
        assert np.abs(np.asarray(found, np.float64) - x).max() < 1e-5 * np.abs(x).max()


@pytest.mark.usefixtures("full_compiler")
def test_the_latent_goes_round_the_ring():
    """R + P numbers a token, instead of N * (H + P + V)."""
    *inputs, _ = arrays()
    mesh = mesh_on_first_devices(MeshShape(ring=4))
    program = jax.jit(lambda *x: latent_attention(*x, mesh=mesh, strategy="ring")).lower(*inputs).compile()
    sent = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute\(", program.as_text())
    sizes = {int(np.prod([int(n) for n in shape.split(",")])) for shape in sent}
    assert B * T // 4 * (R + P) in sizes
    queries = B * T // 8 * N * (H + P)  # halves of them move into zigzag order, and of the output back
    assert max(sizes) == max(queries, B * T // 4 * (R + P))


def test_refusals():
    q, latent, rotated, key_weight, value_weight, _ = arrays()
    with pytest.raises(ArgumentError, match=r"key_weight has shape \(12, 3, 8\)"):
        latent_attention(q, latent, rotated, key_weight[:, :3], value_weight)
    with pytest.raises(ArgumentError, match="q has head dimension 12 but k and v have 10"):
        latent_attention(q, latent, rotated[..., :2], key_weight, value_weight)
    with pytest.raises(ArgumentError, match="latent is bfloat16"):
        latent_attention(q, latent.astype(jnp.bfloat16), rotated, key_weight, value_weight)
