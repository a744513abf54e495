"""The cache against the float64 oracle on whole sequences, on every ring; what it keeps and moves."""

import re
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention.cache import (
    EMPTY_SLOT,
    CachedAttentionInputs,
    CachedLayer,
    KVCache,
    append,
    append_blocks,
    cache_specs,
    shard_attention,
)
from agentic_ring.attention.cache.cached_attention import attend_new_tokens
from agentic_ring.attention.cache.kv_cache import empty, store_like
from agentic_ring.attention.cache.shard_attention import attend_to_shard
from agentic_ring.attention.scores import Scores
from agentic_ring.errors import ArgumentError, UnknownNameError
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from tests.attention.cache.sequences import (
    CAUSAL,
    HEAD_DIM,
    HEADS,
    KEY_HEADS,
    MASKS,
    RULES,
    chunk_step,
    counted,
    decode_step,
    follow,
    make_cache,
    tokens,
)
from tests.attention.oracle import exact


@pytest.mark.parametrize(
    ("ring", "mask", "heads"),
    [(1, "causal", (4, 2)), (4, "window and sinks", (4, 2)), (4, "window", (8, 1))],
)
def test_rows_of_different_lengths_decode_on_from_their_own_positions(ring, mask, heads):
    """After a prompt in two chunks; of 8 heads that share a key head the keys are less to send."""
    chunks = counted([13, 7, 16], 16), counted([13, 13, 10], 16, start=[13, 7, 16])
    calls = counted([6, 6, 4], 6, start=[26, 20, 26])  # the last row ends before the others
    steps = [(chunk_step, 16), (chunk_step, 16), *[(decode_step, 2)] * 3]
    positions = np.concatenate([*chunks, calls], axis=1)
    output, cache = follow(MeshShape(ring=ring), positions, steps, mask=MASKS[mask], heads=heads)
    assert not np.any(np.asarray(output)[2])
    # Whole calls go to the devices in turn.
    shares = [len(range(device, 3, ring)) * 2 for device in range(ring)]
    np.testing.assert_array_equal(cache.filled, 32 // ring + np.array(shares))


@pytest.mark.parametrize("heads", [(4, 2), (4, 1)])
def test_a_prefix_kept_once_is_as_good_as_a_copy_in_every_row(heads):
    """Also where the devices that share the heads have one key head together."""
    # Rows differ in where their own tokens begin: the first has a chunk before, the others padding.
    positions = 16 + np.tile(np.arange(11, dtype=np.int32), (4, 1))
    positions[1:] -= 3
    positions[1:, :3] = EMPTY_SLOT
    steps = [(chunk_step, 8), *[(decode_step, 1)] * 3]
    follow(MeshShape(ring=2, data=2, tensor=2), positions, steps, prefix=16, heads=heads)


def test_memory_of_a_prefix_does_not_grow_with_the_rows_that_share_it():
    slots, ring = 65_536, 2

    def temporary(batch: int) -> int:
        prefix = jax.eval_shape(partial(make_cache, 1, slots, ring))
        cache = jax.eval_shape(partial(make_cache, batch, 8, ring))
        lowered = decode_step.lower(cache, *tokens(batch, 1), np.zeros((batch, 1), np.int32), prefix=prefix)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    with jax.set_mesh(mesh_on_first_devices(MeshShape(ring=ring))):
        few, many = temporary(4), temporary(64)
    shard = slots // ring * KEY_HEADS * HEAD_DIM * 4
    # Copies for each row would take 4 and 64 times 2 shards. Four rows' scores are as large as the keys here.
    assert few <= 2.1 * shard
    assert many <= few


def check_shard(dtype: str, arrays, positions, key_positions, mask=CAUSAL, bound=4e-6):
    """Compares attention to a shard with that to what it stores, in float64, and returns the state."""
    query, *pair = arrays
    store = jax.jit(lambda x: store_like(x, empty(x.shape, dtype)))
    stored = [store(x.swapaxes(1, 2)) for x in pair]
    run = jax.jit(partial(attend_to_shard, mask=mask, scores=Scores(scale=0.5, soft_cap=3.0)))
    shard = CachedLayer(*stored, jnp.asarray(key_positions))
    state = run(jnp.asarray(query), jnp.asarray(positions), shard)
    keys = [*(np.asarray(x.restored()).swapaxes(1, 2) for x in stored), key_positions]
    keys = [np.broadcast_to(x, (len(query), *x.shape[1:])) for x in keys]
    options = {"positions": (positions, keys[2]), "scale": 0.5, "soft_cap": 3.0}
    expected = exact((query, *keys[:2], query), mask, **options)
    np.testing.assert_allclose(state.output, expected.output, atol=bound)
    return state


SLOTS = 1536  # three slabs of 512, of which the last holds nothing


@pytest.mark.parametrize(
    ("dtype", "batch", "queries", "mask"),
    [
        ("float32", 2, 1, "window and sinks"),
        ("float32", 1, 24, "causal"),
        ("bfloat16", 2, 40, "window"),
        ("bfloat16", 1, 1, "causal"),
        ("int8", 2, 1, "causal"),
        ("int8", 1, 24, "window and sinks"),
    ],
)
def test_a_shard_of_several_slabs_is_attended_exactly_for_what_it_stores(dtype, batch, queries, mask):
    query, key, value = tokens(batch, SLOTS)
    query = np.concatenate([query[:, :queries], query[:, :queries] + 1])[:2]  # two rows of queries always
    random = np.random.default_rng(0)
    place = np.stack([random.permutation(SLOTS) for _ in range(batch)])
    key_positions = np.where(np.arange(SLOTS) < 1000, place, EMPTY_SLOT)
    positions = np.stack([900 + np.arange(queries), 100 + np.arange(queries)])
    check_shard(dtype, (query, key, value), positions, key_positions, MASKS[mask])


@pytest.mark.parametrize(("dtype", "query_dtype"), [("bfloat16", "float32"), ("int8", "bfloat16")])
def test_the_products_of_a_gpu_lose_nothing_of_what_a_shard_stores(monkeypatch, dtype, query_dtype):
    monkeypatch.setattr(shard_attention, "mesh_platform", lambda: "gpu")
    query, key, value = tokens(2, SLOTS)
    query = jnp.asarray(query[:, :2]).astype(query_dtype)
    key_positions = np.tile(np.where(np.arange(SLOTS) < 1000, np.arange(SLOTS), EMPTY_SLOT), (2, 1))
    positions = np.array([[900, 901], [EMPTY_SLOT, 100]])
    # Of a query in bfloat16, probabilities are rounded to it as in the kernels for many queries.
    bound = 4e-6 if query_dtype == "float32" else 2.0**-8 * np.abs(value).max()
    state = check_shard(dtype, (query, key, value), positions, key_positions, bound=bound)
    assert np.isneginf(state.logsumexp[1, 0]).all(), "a query that attends to nothing"
    assert (state.output[1, 0] == 0).all()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 0.0), ("bfloat16", 2.0**-8), ("int8", 0.5 / 127)])
