"""Loss functions of policies, one per kind of model: weighted sums over a batch.

They are sums, not means, so that the losses of parts of a batch add up; the train step divides by the total
weight of the batch.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:  # a job imports its own kind of model
    from agentic_ring.data.chain_loader import ChainBatch
    from agentic_ring.models.agentic_transformer import AgenticTransformer
    from agentic_ring.models.baselines import BehaviorCloning, DecisionTransformer, WindowBatch

COMPONENT_DEVIATION = 0.3
"""Standard deviation of each mixture component of the action."""


def action_loss(model: "AgenticTransformer", batch: "ChainBatch") -> jax.Array:
    """Weighted sum of squared action errors, each averaged over the A action dimensions.

    With several mixture components it is -2 s^2 / A times the log likelihood of a mixture of Gaussians with
    standard deviation s. This equals the squared error for one component, and is close to the error of the
    best component if that one has most of the probability.
    """
    actions, log_probs = model.action_mixture(batch.steps, batch.layout, batch.seed)
    errors = jnp.mean(jnp.square(actions - batch.steps.action[:, :, None]), axis=-1)
    scale = 2 * COMPONENT_DEVIATION**2 / actions.shape[-1]
    return -scale * jnp.sum(batch.weight * jax.nn.logsumexp(log_probs - errors / scale, axis=-1))


def window_loss(model: "BehaviorCloning | DecisionTransformer", batch: "WindowBatch") -> jax.Array:
    """Weighted sum of squared action errors of windows."""
    errors = jnp.square(model(batch.windows) - batch.windows.action)
    return jnp.sum(batch.weight * jnp.mean(errors, axis=-1))
