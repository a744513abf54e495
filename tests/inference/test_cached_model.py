"""Unstacked layers compute what the stack computes, in the same memory."""

import jax
import numpy as np

from agentic_ring.inference.cached_model import unstack_layers
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from agentic_ring.models.llama import LlamaConfig, load_pretrained
from agentic_ring.models.transformer import Block
from agentic_ring.models.transformer_config import TransformerConfig
from tests.models.llama_cases import LAYERS, tokens, write_model


def compute(model, mesh) -> np.ndarray:
    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, tokens()))


def test_logits_and_shardings_are_those_of_the_stack(tmp_path):
    mesh = mesh_on_first_devices(MeshShape(fsdp=2, ring=2, tensor=2))
    model = load_pretrained(write_model(tmp_path), mesh)
    own = unstack_layers(model)
    np.testing.assert_allclose(compute(own, mesh), compute(model, mesh), atol=1e-5)
    for index in range(LAYERS):
        layers = (jax.tree.leaves(each.transformer.block(index)) for each in (own, model))
        for layer, sliced in zip(*layers, strict=True):
            np.testing.assert_array_equal(layer, sliced)
            assert layer.sharding.is_equivalent_to(sliced.sharding, sliced.ndim)


def test_matrices_are_not_copied_and_stay_when_the_stack_goes():
    config = LlamaConfig(TransformerConfig(width=64, layers=3, heads=2, ffn_width=128), vocab_size=64)
    model = config.build(jax.random.key(0))
    own = unstack_layers(model)
    blocks = model.transformer.blocks
    assert isinstance(blocks, Block)
    stack, last = blocks.feedforward.up[...], own.transformer.block(2).feedforward.up[...]
    assert last.unsafe_buffer_pointer() - stack.unsafe_buffer_pointer() == 2 * last.nbytes
    assert not last.committed
    expected = np.array(stack[2])
    del model, blocks, stack
    np.testing.assert_array_equal(last, expected)