def test_a_stored_number_is_off_by_no_more_than_the_form_says(dtype, bound):
    x = np.random.default_rng(0).normal(size=(5, 7, HEAD_DIM)) * np.logspace(-30, 20, 5)[:, None, None]
    x[0, 0] = 0.0
    x = x.astype(np.float32)
    error = np.abs(np.asarray(store_like(jnp.asarray(x), empty(x.shape, dtype)).restored(), np.float64) - x)
    # bfloat16 rounds each number, int8 the largest of a token and head as much as the smallest.
    scale = np.abs(x) if dtype == "bfloat16" else np.abs(x).max(axis=-1, keepdims=True)
    assert (error <= bound * scale * (1 + 1e-6)).all()


def moved(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The size of the largest array of each instruction that communicates."""
    names = r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    found: dict[str, int] = {}
    for arrays, name in re.findall(rf" = (.*?) ({names})(?:-start)?\(", compiled.as_text()):
        sizes = [prod(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]", arrays)]
        found[name] = max(found.get(name, 0), *sizes)
    return found


RING, BATCH, NEW = 4, 2, 8


def described(mesh: jax.sharding.Mesh, spec: jax.P, *shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))


def described_cache(mesh: jax.sharding.Mesh, slots: int, dtype="float32", **sizes: int) -> KVCache:
    cache = jax.eval_shape(partial(make_cache, BATCH, slots, RING, dtype, **sizes))
    specs = cache_specs(RULES, dtype, len(cache.keys))
    return jax.tree.map(lambda x, spec: described(mesh, spec, *x.shape, dtype=x.dtype), cache, specs)


@pytest.mark.parametrize(("write", "tokens"), [(append, None), (append_blocks, "ring")])
def test_no_key_or_value_moves_and_a_donated_cache_is_updated_in_place(write, tokens):
    mesh, dtype = mesh_on_first_devices(MeshShape(ring=RING)), "int8" if tokens else "float32"
    cache = described_cache(mesh, 4096, dtype, layers=3)
    new = described(mesh, jax.P(None, None, tokens), 3, BATCH, NEW, KEY_HEADS, HEAD_DIM)
    positions = described(mesh, jax.P(None, tokens), BATCH, NEW, dtype=jnp.int32)
    shardings = jax.tree.map(lambda x: x.sharding, cache)
    with jax.set_mesh(mesh):
        run = jax.jit(partial(write, rules=RULES), donate_argnums=0, out_shardings=shardings)
        compiled = run.lower(cache, new, new, positions).compile()
    assert not moved(compiled)
    bytes_a_device = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) // RING
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= bytes_a_device - 64
    assert memory.temp_size_in_bytes < bytes_a_device / 4


@pytest.mark.parametrize(
    ("step", "slots", "heads", "names"),
    [
        (decode_step, 4096, (HEADS, KEY_HEADS), {"all-reduce"}),
        (chunk_step, 4096, (HEADS, KEY_HEADS), {"all-gather", "all-to-all"}),
        # What is less goes to the other: the cache, where it is small.
        (chunk_step, 16, (8, 1), {"collective-permute"}),
    ],
)
def test_what_attending_moves_is_not_the_cache(step, slots, heads, names):
    mesh = mesh_on_first_devices(MeshShape(ring=RING))
    spec = jax.P(None, None if step is decode_step else "ring")
    query, new = (described(mesh, spec, BATCH, NEW, count, HEAD_DIM) for count in heads)
    positions = described(mesh, spec, BATCH, NEW, dtype=jnp.int32)
    with jax.set_mesh(mesh):
        cache = described_cache(mesh, slots, key_heads=heads[1])
        compiled = step.lower(cache, query, new, new, positions).compile()
    found = moved(compiled)
    assert found.keys() <= names
    # At most the queries of all devices, or their attention with a logsumexp each.
    assert 0 < max(found.values()) <= RING * BATCH * NEW * heads[0] * (HEAD_DIM + 1)


def test_dtypes_that_no_cache_has_are_refused():
    with pytest.raises(UnknownNameError, match="cache dtype 'float16'"):
        make_cache(1, 8, 1, "float16")
    with jax.enable_x64(True):
        query, key, value = (jnp.asarray(x, "float64") for x in tokens(1, 8))
        positions, cache = jnp.arange(8, dtype=jnp.int32)[None], make_cache(1, 64, 1)
        inputs = CachedAttentionInputs(query, key, value, positions, cache.layer(0))
        with pytest.raises(ArgumentError, match="queries of a cache are float64"):
            jax.eval_shape(partial(attend_new_tokens, rules=RULES), inputs)
        for store in (append, append_blocks):
            with pytest.raises(ArgumentError, match="keys and values are float64"):
                jax.eval_shape(partial(store, rules=RULES), cache, key[None], value[None], positions)


# What stores tokens, and how many a ring of 2 with 8 slots each takes at most in a call.
@pytest.mark.parametrize(("put", "most"), [(append, 8), (append_blocks, 16)])
def test_a_full_cache_refuses_tokens(put, most):
    def store(cache, count: int):
        _, key, value = (jnp.asarray(x)[None] for x in tokens(1, count))
        return put(cache, key, value, counted([count], count), RULES)

    with jax.set_mesh(mesh_on_first_devices(MeshShape(ring=2))):
        cache = make_cache(1, 16, ring=2)
        with pytest.raises(ArgumentError, match="8 slots, 0 of them filled"):
            jax.jit(partial(store, count=most + 2))(cache)
        for _ in range(16 // most):  # outside a program each finds room on the device whose turn it is
            cache = store(cache, most)
        np.testing.assert_array_equal(cache.filled, [8, 8])
        with pytest.raises(ArgumentError, match="8 slots, 8 of them filled"):
            store(cache, 2)


@pytest.mark.parametrize(("put", "dtype"), [(append, "int8"), (append_blocks, "bfloat16")])
def test_a_cache_that_a_program_overfills_gives_nan(put, dtype):
    new = jnp.ones((1, 2, 6, KEY_HEADS, HEAD_DIM))
    positions = counted([6, 0], 6)
    step = jax.jit(lambda cache: put(cache, new, new, positions, RULES))
    arrays = jnp.ones((2, 1, HEADS, HEAD_DIM)), new[0, :, :1], new[0, :, :1], jnp.full((2, 1), 6)
    read = jax.jit(lambda cache: attend_new_tokens(CachedAttentionInputs(*arrays, cache.layer(0)), RULES))
    cache = step(make_cache(2, 8, 1, dtype))
    assert np.isfinite(read(cache)).all()
    assert np.isnan(read(step(cache))).all()
