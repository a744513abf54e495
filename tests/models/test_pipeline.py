"""Models whose layers lie in pipeline stages compute what they compute on one device, with all gradients."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from agentic_ring.attention import order
from agentic_ring.errors import MeshError
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from agentic_ring.models.llama import LlamaConfig, TokenBatch, token_loss
from agentic_ring.models.lora import LoraConfig, LoraModel
from agentic_ring.models.model import Model
from agentic_ring.models.pipeline import (
    accumulation_parts,
    apply_in_stages,
    count_ticks,
    microbatches_per_stage,
)
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.training.optimizer import OptimizerConfig, make_optimizer
from agentic_ring.training.train_step import init_state, make_train_step
from tests.models.test_alternating_layers import LLAMA as ALTERNATING
from tests.models.tiny_agentic_transformer import random_steps, tiny_config

RULES = ShardingRules()
ROWS, LENGTH = 8, 16
LLAMA = LlamaConfig(
    TransformerConfig(
        width=32, layers=4, heads=4, kv_heads=2, ffn_width=48, ffn_chunk=4, head_groups=2, remat="full"
    ),
    vocab_size=40,
    loss_chunk=4,
)
TWO_STAGES, FOUR_STAGES = MeshShape(stage=2, fsdp=2, ring=2), MeshShape(stage=4, ring=2)
ONE_DEVICE = MeshShape(ring=1)


def mesh_of(shape: MeshShape):
    return make_mesh(shape, jax.devices()[: 8 if shape.stage > 1 else 1])


def packed_rows(mesh) -> TokenBatch:
    """Rows of two texts and padding, in the ring's order, so that every microbatch has its own labels."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, LLAMA.vocab_size, (ROWS, LENGTH), dtype=np.int32)
    starts = random.integers(2, LENGTH - 4, (ROWS, 1))
    place = np.arange(LENGTH)[None]
    segments = np.where(place >= LENGTH - 2, -1, (place >= starts).astype(np.int32)).astype(np.int32)
    positions = np.where(place >= starts, place - starts, place).astype(np.int32)
    fields = tokens, np.roll(tokens, -1, 1), (segments >= 0).astype(np.float32), positions, segments
    permutation = order("zigzag", LENGTH, mesh.shape["ring"])
    sharding = RULES.sharding(mesh, (ROWS, LENGTH), ("batch", "sequence"))
    return TokenBatch(*(jax.device_put(x[:, permutation], sharding) for x in fields), layout="zigzag")


