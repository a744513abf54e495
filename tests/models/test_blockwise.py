"""Functions over chunks of tokens equal those over all tokens, gradients included."""

from contextlib import nullcontext
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from agentic_ring.models.layers import FeedForward, apply_blockwise
from agentic_ring.models.llama import LlamaConfig, TokenBatch
from agentic_ring.models.transformer_config import TransformerConfig
from tests.attention.oracle import with_gradients
from tests.compiled_schedule import parse

RULES = ShardingRules()
EVERY_AXIS = MeshShape(data=2, ring=2, tensor=2)


def feedforward(chunk: int | None) -> FeedForward:
    config = TransformerConfig(width=16, layers=1, heads=1, ffn_width=24, ffn_chunk=chunk)
    return FeedForward(jax.random.key(0), config)


@cache
def feedforward_and_gradients(shape: MeshShape | None, chunk: int | None, dtype: str = "float32") -> tuple:
    """The output for 4 rows of 48 tokens of width 16, and the gradients of weights and tokens."""
    graphdef, state = nnx.split(feedforward(chunk))
    x, d_output = (jax.random.normal(jax.random.key(n), (4, 48, 16)).astype(dtype) for n in (1, 2))
    with jax.set_mesh(make_mesh(shape)) if shape else nullcontext():
        return with_gradients(lambda state, x: nnx.merge(graphdef, state)(x), d_output, state, x)


@pytest.mark.parametrize(
    ("shape", "chunk"), [(None, 5), (MeshShape(ring=8), 1), (MeshShape(fsdp=4, ring=2), 4), (EVERY_AXIS, 5)]
)
def test_chunks_change_nothing(shape, chunk):
    expected = feedforward_and_gradients(None, None)
    actual = feedforward_and_gradients(shape, chunk)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5), actual, expected)


def test_gradients_of_weights_add_up_in_float32():
    """In bfloat16 the sum over 48 chunks of one token would lose what a sum in float32 keeps."""
    exact = feedforward_and_gradients(None, None)[1]["gate"][...]
    rounded = feedforward_and_gradients(MeshShape(ring=8), 1, "bfloat16")[1]["gate"][...]
    error = np.abs(np.asarray(rounded, np.float32) - exact).max() / np.abs(exact).max()
    assert error < 1e-2


@pytest.mark.parametrize(("chunk", "loops"), [(5, True), (6, False)])
def test_what_fits_into_a_chunk_is_no_loop(chunk, loops):
    with jax.set_mesh(make_mesh(MeshShape(ring=8))):
        program = jax.make_jaxpr(feedforward(chunk))(jnp.ones((4, 48, 16)))  # 6 tokens of a row per device
    assert ("scan" in str(program)) == loops


@pytest.mark.usefixtures("full_compiler")
def test_a_weight_gradient_is_summed_over_devices_once():
    mesh = make_mesh(MeshShape(ring=8))
    graphdef, state = nnx.split(feedforward(chunk=2))

    def loss(state: nnx.State, x: jax.Array) -> jax.Array:
        return (nnx.merge(graphdef, state)(x) ** 2).sum()

    with jax.set_mesh(mesh):
        sharding = RULES.sharding(mesh, (1, 64, 16), ("batch", "sequence", None))
        x = jax.ShapeDtypeStruct((1, 64, 16), jnp.float32, sharding=sharding)
        program = parse(jax.jit(jax.grad(loss)).lower(state, x).compile().as_text())
    inside = [steps for name, steps in program.computations.items() if name != program.entry]
    opcodes = {step.opcode.removesuffix("-start") for steps in inside for step in steps}
    assert "dot" in opcodes, "the chunks are a loop"
    assert not opcodes & {"all-reduce", "reduce-scatter", "all-gather"}


def cross_entropy_and_gradients(shape: MeshShape | None, chunk: int | None, vocabulary: int) -> tuple:
    stack = TransformerConfig(width=16, layers=0, heads=2, ffn_width=32, remat="none")
    config = LlamaConfig(stack, vocab_size=vocabulary, loss_chunk=chunk)
    random = np.random.default_rng(0)
    tokens, targets = (random.integers(0, 40, (4, 48), np.int32) for _ in range(2))
    place = np.arange(48, dtype=np.int32)[None]
    weight = random.choice(np.float32([0, 0, 0, 1, 4]), (4, 48))
    batch = TokenBatch(tokens, targets, weight, place, None, None)
    graphdef, state = nnx.split(config.build(jax.random.key(0)))
    with jax.set_mesh(make_mesh(shape)) if shape else nullcontext():
        return with_gradients(
            lambda state: nnx.merge(graphdef, state).weighted_cross_entropy(batch).mean(), jnp.ones(()), state
        )


@pytest.mark.parametrize("vocabulary", [40, 41])
def test_the_loss_does_not_change_with_mesh_or_chunk(vocabulary):
    """Nor where the devices do not divide the vocabulary."""
    expected = cross_entropy_and_gradients(None, None, vocabulary)
    actual = cross_entropy_and_gradients(EVERY_AXIS, 4, vocabulary)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6), actual, expected)
    assert abs(float(expected[0]) - np.log(40)) < 1.0


def test_tokens_that_do_not_count_take_no_time():
    """5 tokens count on each device, which fill its first chunk: the others would give NaN."""
    gate = feedforward(chunk=None).gate
    counted = np.random.default_rng(0).permuted(np.tile(np.arange(24) < 5, (4, 2, 1)), axis=2).reshape(4, 48)

    def square(weights: tuple, x: jax.Array, counts: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        return jnp.where(counts[..., None], x, jnp.nan) ** 2 * weights[0][0, 0]

    def total(x: jax.Array) -> jax.Array:
        options = {"rules": RULES, "chunk": 5, "contracted": "vocab", "counts": lambda counts: counts}
        return apply_blockwise(square, (gate,), x, jnp.asarray(counted), **options).sum()

    x = jax.random.normal(jax.random.key(1), (4, 48, 16))
    with jax.set_mesh(make_mesh(MeshShape(ring=2), jax.devices()[:2])):
        value, d_x = jax.jit(jax.value_and_grad(total))(x)
    x = np.where(counted[..., None], x, 0)
    np.testing.assert_allclose(value, (x**2).sum() * gate[...][0, 0], rtol=1e-5)
    np.testing.assert_allclose(d_x, 2 * x * gate[...][0, 0], rtol=1e-6)
