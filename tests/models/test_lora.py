"""LoRA against a plain model: equal outputs and gradients."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from agentic_ring.models.llama import LlamaConfig, TokenBatch, token_loss
from agentic_ring.models.lora import LoraConfig, LoraModel
from agentic_ring.models.low_rank import LowRankWeight, multiply
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.training.optimizer import OptimizerConfig, make_optimizer
from agentic_ring.training.train_step import abstract_state
from evals.compile.llama_step import token_batch
from evals.compile.step_memory import TrainStep
from tests.models.test_alternating_layers import LLAMA as GEMMA

STACK = TransformerConfig(
    width=32, layers=2, heads=4, kv_heads=2, ffn_width=48, ffn_chunk=4, head_groups=2, remat="full"
)
CONFIG = LlamaConfig(STACK, vocab_size=40, loss_chunk=4)
RULES = ShardingRules()


@cache
def mesh():
    return make_mesh(MeshShape(fsdp=2, ring=2), jax.devices()[:4])


@cache
def frozen_weights(dtype="float32", config=CONFIG):
    model = Model(config)
    with jax.set_mesh(mesh()):
        make = jax.jit(model.init_params, out_shardings=model.param_shardings(mesh(), RULES))
        return jax.tree.map(lambda x: x.astype(dtype), make(jax.random.key(0)))


def tokens():
    return jax.random.randint(jax.random.key(7), (2, 16), 0, CONFIG.vocab_size)


def batch():
    text = tokens()
    return TokenBatch(text, text, jnp.ones(text.shape), jnp.arange(16)[None], None, "contiguous")


def random_adapters(model):
    """Adapters as after training: neither A nor B is zero."""
    key = jax.random.key(3)
    return jax.tree.map(lambda p: 0.3 * jax.random.normal(key, p.shape), model.abstract_params())


def logits(model, params, frozen=None):
    with jax.set_mesh(mesh()):
        return np.asarray(jax.jit(lambda p, f: model.bind(p, f)(tokens()))(params, frozen))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "tolerance"),
    [(GEMMA, 1e-5), (replace(CONFIG, transformer=replace(STACK, dtype="bfloat16")), 1e-6)],
    ids=["gemma", "bfloat16"],
)
def test_merged_weights_give_what_the_adapted_model_gives(config, tolerance):
    dtype = config.transformer.dtype
    model, frozen = LoraModel(config, LoraConfig(4), dtype), frozen_weights(dtype, config)
    adapters = random_adapters(model)
    with jax.set_mesh(mesh()):
        merged = model.merged(adapters, frozen)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype(dtype)}
    adapted = logits(model, adapters, frozen)
    assert np.abs(adapted - logits(Model(config), frozen)).max() > 0.1
    np.testing.assert_allclose(logits(Model(config), merged), adapted, atol=tolerance)


def test_the_sum_is_base_and_scaled_product():
    model = LoraModel(CONFIG, LoraConfig(4, scale=0.5), "float32")
    frozen = jax.jit(Model(CONFIG).init_params)(jax.random.key(0))
    adapters = random_adapters(model)
    merged, base = flatten_dict(model.merged(adapters, frozen)), flatten_dict(frozen)
    output = ("transformer", "blocks", "attention", "output")  # two dimensions of inputs
    small, fresh = flatten_dict(adapters), flatten_dict(model.init_params(jax.random.key(1)))
    assert not any(matrix.any() for path, matrix in fresh.items() if path[-1] == "b")
    product = np.einsum("lnhr,lrd->lnhd", small[*output, "a"], small[*output, "b"])
    np.testing.assert_allclose(merged[output], base[output] + 0.5 * product, atol=1e-6)
    changed = {path[-1] for path in base if not np.array_equal(merged[path], base[path])}
    assert changed == {"query", "key", "value", "output", "gate", "up", "down"}


def test_a_product_forms_no_sum_and_equals_that_with_it():
    shapes = (2, 3, 4, 2), (4, 2, 5), (4, 2, 3), (3, 5)
    x, base, a, b = (jax.random.normal(jax.random.key(0), shape) for shape in shapes)

    def product(x, a, b, summed):
        weight = LowRankWeight(base, a, b, 0.5)
        return multiply(x, weight[...] if summed else weight, inputs=2)

    ours, summed = (jax.vjp(partial(product, summed=way), x, a, b) for way in (False, True))
    np.testing.assert_allclose(ours[0], summed[0], atol=1e-5)
    for mine, theirs in zip(ours[1](ours[0]), summed[1](ours[0]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-4)
    program = jax.make_jaxpr(jax.grad(lambda a: product(x, a, b, False).sum()))(a).jaxpr
    assert base.shape not in {result.aval.shape for step in program.eqns for result in step.outvars}


@pytest.mark.slow
@pytest.mark.parametrize("stack", [STACK, replace(STACK, ffn_chunk=None, head_groups=1)])
def test_gradients_are_those_of_the_sum(stack):
    config = replace(CONFIG, transformer=stack)
    model, frozen = LoraModel(config, LoraConfig(4), "float32"), frozen_weights()
    adapters = random_adapters(model)

    def adapted(adapters):
        return token_loss(model.bind(adapters, frozen), batch())

    def summed(adapters):
        weights = model.merged(adapters, frozen)
        return token_loss(Model(CONFIG).bind(weights), batch())

    with jax.set_mesh(mesh()):
        ours, plain = jax.jit(jax.grad(adapted))(adapters), jax.jit(jax.grad(summed))(adapters)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), ours, plain)


@pytest.mark.slow
def test_the_sums_of_all_layers_are_never_in_memory_together():
    def temporary(layers):
        deep = replace(CONFIG, transformer=replace(STACK, width=64, ffn_width=512, layers=layers))
        model = LoraModel(deep, LoraConfig(2), "float32")
        plan = TrainStep(model, token_loss, OptimizerConfig(), token_batch(2, 16), mesh()).memory()
        return plan.temporary, Model(deep).parameter_count() * 4 / mesh().size

    (few, few_weights), (many, many_weights) = temporary(8), temporary(16)
    assert many - few < 0.3 * (many_weights - few_weights)


def test_the_state_holds_nothing_for_frozen_weights():
    model = LoraModel(CONFIG, LoraConfig(2), "bfloat16")
    state = abstract_state(model, make_optimizer(OptimizerConfig(), 1), mesh(), RULES)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) <= 3 * model.parameter_count() + 8
    assert model.parameter_count() < 0.2 * Model(CONFIG).parameter_count()
    biased = replace(CONFIG, family="qwen2", transformer=replace(STACK, projection_bias=True))
    assert LoraModel(biased, LoraConfig(2), "bfloat16").parameter_count() == model.parameter_count()
    frozen = jax.tree.leaves(model.abstract_frozen(mesh(), RULES))
    assert {leaf.dtype for leaf in frozen} == {jnp.dtype("bfloat16")}
    assert sum(leaf.size for leaf in frozen) == Model(CONFIG).parameter_count()
