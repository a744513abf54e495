"""What the ring does: the tiles of its hops, how often it permutes, and how much memory it takes."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import LAYOUTS, SCHEDULES, MaskSpec, attention, order, padded_length
from agentic_ring.attention.kernels import registry
from agentic_ring.attention.kernels.xla import XlaKernel
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from tests.attention.oracle import exact, random_arrays
from tests.compiled_schedule import Permutes, permutes

TOKENS, HEADS, HEAD_DIM = 16, 2, 16  # tokens of a device


def abstract(ring: int, *shape: int, dtype="float32", spec=jax.P(None, "ring")) -> jax.ShapeDtypeStruct:
    sharding = jax.NamedSharding(mesh_on_first_devices(MeshShape(ring=ring)), spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


class Hop(NamedTuple):
    """One call of the kernel in a ring."""

    queries: int
    keys: int
    causal: bool
    offset: int = 0
    labels: bool = False
    """Whether positions or segment ids are compared."""


@pytest.fixture
def hops(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Hop]]:
    """What the kernel named "recorded" was traced with, by direction."""
    found: dict[str, list[Hop]] = {"forward": [], "backward": []}

    class Recorded(XlaKernel):
        def forward(self, tile):
            return self.record("forward", tile)

        def backward(self, tile, saved):
            return self.record("backward", tile, saved)

        def record(self, direction, tile, *saved):
            q, k, _, mask, _ = tile
            labels = mask.query.positions is not None or mask.query.segment_ids is not None
            found[direction].append(Hop(q.shape[1], k.shape[1], mask.spec.causal, mask.offset, labels))
            return getattr(super(), direction)(tile, *saved)

    monkeypatch.setitem(registry._KERNELS, "recorded", Recorded)
    return found


def lower_gradient(ring: int, **options) -> jax.stages.Lowered:
    x = abstract(ring, 2, ring * TOKENS, HEADS, HEAD_DIM)

    def attend(q, k, v):
        mesh = x.sharding.mesh
        return attention(q, k, v, mesh=mesh, strategy="ring", kernel="recorded", **options).sum()

    return jax.jit(jax.grad(attend, (0, 1, 2))).lower(x, x, x)


OWN, HALF = Hop(TOKENS, TOKENS, True), TOKENS // 2


def test_every_hop_of_a_causal_zigzag_ring_is_the_same_work_on_every_device(hops):
    """A device's own block has the diagonal; every other hop is two full quarters and no condition.

    One program runs on all devices, so without a conditional none can do less than another.
    """
    text = lower_gradient(8).as_text()
    for calls in hops.values():
        assert set(calls) == {OWN, Hop(HALF, HALF, False)}
        assert calls[0] == OWN
    assert "stablehlo.while" in text
    assert "stablehlo.case" not in text
    assert "stablehlo.if" not in text


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({"schedule": "bidirectional"}, Hop(HALF, HALF // 2, False)),  # as balanced
        ({"layout": "contiguous"}, Hop(TOKENS, TOKENS, False)),  # whole blocks or none
    ],
)
def test_hops_of_other_rings(hops, options, other):
    lower_gradient(4, **options)
    assert set(hops["forward"]) == set(hops["backward"]) == {OWN, other}


@pytest.mark.parametrize(
    ("mask", "distances"),
    [
        (MaskSpec(window=1), [0]),
        (MaskSpec(window=2), [0, 1]),
        (MaskSpec(window=TOKENS + 1), [0, 1]),
        (MaskSpec(window=TOKENS + 2), [0, 1, 2]),
        (MaskSpec(causal=False, window=3), [0, 1, -1]),
    ],
)
def test_a_window_visits_only_blocks_in_its_reach(hops, mask: MaskSpec, distances: list[int]):
    lower_gradient(8, mask=mask)
    assert [hop.offset for hop in hops["forward"]] == [TOKENS * distance for distance in distances]


@pytest.mark.parametrize(
    ("strategy", "layout", "schedule"),
    [
        *(("ring", *pair) for pair in zip(LAYOUTS, 2 * SCHEDULES, strict=True)),
        ("ulysses", "zigzag", "unidirectional"),
    ],
)
def test_a_permuted_sequence_of_the_padded_length(hops, strategy, layout, schedule):
    """What a model uses that permutes once at its input. Positions are compared in stripes only."""
    length = padded_length(41, 8, layout, schedule=schedule)
    assert length == (64 if schedule == "bidirectional" else 48)
    arrays, places = random_arrays((1, length, 8, 8), (1, length, 8, 8)), order(layout, length, 8)
    options = {"mesh": mesh_on_first_devices(MeshShape(ring=8)), "strategy": strategy, "schedule": schedule}
    options |= {"layout": layout, "permuted": True, "kernel": "recorded"}
    got = attention(*(x[:, places] for x in arrays[:3]), **options)
    np.testing.assert_allclose(got, exact(arrays).output[:, places], rtol=2e-5, atol=2e-6)
    assert any(hop.labels for hop in hops["forward"]) == ("striped" in layout)
    with pytest.raises(ArgumentError, match=f"pad them to {length}"):
        attention(*(x[:, :41] for x in arrays[:3]), **options)


@pytest.mark.parametrize(("ring", "causal"), [(1, True), (8, True), (4, False)])
def test_forward_makes_one_hop_less_than_the_ring(ring: int, causal: bool):
    """A call with positions, the sequence as it is; they stay where they do not matter."""
    x, positions = abstract(ring, 1, ring * 32, HEADS, HEAD_DIM), abstract(ring, 1, ring * 32, dtype="int32")

    def forward(q, k, v, positions):
        options = {"mask": MaskSpec(causal), "positions": positions if causal else None}
        return attention(q, k, v, mesh=x.sharding.mesh, strategy="ring", **options)

    found = permutes(jax.jit(forward).lower(x, x, x, positions).compile().as_text())
    assert found == Permutes(floats=ring - 1, integers=(ring - 1) * causal, conditional=0)


def test_backward_returns_gradients_in_as_many_hops_as_the_ring():
    """K and V travel P - 1 times again, but for the forward's first time, and their gradients P times."""
    ring = 8
    x = abstract(ring, 1, ring * 32, HEADS, HEAD_DIM)
    attend = partial(attention, mesh=x.sharding.mesh, strategy="ring", layout="contiguous")
    gradient = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v).sum(), (0, 1, 2)))
    found = permutes(gradient.lower(x, x, x).compile().as_text())
    assert found == Permutes(floats=ring - 1 + 2 * ring - 1 - 1, integers=0, conditional=0)


