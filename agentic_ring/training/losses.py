"""What training minimises: for each model, a sum over the weighted parts of a batch.

A sum, not a mean, so that parts of a batch add up to the whole; the train step divides by the batch's
total weight.
"""

import jax
import jax.numpy as jnp

from agentic_ring.data.chains import ChainBatch
from agentic_ring.models.agentic_transformer import AgenticTransformer
from agentic_ring.models.llama import Llama, TokenBatch


def action_loss(model: AgenticTransformer, batch: ChainBatch) -> jax.Array:
    """Weighted sum of squared action errors, each averaged over the action's components."""
    predicted = model(batch.steps, batch.layout)
    error = jnp.mean(jnp.square(predicted - batch.steps.action), axis=-1)
    return jnp.sum(batch.weight * error)


def token_loss(model: Llama, batch: TokenBatch) -> jax.Array:
    """Weighted sum of the cross entropy of each token's target, in nats."""
    return jnp.sum(batch.weight * model.cross_entropy(batch))
