"""What the ring does: the tiles of its hops, how often it permutes, and how much memory it takes."""

from collections import defaultdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import LAYOUTS, SCHEDULES, MaskSpec, attention, order, padded_length
from agentic_ring.attention.explain import explain
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from tests.attention.oracle import exact, random_arrays
from tests.compiled_schedule import Permutes, permutes

TOKENS, HEADS, HEAD_DIM = 16, 2, 16  # tokens of a device


def abstract(ring: int, *shape: int, dtype="float32", spec=jax.P(None, "ring")) -> jax.ShapeDtypeStruct:
    sharding = jax.NamedSharding(mesh_on_first_devices(MeshShape(ring=ring)), spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def hops(ring: int, tokens=TOKENS, heads=HEADS, strategy="ring", **options) -> dict[str, list[str]]:
    """The different calls of the kernel by direction, in their order, with so many tokens per device."""
    x, found = jax.ShapeDtypeStruct((2, ring * tokens, heads, HEAD_DIM), jnp.float32), defaultdict(list)
    mesh = mesh_on_first_devices(MeshShape(ring=ring))
    for call in explain(x, x, x, mesh=mesh, strategy=strategy, **options).calls:
        found[call.direction].append(str(call))
    return found


def tile(queries: int, keys: int, mask: str = "no mask") -> str:
    return f"2 rows of {queries} queries x {keys} keys, {HEADS} and {HEADS} heads, {mask}"


OWN, HALF = tile(TOKENS, TOKENS, "causal"), TOKENS // 2


def test_every_hop_of_a_causal_zigzag_ring_is_the_same_work_on_every_device():
    """A device's own block has the diagonal; every other hop is two full quarters and no condition."""
    assert all(calls == [OWN, tile(HALF, HALF)] for calls in hops(8).values())
    x = abstract(8, 2, 8 * TOKENS, HEADS, HEAD_DIM)
    attend = partial(attention, mesh=x.sharding.mesh, strategy="ring")
    text = jax.jit(jax.grad(lambda *a: attend(*a).sum(), (0, 1, 2))).lower(x, x, x).as_text()
    assert "stablehlo.while" in text
    assert "stablehlo.case" not in text
    assert "stablehlo.if" not in text


def test_hops_of_other_rings():
    halves = hops(4, schedule="bidirectional")  # as balanced
    assert all(calls == [OWN, tile(HALF, HALF // 2)] for calls in halves.values())
    blocks = hops(4, layout="contiguous")  # whole ones or none
    assert all(calls == [OWN, tile(TOKENS, TOKENS)] for calls in blocks.values())


def test_a_window_visits_only_blocks_in_its_reach():
    reaches = {1: [0], 2: [0, 1], TOKENS + 1: [0, 1], TOKENS + 2: [0, 1, 2]}
    cases = [(MaskSpec(window=window), distances) for window, distances in reaches.items()]
    for mask, distances in (*cases, (MaskSpec(causal=False, window=3), [0, 1, -1])):
        spec = f"{'causal' if mask.causal else 'both ways'}, window {mask.window}"
        apart = [f", {TOKENS * distance} tokens apart" if distance else "" for distance in distances]
        expected = [tile(TOKENS, TOKENS, spec + offset) for offset in apart]
        assert all(calls == expected for calls in hops(8, mask=mask).values())


@pytest.mark.parametrize(
    ("strategy", "layout", "schedule"),
    [
        *(("ring", *pair) for pair in zip(LAYOUTS, 2 * SCHEDULES, strict=True)),
        ("ulysses", "zigzag", "unidirectional"),
    ],
)
def test_a_permuted_sequence_of_the_padded_length(strategy, layout, schedule):
    """What a model uses that permutes once at its input. Positions are compared in stripes only."""
    length = padded_length(41, 8, layout, schedule=schedule)
    assert length == (64 if schedule == "bidirectional" else 48)
    arrays, places = random_arrays((1, length, 8, 8), (1, length, 8, 8)), order(layout, length, 8)
    options = {"strategy": strategy, "schedule": schedule, "layout": layout, "permuted": True}
    attend = partial(attention, mesh=mesh_on_first_devices(MeshShape(ring=8)), **options)
    got = attend(*(x[:, places] for x in arrays[:3]))
    np.testing.assert_allclose(got, exact(arrays).output[:, places], rtol=2e-5, atol=2e-6)
    calls = " ".join(hops(8, length // 8, heads=8, **options)["forward"])
    assert ("positions" in calls or "segments" in calls) == ("striped" in layout)
    with pytest.raises(ArgumentError, match=f"pad them to {length}"):
        attend(*(x[:, :41] for x in arrays[:3]))


@pytest.mark.parametrize(("ring", "causal"), [(1, True), (8, True), (4, False)])
def test_hops_in_which_blocks_travel(ring: int, causal: bool):
    """One less than the ring; in a backward K and V again, but for one, and P times their gradients."""
    x, positions = abstract(ring, 1, ring * 32, HEADS, HEAD_DIM), abstract(ring, 1, ring * 32, dtype="int32")
    attend = partial(attention, mesh=x.sharding.mesh, strategy="ring", layout="contiguous")

    def forward(q, k, v, positions):
        return attend(q, k, v, mask=MaskSpec(causal), positions=positions if causal else None)

    text = jax.jit(forward).lower(x, x, x, positions).compile().as_text()
    assert permutes(text) == Permutes(floats=ring - 1, integers=(ring - 1) * causal, conditional=0)
    assert not any(collective in text for collective in ("all-gather", "all-to-all", "all-reduce"))
    if ring == 8:
        gradient = jax.jit(jax.grad(lambda q, k, v: attend(q, k, v).sum(), (0, 1, 2)))
        found = permutes(gradient.lower(x, x, x).compile().as_text())
        assert found == Permutes(floats=ring - 1 + 2 * ring - 1 - 1, integers=0, conditional=0)


def test_memory_of_a_ring():
    """Of the gradient of three scanned, rematerialised attention layers: 40 blocks, 25 without a ring.

    No mask of any hop is kept for the backward (it would be hops x chunk pairs x chunk x chunk).
    """
    ring, width = 8, HEADS * HEAD_DIM
    block = 255  # odd, so that the kernel pads its chunks
    chunks = {"query_chunk": 128, "key_chunk": 128}  # longer chunks of scores would outweigh such blocks
    x, labels = abstract(ring, 1, ring * block, width), abstract(ring, 1, ring * block, dtype="int32")
    weights = abstract(ring, 3, width, 3 * width, spec=jax.P())

    def loss(weights, x, labels):
        options = {"mask": MaskSpec(causal=False), "segment_ids": labels, "strategy": "ring", **chunks}

        def layer(x, weights):
            q, k, v = jnp.split((x @ weights).reshape(*x.shape[:2], 3 * HEADS, HEAD_DIM), 3, axis=2)
            return x + attention(q, k, v, **options).reshape(x.shape), None

        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).sum()

    with jax.set_mesh(x.sharding.mesh):
        compiled = jax.jit(jax.grad(loss)).lower(weights, x, labels).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 40 * block * width * 4
