"""float64 arrays are computed in float64 by every strategy and kernel that takes them; caches refuse them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import MaskSpec, attention, reference_attention
from agentic_ring.attention.cache import append, append_blocks, empty_cache
from agentic_ring.attention.cache.decode import attend_new_tokens
from agentic_ring.attention.cache.shard_attention import CachedAttentionInputs
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape, ShardingRules, mesh_on_first_devices

TOLERANCE = 1e-12
CAUSAL = {"mask": MaskSpec(causal=True)}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def arrays() -> tuple[jax.Array, ...]:
    random = np.random.default_rng(0)
    shapes = (1, 32, 4, 8), (1, 32, 2, 8), (1, 32, 2, 8), (4,)
    return tuple(jnp.asarray(random.normal(size=shape)) for shape in shapes)


def differentiated(attend, q, k, v, sinks) -> list[np.ndarray]:
    def loss(q, k, v, sinks):
        output = attend(q, k, v, sinks=sinks)
        return (output * jnp.cos(jnp.arange(output.size)).reshape(output.shape)).sum(), output

    gradients, output = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, sinks)
    return [np.asarray(x) for x in (output, *gradients)]


@pytest.mark.parametrize(
    ("ring", "arguments"),
    [
        (1, {"kernel": "xla", "query_chunk": 5, "key_chunk": 7}),
        (4, {"strategy": "ring", "layout": "zigzag"}),
        (4, {"strategy": "ring", "layout": "striped", "schedule": "bidirectional", "soft_cap": 3.0}),
        (2, {"strategy": "all_gather", "kernel": "vanilla"}),
        (2, {"strategy": "ulysses"}),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_the_reference(ring, arguments):
    inputs, shared = arrays(), {name: arguments[name] for name in arguments if name == "soft_cap"}
    expected = differentiated(partial(reference_attention, **CAUSAL, **shared), *inputs)
    with jax.set_mesh(mesh_on_first_devices(MeshShape(ring=ring))):
        found = differentiated(partial(attention, **CAUSAL, **arguments), *inputs)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_a_cache_refuses_it():
    q, k, v, _ = arrays()
    positions, rules = jnp.arange(32, dtype=jnp.int32)[None], ShardingRules()
    cache = empty_cache(1, 1, 64, 2, 8, "float32", ring=1)
    with pytest.raises(ArgumentError, match="queries of a cache are float64"):
        attend_new_tokens(CachedAttentionInputs(q, k, v, positions, cache.layer(0)), rules)
    for store in (append, append_blocks):
        with pytest.raises(ArgumentError, match="keys and values are float64"):
            store(cache, k[None], v[None], positions, rules)


def test_layers_of_models_compute_or_refuse_it():
    pytest.importorskip("flax", reason="layers of models need the extra models")
    from agentic_ring.models.layers import rms_norm
    from agentic_ring.models.rotary import apply_rotary

    x, scale = arrays()[0], jnp.arange(1.0, 9.0)
    expected = np.asarray(x) / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * np.arange(1.0, 9.0)
    np.testing.assert_allclose(rms_norm(x, scale, 1e-5), expected, rtol=TOLERANCE)
    with pytest.raises(ArgumentError, match="x is float64"):
        apply_rotary(x, jnp.arange(32)[None], 1e4)
