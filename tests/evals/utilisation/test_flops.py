"""FLOPs against the paper's ratios, sums by hand, and the compiler's count."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from agentic_ring.models.transformer import Transformer
from agentic_ring.models.transformer_config import TransformerConfig
from evals.utilisation.flops import attention_forward, layer_weights, step_flops

SEVEN_B = TransformerConfig(width=4096, layers=32, heads=32, ffn_width=11008)


@pytest.mark.parametrize(("width", "ratio"), [(4096, 37.4), (5120, 31.0), (8192, 20.6)])
def test_paper_count_gives_the_ratios_of_figure_5(width, ratio):
    stack = TransformerConfig(width=width, layers=2, heads=32, ffn_width=1)
    long, short = 2**20, 2**12
    # The same number of tokens, in long or in short sequences.
    many = step_flops(stack, 32_000, short, long // short).paper
    assert step_flops(stack, 32_000, long, 1).paper / many == pytest.approx(ratio, abs=0.06)


def test_the_counts_differ_by_pairs_feedforward_and_head():
    flops = step_flops(SEVEN_B, 32_000, 8192, 3)
    assert flops.paper - flops.halved == 3 * 3 * 32 * 2 * 8192**2 * 4096
    assert flops.halved == pytest.approx(3 * 3 * 32 * (24 * 8192 * 4096**2 + 2 * 8192**2 * 4096))
    feedforward = 3 * 3 * 32 * 8192 * 4096 * (6 * 11008 - 16 * 4096)
    assert flops.model - flops.halved == pytest.approx(feedforward + 3 * 3 * 2 * 8192 * 4096 * 32_000)


@pytest.mark.usefixtures("full_compiler")
def test_model_count_is_what_the_compiler_counts():
    stack = TransformerConfig(
        width=256, layers=1, heads=4, kv_heads=2, ffn_width=384, remat="none", attention_kernel="vanilla"
    )
    tokens, vocab = 1024, 512
    graph, abstract = nnx.split(jax.eval_shape(lambda: Transformer(jax.random.key(0), stack)))

    def logits(params: nnx.State, x: jax.Array, head: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(x, jnp.arange(tokens)[None], None) @ head

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, tokens, 256), (256, vocab))]
    compiled = jax.jit(logits).lower(abstract, *arrays).compile().cost_analysis()["flops"]
    products = 2 * tokens * (layer_weights(stack) + 256 * vocab)
    by_hand = products + attention_forward(stack, tokens**2)  # the kernel computes masked pairs too
    # Only the compiler counts norms, rotations and the softmax.
    assert by_hand <= compiled <= 1.05 * by_hand
