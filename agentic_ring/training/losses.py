"""What training minimises."""

import jax
import jax.numpy as jnp


def action_loss(predicted: jax.Array, action: jax.Array, weight: jax.Array) -> jax.Array:
    """Weighted sum of squared action errors, each averaged over the action's components.

    A sum, not a mean, so that parts of a batch add up to the whole; the caller divides by the
    batch's total weight.

    Args:
      predicted, action: float32 [B, S, A].
      weight: float32 [B, S]; 0 takes a step out of the loss.
    """
    return jnp.sum(weight * jnp.mean(jnp.square(predicted - action), axis=-1))
