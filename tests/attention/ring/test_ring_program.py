"""What the compiled ring does: how often it permutes, where, and how much memory it takes."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from agentic_ring.attention import MaskSpec, attention
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from tests.compiled_schedule import Permutes, permutes

pytestmark = pytest.mark.usefixtures("full_compiler")

HEADS, HEAD_DIM = 2, 16
CHUNK = 128  # longer chunks of scores would outweigh blocks as small as these
BLOCK = 255  # odd, so that even the bidirectional kernel pads its chunks and has a mask


def abstract(ring: int, *shape: int, dtype="float32", spec=jax.P(None, "ring")) -> jax.ShapeDtypeStruct:
    sharding = jax.NamedSharding(mesh_on_first_devices(MeshShape(ring=ring)), spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def program(ring: int, *, causal: bool) -> str | None:
    """A call with positions, the sequence as it is."""
    x, positions = abstract(ring, 1, ring * 32, HEADS, HEAD_DIM), abstract(ring, 1, ring * 32, dtype="int32")

    def forward(q, k, v, positions):
        options = {"mask": MaskSpec(causal), "positions": positions if causal else None}
        return attention(q, k, v, mesh=x.sharding.mesh, strategy="ring", **options)

    return jax.jit(forward).lower(x, x, x, positions).compile().as_text()


@pytest.mark.parametrize("ring", [1, 8])
def test_forward_makes_one_hop_less_than_the_ring(ring: int):
    assert permutes(program(ring, causal=True)) == Permutes(floats=ring - 1, integers=ring - 1, conditional=0)


def test_no_labels_travel_where_none_matter():
    assert permutes(program(4, causal=False)) == Permutes(floats=3, integers=0, conditional=0)


def test_backward_returns_gradients_in_as_many_hops_as_the_ring():
    """K and V travel P - 1 times again, their gradients P times."""
    ring = 8
    x = abstract(ring, 1, ring * 32, HEADS, HEAD_DIM)
    ones = jnp.ones(x.shape, device=x.sharding)
    attend = partial(attention, mesh=x.sharding.mesh, strategy="ring", layout="contiguous")
    output, vjp = jax.vjp(jax.jit(attend), ones, ones, ones)
    found = permutes(jax.jit(vjp).lower(output).compile().as_text())
    assert found == Permutes(floats=2 * ring - 1, integers=0, conditional=0)


def layers_temp_bytes(ring: int, mask: str) -> int:
    """Temporary bytes a device of the gradient of three scanned, rematerialised attention layers."""
    length, width, chunks = ring * BLOCK, HEADS * HEAD_DIM, {"query_chunk": CHUNK, "key_chunk": CHUNK}
    x, labels = abstract(ring, 1, length, width), abstract(ring, 1, length, dtype="int32")
    weights = abstract(ring, 3, width, 3 * width, spec=jax.P())

    def loss(weights, x, labels):
        options = {
            "causal": {"positions": labels},
            "segments": {"mask": MaskSpec(causal=False), "segment_ids": labels},
            "bidirectional": {"mask": MaskSpec(causal=False)},
        }[mask]

        def layer(x, weights):
            q, k, v = jnp.split((x @ weights).reshape(1, length, 3 * HEADS, HEAD_DIM), 3, axis=2)
            return x + attention(q, k, v, strategy="ring", **chunks, **options).reshape(x.shape), None

        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).sum()

    with jax.set_mesh(x.sharding.mesh):
        compiled = jax.jit(jax.grad(loss)).lower(weights, x, labels).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_of_a_ring():
    """No mask of any hop is kept for the backward (it would be hops x chunk pairs x chunk x chunk).

    Of the 40 blocks, 25 are those of one device alone: residuals of the layer, weights' gradients and
    the padded copies that the kernel cuts into chunks. A ring adds a constant: keys and values in hand
    and on their way, their gradients in hand, on their way and of this hop, and padded copies.
    """
    assert layers_temp_bytes(8, "segments") <= 40 * BLOCK * HEADS * HEAD_DIM * 4


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_memory_stays_flat_as_ring_and_sequence_grow(mask: str):
    block = BLOCK * HEADS * HEAD_DIM * 4
    alone, four, eight = (layers_temp_bytes(ring, mask) for ring in (1, 4, 8))
    assert eight <= 1.05 * four
    assert alone <= 25 * block
    assert eight <= 40 * block
