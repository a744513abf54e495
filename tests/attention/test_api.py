"""One call on any mesh: where it runs, how it is sharded, and that its caller sees neither."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from agentic_ring.attention import MaskSpec, attention, ring_attention
from agentic_ring.errors import MeshError
from agentic_ring.mesh import MeshShape, make_mesh
from tests.attention.oracle import differentiated, exact, random_arrays, with_gradients

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
ARRAYS = random_arrays((4, 48, 4, 8), (4, 48, 2, 8))
EXPECTED = exact(ARRAYS)


def assert_equal(function, arrays=ARRAYS, expected=None, rtol=1e-5, **options):
    """``function`` and its gradients are what attention under these options is."""
    expected = expected or exact(arrays, **options)
    for got, want in zip(differentiated(function, arrays)[:4], expected[:4], strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize(
    "shape", [None, MeshShape(fsdp=2, ring=2, tensor=2), MeshShape(data=4, tensor=2)], ids=str
)
def test_the_mesh_does_not_change_the_result(shape):
    """One device needs none."""
    assert_equal(partial(attention, mesh=shape and make_mesh(shape)), expected=EXPECTED)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_ambient_mesh(axis_type):
    """Of either kind, in jit and outside; the output has q's sharding in its type where types have one."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "ring", "tensor"), axis_types=(axis_type,) * 3)
    sharding = jax.NamedSharding(mesh, jax.P("data", "ring", "tensor"))
    with jax.set_mesh(mesh):
        *sharded, d_output = (jax.device_put(x, sharding) for x in ARRAYS)
        output, q, k, v = with_gradients(attention, d_output, *sharded)
        np.testing.assert_allclose(output, EXPECTED.output, **TOLERANCE)
        assert jax.typeof(output) == jax.typeof(q) == jax.typeof(sharded[0])
        assert jax.typeof(k) == jax.typeof(v)
        np.testing.assert_allclose(attention(*map(jnp.asarray, ARRAYS[:3])), EXPECTED.output, **TOLERANCE)


def test_many_query_heads_share_one_key_head_over_tensor():
    """Each device keeps the one key head; its gradient is summed over the devices."""
    q, k, v, d_output = ARRAYS
    mesh = make_mesh(MeshShape(ring=2, tensor=4))
    assert_equal(partial(attention, mesh=mesh, strategy="ring"), [q, k[:, :, :1], v[:, :, :1], d_output])


SEGMENTS = np.array([[0, 0, 1, 1, 1, -1, 2]]), np.repeat([[0, 1, 2, -1]], 12, axis=1)


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        # A query stands where its position says; by default both sides count from 0.
        ({"strategy": "auto"}, {"positions": (41 + np.arange(7)[None], np.arange(48)[None])}),
        ({"strategy": "ring"}, {}),
        # The last device's queries look back at keys that are all on the first device.
        ({"strategy": "ring", "layout": "contiguous"}, {"mask": MaskSpec(window=2)}),
        (
            {"strategy": "all_gather", "layout": "striped", "query_chunk": 3, "key_chunk": 5},
            {"segment_ids": SEGMENTS, "mask": MaskSpec(causal=False, window=20, prefix=3)},
        ),
    ],
)
def test_more_keys_than_queries(options, labels):
    arrays = [ARRAYS[0][:, :7], *ARRAYS[1:3], ARRAYS[3][:, :7]]
    attend = partial(attention, mesh=make_mesh(MeshShape(data=2, ring=4)), **options, **labels)
    assert_equal(attend, arrays, **labels)


def test_ring_attention_within_shard_map():
    """With keys that are the same on every device of the data axis, their gradient is still whole."""
    q, k, v, d_output = ARRAYS
    k, v = k[:2], v[:2]
    run = jax.shard_map(
        partial(ring_attention, axis_name="ring", mask=MaskSpec()),
        mesh=make_mesh(MeshShape(data=2, ring=4)),
        in_specs=(jax.P("data", "ring"), jax.P(None, "ring"), jax.P(None, "ring")),
        out_specs=jax.P("data", "ring"),
    )
    repeated = exact([q, np.tile(k, (2, 1, 1, 1)), np.tile(v, (2, 1, 1, 1)), d_output])
    dk, dv = (x.reshape(2, 2, *x.shape[1:]).sum(0) for x in (repeated.dk, repeated.dv))
    assert_equal(run, [q, k, v, d_output], repeated._replace(dk=dk, dv=dv))


def test_works_in_rematerialised_scanned_layers():
    attend = partial(attention, mesh=make_mesh(MeshShape(ring=8)))

    def layers(q, k, v):
        layer = jax.checkpoint(lambda x, _: (x + attend(x, k, v), None))
        return jax.lax.scan(layer, q, length=2)[0]

    q, k, v, d_output = ARRAYS
    first = EXPECTED.output
    second = exact([q + first, k, v, d_output])
    # The loss reaches the first layer directly and through the second.
    d_first = d_output + second.dq
    before = exact([q, k, v, d_first])
    want = q + first + second.output, d_first + before.dq, before.dk + second.dk, before.dv + second.dv
    assert_equal(layers, expected=want, rtol=1e-4)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_within_shard_map_over_other_axes(strategy):
    """As in the stages of a pipeline: each stage attends to a batch of its own, with a ring of its own."""
    spec, attend = jax.P("stage"), partial(attention, strategy=strategy)
    staged = partial(jax.shard_map, in_specs=spec, out_specs=spec, axis_names={"stage"})
    with jax.set_mesh(make_mesh(MeshShape(stage=2, data=2, ring=2))):
        assert_equal(staged(attend, check_vma=False), expected=EXPECTED)
        with pytest.raises(MeshError, match="vary over stage"):
            staged(attend)(*ARRAYS[:3])
