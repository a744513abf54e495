"""FLOPs of a training step, as the paper counts them and as the model needs them.

A multiplication and an addition are two operations. A backward pass takes twice its forward pass. What
rematerialisation computes again does not count: these are operations of the model, not of the machine.

    paper    3 (24 s h^2 + 4 s^2 h) layers per sequence; arXiv 2310.01889, section 5.3 and figure 5.
             Four projections of width h, a feedforward of width 4h, scores of all pairs of tokens.
    halved   the same with half of the pairs, which is what a causal mask needs.
    model    this project's count: gated feedforward at its own width, grouped keys, half of the pairs, and
             the logits of the vocabulary, which the paper leaves out.
"""

from typing import NamedTuple

from agentic_ring.models.transformer_config import TransformerConfig

BACKWARD = 2
"""Operations of a backward pass over those of its forward pass."""


class StepFlops(NamedTuple):
    """Operations of one step over a batch, counted in three ways; see the module."""

    paper: float
    halved: float
    model: float


def step_flops(stack: TransformerConfig, vocab_size: int, context: int, sequences: int) -> StepFlops:
    """Returns the operations of forward and backward over ``sequences`` of ``context`` tokens each."""
    factor = (1 + BACKWARD) * sequences
    width, layers = stack.width, stack.layers
    dense, pairs = 24 * context * width**2 * layers, 4 * context**2 * width * layers
    layer = 2 * context * layer_weights(stack) + attention_forward(stack, context**2 / 2)
    model = layers * layer + 2 * context * width * vocab_size
    return StepFlops(factor * (dense + pairs), factor * (dense + pairs / 2), factor * model)


def layer_weights(stack: TransformerConfig) -> int:
    """Returns the number of weights in the matrices of one layer: two operations each per token."""
    heads = 2 * stack.heads + 2 * stack.key_value_heads
    return stack.width * (heads * stack.head_dim + 3 * stack.ffn_width)


def attention_forward(stack: TransformerConfig, pairs: float) -> float:
    """Returns the operations of both products over ``pairs`` of query and key in one layer, all heads."""
    return 4 * pairs * stack.heads * stack.head_dim
