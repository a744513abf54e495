"""Operations of a training step, as the paper counts them and as the model needs them.

A multiplication and an addition are two operations. A backward takes twice its forward, and what
rematerialisation computes again earns nothing: the counts are of the model, not of the machine.

    paper    3 (24 s h^2 + 4 s^2 h) layers a sequence; arXiv 2310.01889, section 5.3 and figure 5.
             Four projections of width h, a feedforward of width 4h, scores of all pairs of tokens.
    halved   the same with half of the pairs, which is all that a causal mask leaves.
    model    this project's: gated feedforward at its own width, grouped keys, half of the pairs, and
             the logits of the vocabulary, which the paper leaves out.
"""

from dataclasses import dataclass

from agentic_ring.models.transformer import TransformerConfig

BACKWARD = 2
"""Operations of a backward over those of its forward."""


@dataclass(frozen=True)
class StepFlops:
    """Operations of one step over a batch, counted in three ways; see the module."""

    paper: float
    halved: float
    model: float


def step_flops(stack: TransformerConfig, vocab_size: int, context: int, sequences: int) -> StepFlops:
    """Of forward and backward.

    Args:
      stack: shape of the model.
      vocab_size: of its logits.
      context: tokens of a sequence, s.
      sequences: of the batch.
    """
    factor = (1 + BACKWARD) * sequences
    width, layers = stack.width, stack.layers
    dense, pairs = 24 * context * width**2 * layers, 4 * context**2 * width * layers
    return StepFlops(
        paper=factor * (dense + pairs),
        halved=factor * (dense + pairs / 2),
        model=factor
        * (
            layers * context * layer_products(stack)
            + layers * attention_forward(stack, context**2 / 2)
            + context * head_products(stack, vocab_size)
        ),
    )


def layer_products(stack: TransformerConfig) -> float:
    """Of one token's projections and gated feedforward in one layer, forward: two a weight."""
    return 2 * layer_weights(stack)


def regrouped_products(stack: TransformerConfig) -> float:
    """Of one token's queries, keys and values in one layer, forward, where heads attend in groups.

    Each group projects its own once more for its derivative.
    """
    heads = stack.heads + 2 * stack.key_value_heads
    return 2 * stack.width * heads * stack.head_dim if stack.head_groups > 1 else 0


def layer_weights(stack: TransformerConfig) -> int:
    """Numbers in the matrices of one layer."""
    heads = 2 * stack.heads + 2 * stack.key_value_heads
    return stack.width * (heads * stack.head_dim + 3 * stack.ffn_width)


def head_products(stack: TransformerConfig, vocab_size: int) -> float:
    """Of one token's logits, forward."""
    return 2 * stack.width * vocab_size


def attention_forward(stack: TransformerConfig, pairs: float) -> float:
    """Of the two products over this many pairs of a query and a key in one layer, all heads."""
    return 4 * pairs * stack.heads * stack.head_dim
