"""What the compiled ring does: how often it permutes, where, and how much memory it takes."""

import jax
import jax.numpy as jnp
import pytest

from agentic_ring.attention import MaskSpec, attention
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from tests.attention.compiled import Permutes, permutes

pytestmark = pytest.mark.usefixtures("full_compiler")

HEADS, HEAD_DIM = 2, 16
CHUNK = 128  # longer chunks of scores would outweigh blocks as small as these
BLOCK = 255  # odd, so that even the bidirectional kernel pads its chunks and has a mask


def abstract(
    ring: int, shape: tuple[int, ...], dtype: str, spec: jax.P
) -> tuple[jax.sharding.Mesh, jax.ShapeDtypeStruct]:
    mesh = mesh_on_first_devices(MeshShape(ring=ring))
    return mesh, jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))


def compile_attention(ring: int, *, causal: bool, block: int = 32) -> jax.stages.Compiled:
    """A call with positions, the sequence as it is."""
    mesh, x = abstract(ring, (1, ring * block, HEADS, HEAD_DIM), "float32", jax.P(None, "ring"))
    _, positions = abstract(ring, (1, ring * block), "int32", jax.P(None, "ring"))

    def forward(q, k, v, positions):
        positions = positions if causal else None
        return attention(q, k, v, mesh=mesh, mask=MaskSpec(causal), positions=positions, strategy="ring")

    return jax.jit(forward).lower(x, x, x, positions).compile()


@pytest.mark.parametrize("ring", [1, 2, 8])
def test_forward_makes_one_hop_less_than_the_ring(ring: int):
    found = permutes(compile_attention(ring, causal=True))
    assert found == Permutes(floats=ring - 1, integers=ring - 1, conditional=0)


def test_no_labels_travel_where_none_matter():
    found = permutes(compile_attention(4, causal=False))
    assert found == Permutes(floats=3, integers=0, conditional=0)


def test_backward_returns_gradients_in_as_many_hops_as_the_ring():
    """K and V travel P - 1 times again, their gradients P times."""
    ring = 8
    mesh, x = abstract(ring, (1, ring * 32, HEADS, HEAD_DIM), "float32", jax.P(None, "ring"))
    ones = jnp.ones(x.shape, device=x.sharding)
    run = jax.jit(lambda q, k, v: attention(q, k, v, mesh=mesh, strategy="ring", layout="contiguous"))
    output, vjp = jax.vjp(run, ones, ones, ones)
    found = permutes(jax.jit(vjp).lower(output).compile())
    assert found == Permutes(floats=2 * ring - 1, integers=0, conditional=0)


def layers_temp_bytes(ring: int, mask: str) -> int:
    """Temporary bytes a device of the gradient of three scanned, rematerialised attention layers."""
    length, width = ring * BLOCK, HEADS * HEAD_DIM
    mesh, x = abstract(ring, (1, length, width), "float32", jax.P(None, "ring"))
    _, labels = abstract(ring, (1, length), "int32", jax.P(None, "ring"))
    _, weights = abstract(ring, (3, width, 3 * width), "float32", jax.P())

    def loss(weights, x, labels):
        options = {
            "causal": {"positions": labels},
            "segments": {"mask": MaskSpec(causal=False), "segment_ids": labels},
            "bidirectional": {"mask": MaskSpec(causal=False)},
        }[mask]

        def layer(x, weights):
            q, k, v = jnp.split((x @ weights).reshape(1, length, 3 * HEADS, HEAD_DIM), 3, axis=2)
            attended = attention(
                q, k, v, mesh=mesh, strategy="ring", query_chunk=CHUNK, key_chunk=CHUNK, **options
            )
            return x + attended.reshape(x.shape), None

        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).sum()

    compiled = jax.jit(jax.grad(loss)).lower(weights, x, labels).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "mask",
    [
        "segments",
        pytest.param("causal", marks=pytest.mark.slow),
        pytest.param("bidirectional", marks=pytest.mark.slow),
    ],
)
def test_memory_stays_flat_as_ring_and_sequence_grow(mask: str):
    """No mask of any hop is kept for the backward (it would be hops x chunk pairs x chunk x chunk).

    Of the 40 blocks, 25 are those of one device alone: residuals of the layer, weights' gradients and
    the padded copies that the kernel cuts into chunks. A ring adds a constant: keys and values in hand
    and on their way, their gradients in hand, on their way and of this hop, and padded copies.
    """
    block = BLOCK * HEADS * HEAD_DIM * 4
    alone, four, eight = (layers_temp_bytes(ring, mask) for ring in (1, 4, 8))
    assert eight <= 1.05 * four
    assert alone <= 25 * block
    assert eight <= 40 * block