@pytest.mark.parametrize("mask", ["segments", pytest.param("causal", marks=pytest.mark.slow)])
def test_memory_of_a_ring(mask):
    """Of the gradient of three scanned, rematerialised attention layers, the same on any ring.

    No mask of any hop is kept for the backward (it would be hops x chunk pairs x chunk x chunk). Of the 40
    blocks, 25 are those of one device alone: residuals of the layer, weights' gradients and the padded copies
    that the kernel cuts into chunks. A ring adds a constant: keys and values in hand and on their way, their
    gradients in hand, on their way and of this hop, and padded copies.
    """
    ring, width = 8, HEADS * HEAD_DIM
    block = 255  # odd, so that the kernel pads its chunks and has a mask
    chunks = {"query_chunk": 128, "key_chunk": 128}  # longer chunks of scores would outweigh such blocks
    x, labels = abstract(ring, 1, ring * block, width), abstract(ring, 1, ring * block, dtype="int32")
    weights = abstract(ring, 3, width, 3 * width, spec=jax.P())

    def loss(weights, x, labels):
        options = {"positions": labels}
        if mask == "segments":
            options = {"mask": MaskSpec(causal=False), "segment_ids": labels}

        def layer(x, weights):
            q, k, v = jnp.split((x @ weights).reshape(*x.shape[:2], 3 * HEADS, HEAD_DIM), 3, axis=2)
            return x + attention(q, k, v, strategy="ring", **chunks, **options).reshape(x.shape), None

        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).sum()

    with jax.set_mesh(x.sharding.mesh):
        compiled = jax.jit(jax.grad(loss)).lower(weights, x, labels).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 40 * block * width * 4
