"""Flax's attention modules with ours inside give what they give with their own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import MaskSpec, attention, attention_fn
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape, make_mesh
from tests.attention.oracle import with_gradients

pytest.importorskip("flax", reason="modules of Flax need the extra models")
from flax import linen, nnx

HEADS, TOKENS, WIDTH = 4, 24, 16
causal_fn = partial(attention_fn, spec=MaskSpec(causal=True))
CAUSAL = linen.make_causal_mask(jnp.ones((1, TOKENS)))
INPUTS = jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))


def nnx_module(**options):
    defaults = {"attention_fn": causal_fn, "decode": False, "rngs": nnx.Rngs(0)}
    return nnx.MultiHeadAttention(num_heads=HEADS, in_features=WIDTH, **{**defaults, **options})


def differentiated(apply, parameters):
    """The output, and the gradients of parameters and inputs with a weight for every output."""
    return with_gradients(apply, jnp.cos(jnp.arange(INPUTS.size)).reshape(INPUTS.shape), parameters, INPUTS)


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), got, want)


def test_gradients_of_an_nnx_module_on_a_mesh():
    def apply(mask=None, **options):
        graph, state = nnx.split(nnx_module(**options))
        return differentiated(lambda state, x: nnx.merge(graph, state)(x, mask=mask), state)

    expected = apply(CAUSAL, attention_fn=nnx.dot_product_attention)
    with jax.set_mesh(make_mesh(MeshShape(data=2, ring=2, tensor=2))):
        assert_close(apply(), expected)


def test_gradients_of_a_linen_module():
    """A call without a mask is bidirectional, as in Flax."""

    def apply(fn):
        module = linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=fn)
        return differentiated(module.apply, module.init(jax.random.key(0), INPUTS))

    assert_close(apply(attention_fn), apply(linen.dot_product_attention))


IDS = jnp.arange(TOKENS)[None] // 10 + jnp.zeros((2, 1), int)
SAME_SEGMENT = linen.make_attention_mask(IDS, IDS, jnp.equal)


@pytest.mark.parametrize(
    ("arrays", "fn", "call", "mask"),
    [
        ((INPUTS,), attention_fn, {"is_causal": True}, CAUSAL),
        ((jnp.stack((INPUTS, INPUTS[::-1] + 1, -INPUTS)),), attention_fn, {}, None),
        ((INPUTS,), partial(causal_fn, segment_ids=IDS), {}, linen.combine_masks(CAUSAL, SAME_SEGMENT)),
        ((INPUTS, INPUTS[:, :10]), attention_fn, {}, None),
    ],
    ids=["causal by the call", "batch axes", "packed", "cross"],
)
def test_calls_of_a_module(arrays, fn, call, mask):
    own = nnx_module(attention_fn=nnx.dot_product_attention)(*arrays, mask=mask)
    assert_close(nnx_module(attention_fn=fn)(*arrays, **call), own)


def test_dropout_of_a_module():
    plain = nnx_module()(INPUTS)
    module = nnx_module(dropout_rate=0.5, deterministic=False, rngs=nnx.Rngs(0, dropout=1))
    first, second = module(INPUTS), module(INPUTS)
    assert not np.allclose(first, second)
    assert not np.allclose(first, plain)
    assert_close(module(INPUTS, deterministic=True), plain)


UNUSED = ["precision", "module", "qk_attn_weights_einsum", "attn_weights_value_einsum", "input_positions"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mask": CAUSAL}, r"mask is an array of shape \(1, 1, 24, 24\)"),
        ({"query": jnp.zeros((2, 1, HEADS, 8)), "mask": CAUSAL}, "decode=True"),
        ({"bias": jnp.zeros((1, 1, 24, 24))}, r"bias is an array of shape \(1, 1, 24, 24\)"),
        *(({name: "highest"}, f"{name} was passed") for name in UNUSED),
        ({"is_causal": True, "spec": MaskSpec(causal=False)}, "is_causal is True but spec is MaskSpec"),
        ({"dropout_rate": 0.1}, "dropout_rate is 0.1"),
        ({"key": jnp.zeros((3, TOKENS, HEADS, 8))}, r"key has shape \(3, 24, 4, 8\)"),
        ({"key": jnp.zeros((2, 10, HEADS, 8)), "is_causal": True}, "query has 24 tokens and key has 10"),
    ],
)
def test_what_is_refused(options, named):
    query = jnp.zeros((2, TOKENS, HEADS, 8))
    with pytest.raises(ArgumentError, match=named):
        attention_fn(**{"query": query, "key": query, "value": query, **options})


def test_other_options_reach_attention():
    query, key = jax.random.normal(jax.random.key(0), (2, TOKENS, HEADS, 8)), jax.random.key(1)
    options = {"soft_cap": 2.0, "dropout_rate": 0.3}
    got = attention_fn(query, query, query, spec=MaskSpec(window=5), dropout_rng=key, **options)
    want = attention(query, query, query, mask=MaskSpec(window=5), dropout_key=key, **options)
    np.testing.assert_array_equal(got, want)
    assert attention_fn(query, query, query, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert attention_fn(query, query.astype(jnp.bfloat16), query).dtype == jnp.float32
