"""One call on any mesh: where it runs, how it is sharded, and that its caller sees neither."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

from agentic_ring.attention import LAYOUTS, MaskSpec, attention, order, reference_attention, ring_attention
from agentic_ring.errors import MeshError
from agentic_ring.mesh import MeshShape, make_mesh, mesh_on_first_devices

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def arrays() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (4, 48, 4, 8), (4, 48, 2, 8), (4, 48, 2, 8)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def loss_and_gradients(function, arrays):
    """Of a loss that weighs every output differently."""

    def loss(arrays):
        output = function(*arrays)
        return (output * jnp.cos(jnp.arange(output.size).reshape(output.shape))).sum()

    return jax.jit(jax.value_and_grad(loss))(arrays)


def assert_equal(function, arrays, reference=reference_attention, **options):
    got = loss_and_gradients(function, arrays)
    want = loss_and_gradients(partial(reference, **options), arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), got, want)


def test_the_mesh_does_not_change_the_result(arrays):
    assert_equal(attention, arrays)  # one device needs none
    assert_equal(partial(attention, mesh=make_mesh(MeshShape(fsdp=2, ring=2, tensor=2))), arrays)
    twice = [jnp.concatenate([x, x]) for x in arrays]
    assert_equal(partial(attention, mesh=make_mesh(MeshShape(data=8))), twice)


@pytest.mark.usefixtures("full_compiler")
def test_local_strategy_leaves_the_sequence_whole(arrays):
    mesh = make_mesh(MeshShape(data=2, ring=4))
    compiled = jax.jit(partial(attention, mesh=mesh, strategy="local")).lower(*arrays).compile()
    assert "collective-permute" not in compiled.as_text()
    np.testing.assert_allclose(compiled(*arrays), reference_attention(*arrays), **TOLERANCE)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_ambient_mesh(arrays, axis_type):
    """Of either kind, in jit and outside; the output has q's sharding in its type where types have one."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "ring", "tensor"), axis_types=(axis_type,) * 3)
    sharding = jax.NamedSharding(mesh, jax.P("data", "ring", "tensor"))
    want = reference_attention(*arrays)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, sharding) for x in arrays]
        for function in (attention, jax.jit(attention)):
            output = function(*sharded)
            assert jax.typeof(output) == jax.typeof(sharded[0])
            np.testing.assert_allclose(output, want, **TOLERANCE)
        q, k, v = jax.jit(jax.grad(lambda a: (attention(*a) ** 2).sum()))(sharded)
        assert jax.typeof(q) == jax.typeof(sharded[0])
        assert jax.typeof(k) == jax.typeof(v)
        np.testing.assert_allclose(attention(*arrays), want, **TOLERANCE)


@pytest.mark.parametrize("strategy", ["ring", "local"])
def test_many_query_heads_share_one_key_head_over_tensor(arrays, strategy):
    """Each device keeps the one key head; its gradient is summed over the devices."""
    q, k, v = arrays
    mesh = make_mesh(MeshShape(ring=2, tensor=4))
    assert_equal(partial(attention, mesh=mesh, strategy=strategy), [q, k[:, :, :1], v[:, :, :1]])


@pytest.mark.usefixtures("full_compiler")
def test_a_caller_who_permutes_passes_positions(arrays):
    """As a model does once at its input: nothing is moved but keys and values round the ring."""
    mesh = make_mesh(MeshShape(data=2, ring=4))
    permutation = order("zigzag", 48, 4)
    sharding = jax.NamedSharding(mesh, jax.P("data", "ring"))
    q, k, v = (jax.device_put(x[:, permutation], sharding) for x in arrays)
    positions = jax.device_put(jnp.asarray(permutation)[None], jax.NamedSharding(mesh, jax.P(None, "ring")))
    attend = jax.jit(partial(attention, mesh=mesh, strategy="ring"))
    compiled = attend.lower(q, k, v, positions=positions).compile()
    for collective in ("all-gather", "all-to-all", "all-reduce"):
        assert collective not in compiled.as_text()
    want = reference_attention(*arrays)[:, permutation]
    np.testing.assert_allclose(compiled(q, k, v, positions=positions), want, **TOLERANCE)


