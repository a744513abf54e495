"""Flax's attention modules with ours inside give what they give with their own."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention import MaskSpec, attention, attention_fn
from agentic_ring.errors import ArgumentError
from agentic_ring.mesh import MeshShape, make_mesh

pytest.importorskip("flax", reason="modules of Flax need the extra models")
from flax import linen, nnx

HEADS, TOKENS, WIDTH = 4, 24, 16
causal_fn = partial(attention_fn, spec=MaskSpec(causal=True))
CAUSAL = linen.make_causal_mask(jnp.ones((1, TOKENS)))
MESHES = [None, MeshShape(ring=8), MeshShape(data=2, ring=2, tensor=2)]


@pytest.fixture(params=MESHES, ids=lambda shape: "no mesh" if shape is None else str(shape))
def mesh(request):
    with jax.set_mesh(make_mesh(request.param)) if request.param else nullcontext():
        yield


@pytest.fixture
def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))


def nnx_module(**options):
    defaults = {"attention_fn": causal_fn, "decode": False, "rngs": nnx.Rngs(0)}
    return nnx.MultiHeadAttention(num_heads=HEADS, in_features=WIDTH, **{**defaults, **options})


def nnx_loss(inputs, mask=None, **options):
    """A function of the parameters and the inputs, with a weight for every output."""
    graph, state = nnx.split(nnx_module(**options))
    return weighted(lambda state, x: nnx.merge(graph, state)(x, mask=mask)), state, inputs


def linen_loss(inputs, mask=None, **options):
    module = linen.MultiHeadDotProductAttention(num_heads=HEADS, **options)
    parameters = module.init(jax.random.key(0), inputs)
    return weighted(partial(module.apply, mask=mask)), parameters, inputs


def weighted(apply):
    def loss(parameters, inputs):
        output = apply(parameters, inputs)
        return (output * jnp.cos(jnp.arange(output.size)).reshape(output.shape)).sum(), output

    return loss


def differentiated(loss, *arguments):
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*arguments)


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), got, want)


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("problem", [nnx_loss, linen_loss])
def test_causal_self_attention_and_its_gradients(problem, inputs):
    own = nnx.dot_product_attention if problem is nnx_loss else linen.dot_product_attention
    expected = differentiated(*problem(inputs, mask=CAUSAL, attention_fn=own))
    assert_close(differentiated(*problem(inputs, attention_fn=causal_fn)), expected)


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("problem", [nnx_loss, linen_loss])
def test_a_call_without_a_mask_is_bidirectional_as_in_flax(problem, inputs):
    own = nnx.dot_product_attention if problem is nnx_loss else linen.dot_product_attention
    expected = differentiated(*problem(inputs, attention_fn=own))
    assert_close(differentiated(*problem(inputs, attention_fn=attention_fn)), expected)


def test_causality_is_taken_from_the_call(inputs):
    own, ours = (nnx_module(attention_fn=fn) for fn in (nnx.dot_product_attention, attention_fn))
    assert_close(ours(inputs, is_causal=True), own(inputs, is_causal=True))
    assert not np.allclose(ours(inputs), ours(inputs, is_causal=True))


def test_several_batch_axes_and_a_spec(inputs):
    inputs = jnp.stack((inputs, inputs[::-1] + 1, -inputs))
    own = differentiated(*nnx_loss(inputs, attention_fn=nnx.dot_product_attention))
    with jax.set_mesh(make_mesh(MESHES[-1])):
        assert_close(differentiated(*nnx_loss(inputs, attention_fn=attention_fn)), own)


def test_packed_sequences(inputs):
    ids = jnp.arange(TOKENS)[None] // 10 + jnp.zeros((2, 1), int)
    mask = linen.combine_masks(CAUSAL, linen.make_attention_mask(ids, ids, jnp.equal))
    own = differentiated(*linen_loss(inputs, mask=mask, attention_fn=linen.dot_product_attention))
    packed = partial(causal_fn, segment_ids=ids)
    assert_close(differentiated(*linen_loss(inputs, attention_fn=packed)), own)


def test_cross_attention(inputs):
    keys = inputs[:, :10]
    own = nnx_module(attention_fn=nnx.dot_product_attention)(inputs, keys)
    assert_close(nnx_module(attention_fn=attention_fn)(inputs, keys), own)
    with pytest.raises(ArgumentError, match=r"query has 24 tokens and key has 10; .* for cross-attention"):
        nnx_module()(inputs, keys)


def test_bfloat16_computation_of_float32_parameters(inputs):
    assert nnx_module(dtype=jnp.bfloat16)(inputs).dtype == jnp.bfloat16
    query = inputs.reshape(2, TOKENS, HEADS, -1)
    assert attention_fn(query, query, query, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert attention_fn(query, query.astype(jnp.bfloat16), query).dtype == jnp.float32


def test_dropout_of_the_modules(inputs):
    plain = nnx_module()(inputs)
    module = nnx_module(dropout_rate=0.5, deterministic=False, rngs=nnx.Rngs(0, dropout=1))
    first, second = module(inputs), module(inputs)
    assert not np.allclose(first, second)
    assert not np.allclose(first, plain)
    assert_close(module(inputs, deterministic=True), plain)

    module = linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention_fn, dropout_rate=0.5)
    parameters = module.init(jax.random.key(0), inputs, deterministic=True)
    apply = partial(module.apply, parameters, inputs)
    one, same, other = (
        apply(deterministic=False, rngs={"dropout": jax.random.key(seed)}) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)
    assert not np.allclose(one, apply(deterministic=True))


def test_the_rate_of_dropout():
    # Equal scores and the identity as values: outputs are the probabilities themselves.
    tokens, rate = 256, 0.3
    zeros = jnp.zeros((1, tokens, 1, tokens))
    values = jnp.eye(tokens)[None, :, None]
    run = partial(attention_fn, zeros, zeros, values, spec=MaskSpec(causal=False), dropout_rate=rate)
    kept = run(dropout_rng=jax.random.key(0)) * tokens * (1 - rate)
    np.testing.assert_allclose(np.unique(np.round(kept, 4)), [0, 1])
    assert abs(float((kept == 0).mean()) - rate) < 0.01
    np.testing.assert_allclose(run(deterministic=True), 1 / tokens, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mask": CAUSAL},
            r"mask is an array of shape \(1, 1, 24, 24\); .*partial\(attention_fn, spec=MaskSpec",
        ),
        ({"bias": jnp.zeros((1, 1, 24, 24))}, r"bias is an array of shape \(1, 1, 24, 24\)"),
        ({"precision": "highest"}, r"precision was passed .* jax.default_matmul_precision"),
        ({"module": object()}, "module was passed .* leave sow_weights out"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum was passed"),
        ({"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum was passed"),
        (
            {"input_positions": jnp.zeros((2, 24), int)},
            "input_positions was passed .* rotate queries and keys",
        ),
        ({"is_causal": True, "spec": MaskSpec(causal=False)}, "is_causal is True but spec is MaskSpec"),
        ({"dropout_rate": 0.1}, "dropout_rate is 0.1 but there is no dropout_rng; pass the module its"),
    ],
)
def test_what_is_refused(options, message):
    query = jnp.zeros((2, TOKENS, HEADS, 8))
    with pytest.raises(ArgumentError, match=message):
        attention_fn(query, query, query, **options)


def test_batches_that_differ():
    query, key = jnp.zeros((2, 3, 4, 1, 8)), jnp.zeros((3, 2, 4, 1, 8))
    with pytest.raises(
        ArgumentError, match=r"key has shape \(3, 2, 4, 1, 8\) but query has .* must be equal"
    ):
        attention_fn(query, key, key)


def test_what_the_modules_pass_is_refused_too(inputs):
    with pytest.raises(ArgumentError, match="leave sow_weights out"):
        nnx_module()(inputs, sow_weights=True)
    module = nnx_module(decode=True)
    module.init_cache(inputs.shape)
    with pytest.raises(ArgumentError, match=r"decode=True.* agentic_ring\.attention\.cache\.decode"):
        module(inputs[:, :1])


def test_other_options_reach_attention():
    query = jax.random.normal(jax.random.key(0), (2, TOKENS, HEADS, 8))
    got = partial(attention_fn, spec=MaskSpec(window=5), soft_cap=2.0)(query, query, query)
    want = attention(query, query, query, mask=MaskSpec(window=5), soft_cap=2.0)
    np.testing.assert_array_equal(got, want)
    with pytest.raises(TypeError, match="promotion"):
        attention_fn(query, query, query, promotion=None)
