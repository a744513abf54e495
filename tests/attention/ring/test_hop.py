"""What a hop computes: the tiles that a layout gives, the same on every device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import MaskSpec, attention, order
from agentic_ring.attention.kernels import registry
from agentic_ring.attention.kernels.interface import Gradients, empty_state
from agentic_ring.attention.kernels.xla import XlaKernel
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from tests.attention.oracle import exact, random_arrays

BATCH, BLOCK, HEADS, HEAD_DIM = 2, 16, 4, 8


Tile = tuple
"""One kernel call: (direction, q shape, k shape, causal, window, offset, whether labels are compared)."""


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """What the kernel named "recorded", which is exact, or "traced", which is none, was traced with."""
    found: list[Tile] = []

    def record(direction: str, tile) -> None:
        q, k, _, mask, _ = tile
        labels = mask.query.positions is not None or mask.query.segment_ids is not None
        spec = mask.spec
        found.append((direction, q.shape, k.shape, spec.causal, spec.window, mask.offset, labels))

    class Traced:
        def forward(self, tile):
            record("forward", tile)
            return empty_state(tile.q, HEAD_DIM)

        def backward(self, tile, saved):
            record("backward", tile)
            return Gradients(*tile[:3])

    class Recorded(XlaKernel):
        def forward(self, tile):
            record("forward", tile)
            return super().forward(tile)

        def backward(self, tile, saved):
            record("backward", tile)
            return super().backward(tile, saved)

    monkeypatch.setitem(registry._KERNELS, "recorded", Recorded)
    monkeypatch.setitem(registry._KERNELS, "traced", Traced)
    return found


def lower_gradient(ring: int, kernel: str = "traced", **options) -> jax.stages.Lowered:
    mesh = mesh_on_first_devices(MeshShape(ring=ring))
    sharding = jax.NamedSharding(mesh, jax.P(None, "ring"))
    x = jax.ShapeDtypeStruct((BATCH, ring * BLOCK, HEADS, HEAD_DIM), jnp.float32, sharding=sharding)

    def attend(q, k, v):
        return attention(q, k, v, mesh=mesh, strategy="ring", kernel=kernel, **options).sum()

    return jax.jit(jax.grad(attend, (0, 1, 2))).lower(x, x, x)


OWN = (BATCH, BLOCK, HEADS, HEAD_DIM)
QUARTER = (BATCH, BLOCK // 2, HEADS, HEAD_DIM)


@pytest.mark.usefixtures("full_compiler")
def test_every_hop_of_a_causal_zigzag_ring_is_the_same_work_on_every_device(tiles):
    """A device's own block has the diagonal; every other hop is two full quarters and no condition.

    One program runs on all devices, so without a conditional none can do less than another.
    """
    compiled = lower_gradient(8, "recorded").compile()
    own, quarters = (OWN, OWN, True, None, 0, False), (QUARTER, QUARTER, False, None, 0, False)
    for direction in ("forward", "backward"):
        calls = [tile[1:] for tile in tiles if tile[0] == direction]
        assert set(calls) == {own, quarters}
        assert calls[0] == own
    assert " conditional(" not in compiled.as_text()


def test_a_bidirectional_ring_is_as_balanced(tiles):
    lower_gradient(8, schedule="bidirectional")
    quarter = (BATCH, BLOCK // 4, HEADS, HEAD_DIM)
    for direction in ("forward", "backward"):
        calls = {tile[1:] for tile in tiles if tile[0] == direction}
        assert calls == {(OWN, OWN, True, None, 0, False), (QUARTER, quarter, False, None, 0, False)}


def test_blocks_in_order_are_attended_whole_or_not_at_all(tiles):
    lower_gradient(4, layout="contiguous")
    assert {tile[1:] for tile in tiles} == {
        (OWN, OWN, True, None, 0, False),
        (OWN, OWN, False, None, 0, False),
    }


@pytest.mark.parametrize(
    ("mask", "distances"),
    [
        (MaskSpec(window=1), [0]),
        (MaskSpec(window=2), [0, 1]),
        (MaskSpec(window=BLOCK + 1), [0, 1]),
        (MaskSpec(window=BLOCK + 2), [0, 1, 2]),
        (MaskSpec(causal=False, window=3), [0, 1, -1]),
    ],
)
def test_a_window_visits_only_blocks_in_its_reach(tiles, mask: MaskSpec, distances: list[int]):
    lower_gradient(8, mask=mask)
    offsets = [tile[5] for tile in tiles if tile[0] == "forward"]
    assert offsets == [BLOCK * distance for distance in distances]


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "striped"},
        {"mask": MaskSpec(prefix=3)},
        {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
    ],
)
def test_without_tiles_positions_travel(tiles, options):
    """Striped order, a prefix and dropout leave a mask in every hop."""
    lower_gradient(4, **options)
    assert all(tile[-1] for tile in tiles)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_permuted_sequence_needs_no_positions(tiles, strategy):
    """What a model uses that permutes once at its input."""
    mesh = mesh_on_first_devices(MeshShape(ring=4))
    arrays = random_arrays((1, 64, 4, 8), (1, 64, 4, 8))
    places = order("zigzag", 64, 4)
    options = {"strategy": strategy, "layout": "zigzag", "permuted": True, "kernel": "recorded"}
    got = attention(*(x[:, places] for x in arrays[:3]), mesh=mesh, **options)
    np.testing.assert_allclose(got, exact(arrays).output[:, places], rtol=2e-5, atol=2e-6)
    assert not any(tile[-1] for tile in tiles)