@pytest.mark.parametrize(("strategy", "has_positions"), [("auto", True), ("ring", False)])
def test_more_keys_than_queries(arrays, strategy, has_positions):
    """A query stands where its position says; by default both sides count from 0."""
    q, (_, k, v) = arrays[0][:, :7], arrays
    mesh = make_mesh(MeshShape(data=2, ring=4))
    positions = (41 + jnp.arange(7)[None], jnp.arange(48)[None]) if has_positions else None
    attend = partial(attention, mesh=mesh, positions=positions, strategy=strategy)
    assert_equal(attend, [q, k, v], positions=positions)


def test_a_windows_keys_are_found_where_queries_and_keys_are_not_as_many(arrays):
    """The last device's one query looks back at keys that are all on the first device."""
    q, k, v = arrays[0][:, :4], *arrays[1:]
    options = {"mesh": make_mesh(MeshShape(data=2, ring=4)), "strategy": "ring", "layout": "contiguous"}
    mask = MaskSpec(causal=True, window=2)
    assert_equal(partial(attention, mask=mask, **options), [q, k, v], mask=mask)


@pytest.mark.parametrize("check_vma", [True, False])
def test_ring_attention_within_shard_map(arrays, check_vma):
    """With keys that are the same on every device of the data axis, their gradient is still whole."""
    q, k, v = arrays
    keys_spec = jax.P(None, "ring") if check_vma else jax.P("data", "ring")
    repeated = 2 if check_vma else 1
    k, v = (x[: len(x) // repeated] for x in (k, v))
    run = jax.shard_map(
        partial(ring_attention, axis_name="ring", mask=MaskSpec()),
        mesh=make_mesh(MeshShape(data=2, ring=4)),
        in_specs=(jax.P("data", "ring"), keys_spec, keys_spec),
        out_specs=jax.P("data", "ring"),
        check_vma=check_vma,
    )

    def reference(q, k, v):
        return reference_attention(q, *(jnp.tile(x, (repeated, 1, 1, 1)) for x in (k, v)))

    assert_equal(run, (q, k, v), reference)


def test_works_in_rematerialised_scanned_layers(arrays):
    """Under jit, grad, scan and checkpoint at once, as in a model."""

    def layers(attend):
        def run(q, k, v):
            layer = jax.checkpoint(lambda x, _: (x + attend(x, k, v), None))
            return jax.lax.scan(layer, q, length=3)[0]

        return run

    got = loss_and_gradients(layers(partial(attention, mesh=make_mesh(MeshShape(ring=8)))), arrays)
    want = loss_and_gradients(layers(reference_attention), arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@settings(max_examples=3)
@given(data=st.data())
def test_any_shape_and_mask(data: st.DataObject):
    draw, few = data.draw, st.integers(1, 40)
    ring = draw(st.sampled_from([1, 2, 4, 8]))
    queries, keys, groups, key_heads = draw(few), draw(few), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    q_shape, k_shape = (2, queries, groups * key_heads, 5), (2, keys, key_heads, 5)
    arrays = tuple(jnp.asarray(random.normal(size=size), jnp.float32) for size in (q_shape, k_shape, k_shape))
    spec = MaskSpec(draw(st.booleans()), draw(st.none() | st.integers(1, 20)), draw(st.integers(0, 10)))
    options = {"mask": spec, "soft_cap": draw(st.none() | st.floats(0.5, 50))}
    if draw(st.booleans()):
        options["positions"] = tuple(jnp.asarray(random.integers(-3, 40, (2, n))) for n in (queries, keys))
    if draw(st.booleans()):
        options["segment_ids"] = tuple(jnp.asarray(random.integers(-1, 3, (1, n))) for n in (queries, keys))
    how = {
        "mesh": mesh_on_first_devices(MeshShape(ring=ring)),
        "strategy": draw(st.sampled_from(["ring", "all_gather", "auto"])),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "query_chunk": draw(few),
        "key_chunk": draw(few),
    }
    assert_equal(partial(attention, **how, **options), arrays, **options)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_within_shard_map_over_other_axes(arrays, strategy):
    """As in the stages of a pipeline: each stage attends to a batch of its own, with a ring of its own."""
    spec, attend = jax.P("stage"), partial(attention, strategy=strategy)
    staged = partial(jax.shard_map, in_specs=spec, out_specs=spec, axis_names={"stage"})
    with jax.set_mesh(make_mesh(MeshShape(stage=2, data=2, ring=2))):
        assert_equal(staged(attend, check_vma=False), [jnp.concatenate((x, x[::-1])) for x in arrays])
        with pytest.raises(MeshError, match="vary over stage"):
            staged(attend)(*arrays)
