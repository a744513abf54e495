"""Stacks whose local layers alternate with global ones, scanned in groups."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from agentic_ring.errors import ConfigError
from agentic_ring.models.llama import LlamaConfig
from agentic_ring.models.model import Model
from agentic_ring.models.transformer import Transformer
from agentic_ring.models.transformer_config import LinearScaling, TransformerConfig

STACK = TransformerConfig(
    width=32,
    layers=5,
    heads=4,
    kv_heads=2,
    ffn_width=48,
    window=5,
    global_every=2,
    rope_theta=1e5,
    rope_scaling=LinearScaling(4.0),
    local_rope_theta=100.0,
    query_pre_attn_scalar=24,
    zero_centered_norms=True,
    output_norm=True,
    activation="gelu_tanh",
)
LLAMA = LlamaConfig(
    replace(STACK, head_norm=True, layers=4), family="gemma3_text", vocab_size=40, loss_chunk=4, logit_cap=5.0
)
X = np.random.default_rng(0).normal(size=(2, 16, STACK.width)).astype(np.float32)
POSITIONS = jnp.arange(16)[None]


def gradients(transformer, one_by_one: bool):
    structure, state = nnx.split(transformer)

    def loss(state):
        model = nnx.merge(structure, state)
        if not one_by_one:
            return jnp.square(model(X, POSITIONS)).sum()
        x = X
        for index in range(STACK.layers):
            x = model.block(index)(x, POSITIONS, None, None)
        return jnp.square(x).sum()

    return jax.tree.leaves(jax.jit(jax.grad(loss))(state))


@pytest.mark.slow
def test_scanned_in_groups_they_have_the_gradients_of_layers_one_by_one():
    transformer = Transformer(jax.random.key(0), STACK)
    kinds = [transformer.block(index).config for index in range(STACK.layers)]
    assert [kind.window for kind in kinds] == [5, None, 5, None, 5]
    assert [kind.rope_theta for kind in kinds] == [100.0, 1e5, 100.0, 1e5, 100.0]
    assert [kind.rope_scaling for kind in kinds] == [None, LinearScaling(4.0)] * 2 + [None]
    for got, want in zip(gradients(transformer, False), gradients(transformer, True), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(np.abs(want).max(), 1))


def test_the_program_does_not_grow_with_depth():
    def products(layers: int) -> int:
        stack = replace(LLAMA.transformer, layers=layers, global_every=3)
        model = Model(replace(LLAMA, transformer=stack))

        def loss(params):
            return model.bind(params)(jnp.zeros((1, 16), jnp.int32)).sum()

        return jax.jit(jax.grad(loss)).lower(model.abstract_params()).as_text().count("dot_general")

    assert products(24) == products(6) > 20


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {}, r"logit_cap is 5\.0"),
        ("gemma2", {}, r"local_rope_theta is 100\.0"),
        ("gemma3_text", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is None"),
        ("gemma3_text", {"attention_cap": 5.0}, r"attention_cap is 5\.0"),
    ],
)
def test_what_no_model_of_a_family_has_is_refused(family, changes, named):
    stack = replace(LLAMA.transformer, head_norm=family == "gemma3_text")
    with pytest.raises(ConfigError, match=named):
        replace(LLAMA, family=family, transformer=replace(stack, **changes))


def test_parameters_have_strict_types():
    """A weak type would become a strict one in the first update, and the second would compile once more."""
    for zero_centered in (False, True):
        config = replace(STACK, zero_centered_norms=zero_centered)
        state = jax.eval_shape(lambda config=config: nnx.state(Transformer(jax.random.key(0), config)))
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