def assert_equal_to_rounding(got, want, tolerance=3e-6):
    """Every array deviates by at most ``tolerance`` of its largest number."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.mark.slow
def test_groups_of_layers_have_the_gradients_of_one_device():
    model = Model(ALTERNATING)

    def differentiated(shape: MeshShape):
        mesh = mesh_of(shape)
        with jax.set_mesh(mesh):
            shardings = model.param_shardings(mesh, RULES)
            params = jax.jit(model.init_params, out_shardings=shardings)(jax.random.key(0))
            run = jax.jit(jax.value_and_grad(lambda params, batch: token_loss(model.bind(params), batch)))
            return jax.device_get(run(params, packed_rows(mesh)))

    assert_equal_to_rounding(differentiated(TWO_STAGES), differentiated(ONE_DEVICE))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 2)])
def test_float64(stages, microbatches):
    """Layers with a ring of their own, differentiated through both loops, to the precision of float64."""
    rows = 4 * microbatches
    mesh = mesh_of(MeshShape(stage=stages, data=4 // stages, ring=2))

    def exchange(x):
        """Adds the tokens of the other device of the ring."""
        return x + 0.5 * jax.lax.ppermute(x, "ring", [(0, 1), (1, 0)])

    def apply(layers, x, labels):
        def body(x, weight):
            spec = PartitionSpec("data", "ring")
            return jax.shard_map(exchange, in_specs=spec, out_specs=spec)(jnp.tanh(x @ weight)), None

        return jax.lax.scan(jax.checkpoint(body), x * labels[..., None], layers)[0]

    def reference(layers, x, labels):
        for stage in np.split(layers, stages):
            x = x * labels[..., None]
            for weight in stage:
                x = jnp.tanh(x @ weight)
                x = x + 0.5 * jnp.roll(x, x.shape[1] // 2, axis=1)
        return x

    def staged(layers, x, labels):
        return apply_in_stages(apply, layers, x, labels, RULES)

    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        layers = 0.4 * random.normal(size=(8, 6, 6))
        x, target = random.normal(size=(2, rows, 8, 6))
        labels = random.normal(size=(rows, 8))

        def output_and_gradients(function):
            def loss(layers, x):
                output = function(layers, x, labels)
                return jnp.sum((output - target) ** 2), output

            return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(layers, x)

        with jax.set_mesh(mesh):
            got = jax.device_get(output_and_gradients(staged))
        want = jax.device_get(output_and_gradients(reference))
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(got))
    assert_equal_to_rounding(got, want, 1e-13)


@pytest.mark.slow
def test_accumulation_and_lora():
    """An update of adapters, in two parts of a batch, with the frozen weights in their stages."""
    model = LoraModel(LLAMA, LoraConfig(2), "float32")
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2), steps=10)

    def updated(shape):
        mesh = mesh_of(shape)
        with jax.set_mesh(mesh):
            shardings = jax.tree.map(lambda leaf: leaf.sharding, model.abstract_frozen(mesh, RULES))
            weights = jax.jit(Model(LLAMA).init_params, out_shardings=shardings)(jax.random.key(0))
            state = init_state(model, optimizer, 0, mesh, RULES)
            step = jax.jit(make_train_step(model, token_loss, optimizer, accumulation=2))
            state, metrics = step(state, packed_rows(mesh), weights)
        # Adam's first moments of every B; A has no gradient while B is zero.
        moments = jax.tree_util.tree_leaves_with_path(state.optimizer)
        moments = [x for path, x in moments if ".mu" in jax.tree_util.keystr(path) and "'b'" in str(path)]
        return jax.device_get((moments, metrics))

    assert_equal_to_rounding(updated(TWO_STAGES), updated(ONE_DEVICE))


def test_each_stage_holds_its_layers_only():
    shardings = Model(LLAMA).param_shardings(mesh_of(FOUR_STAGES), RULES)["transformer"]["blocks"]
    assert {sharding.spec[0] for sharding in jax.tree.leaves(shardings)} == {"stage"}


GROUPS_OF_4 = replace(ALTERNATING, transformer=replace(ALTERNATING.transformer, global_every=4))


@pytest.mark.parametrize(
    ("config", "inputs", "named"),
    [
        (tiny_config(layers=3), (random_steps(8, 8, valid=8), "zigzag"), "3 layers .* 2 stages"),
        (tiny_config(layers=4), (random_steps(6, 8, valid=8), "zigzag"), "batch of 6 rows .* 2 stages"),
        (GROUPS_OF_4, (np.zeros((8, 16), np.int32),), "every 4th layer is global"),
    ],
)
def test_what_does_not_divide(config, inputs, named):
    model = Model(config)
    with jax.set_mesh(mesh_of(TWO_STAGES)), pytest.raises(MeshError, match=named):
        jax.eval_shape(lambda params: model.bind(params)(*inputs), model.abstract_params())


def test_schedule():
    assert [microbatches_per_stage(rows) for rows in (1, 8, 6)] == [1, 4, 3]
    assert count_ticks(stages=4, microbatches=16) == 19
    assert [accumulation_parts(rows, 1) for rows in (1, 8)] == [1, 8]
    assert [accumulation_parts(rows, 4) for rows in (1, 5, 6, 8)] == [1, 5, 2, 2]
