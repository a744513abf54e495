"""What training minimises: for each model, a sum over the weighted parts of a batch.

A sum, not a mean, so that parts of a batch add up to the whole; the train step divides by the batch's
total weight.
"""

import jax
import jax.numpy as jnp

from agentic_ring.data.chain_loader import ChainBatch
from agentic_ring.models.agentic_transformer import AgenticTransformer
from agentic_ring.models.behavior_cloning import BehaviorCloning
from agentic_ring.models.decision_transformer import DecisionTransformer
from agentic_ring.models.llama import Llama, TokenBatch
from agentic_ring.models.windows import WindowBatch

MODE_DEVIATION = 0.3
"""Deviation of an action's components from the mode that they belong to."""


def action_loss(model: AgenticTransformer, batch: ChainBatch) -> jax.Array:
    """Weighted sum of squared action errors, each averaged over the action's components.

    Of several modes, -2 s^2 / A times the log likelihood under a mixture of Gaussians of deviation s: the
    same with one mode, and near the error of the best one where the odds are on it.
    """
    actions, log_odds = model.modes(batch.steps, batch.layout)
    errors = jnp.mean(jnp.square(actions - batch.steps.action[:, :, None]), axis=-1)
    scale = 2 * MODE_DEVIATION**2 / actions.shape[-1]
    return -scale * jnp.sum(batch.weight * jax.nn.logsumexp(log_odds - errors / scale, axis=-1))


def window_loss(model: BehaviorCloning | DecisionTransformer, batch: WindowBatch) -> jax.Array:
    """The same of windows; a model that predicts the last action alone has weight there alone."""
    return _squared_error(model(batch.windows), batch.windows.action, batch.weight)


def token_loss(model: Llama, batch: TokenBatch) -> jax.Array:
    """Weighted sum of the cross entropy of each token's target, in nats."""
    return jnp.sum(batch.weight * model.cross_entropy(batch))


def _squared_error(predicted: jax.Array, action: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.sum(weight * jnp.mean(jnp.square(predicted - action), axis=-1))
