"""Random network distillation (arXiv 1810.12894): no task, the reward is what cannot yet be predicted.

As in URLB (rll-research/url_benchmark: ``agent/rnd.py``) the novelty is that of the observation that
an action leads to, seen through normalised and clipped observations. TD3 does the learning.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentic_ring.models.perceptron import Parameters, apply_mlp, init_mlp
from agentic_ring.training.td3 import TD3Config, TD3State, act, init_population, update

# Normalised observations beyond this many deviations count as this many (URLB).
_OBSERVATION_CLIP = 5.0
_FEATURES = 64  # width of the random features to predict


class RNDState(NamedTuple):
    """Everything that an update changes; the leading axis is P."""

    td3: TD3State
    predictor: Parameters
    optimizer: optax.OptState


class RNDLearner:
    """A population of curious learners; see ``population.Learner``.

    Args:
      seeds: [P].
    """

    def __init__(self, config: TD3Config, observation_dim: int, action_dim: int, seeds: Sequence[int]):
        self.config, self.horizon, self.discount = config, config.horizon, config.discount
        if config.horizon != 1:
            raise ValueError(f"horizon is {config.horizon}; novelty is known for one decision only, use 1")
        sizes = (observation_dim, config.hidden, _FEATURES)
        keys = jax.vmap(jax.random.key)(jnp.array(seeds))
        self._members = len(seeds)
        self._target = jax.vmap(lambda key: init_mlp(jax.random.fold_in(key, 1), sizes))(keys)
        predictor = jax.vmap(lambda key: init_mlp(jax.random.fold_in(key, 2), sizes))(keys)
        optimizer = jax.vmap(optax.adam(config.learning_rate).init)(predictor)
        td3 = init_population(config, observation_dim, action_dim, jnp.array(seeds))
        self.state = RNDState(td3, predictor, optimizer)

    def batch_shape(self, updates: int) -> tuple[int, ...]:
        delay = self.config.policy_delay
        return (-(-updates // delay), delay, self._members, self.config.batch)

    def begin_round(self, observation: np.ndarray) -> None:
        self._mean, self._deviation = observation.mean(0), observation.std(0) + 1e-3

    def act(self, observation: np.ndarray) -> np.ndarray:
        return np.asarray(act(self.state.td3.actor, observation))

    def update(self, batches: dict[str, np.ndarray]) -> None:
        deviations = (batches["next_observation"] - self._mean) / self._deviation
        normalised = np.clip(deviations, -_OBSERVATION_CLIP, _OBSERVATION_CLIP)
        predictor, optimizer, novelty = _distill(
            self.config.learning_rate, self._target, self.state.predictor, self.state.optimizer, normalised
        )
        td3 = update(self.config, self.state.td3, batches | {"reward": novelty})
        self.state = RNDState(td3, predictor, optimizer)


@partial(jax.jit, static_argnums=0)
def _distill(
    learning_rate: float,
    target: Parameters,
    predictor: Parameters,
    optimizer: optax.OptState,
    observation: jax.Array,
) -> tuple[Parameters, optax.OptState, jax.Array]:
    """Trains the predictors on observations [U, delay, P, B, O], one step for each of U.

    Returns:
      Predictors, optimizer state, and the novelty [U, delay, P, B] as it was before each step, divided
      by its deviation over the batch.
    """

    def step(carry: tuple[Parameters, optax.OptState], inputs: jax.Array):
        predictor, optimizer = carry

        def loss(predictor: Parameters) -> tuple[jax.Array, jax.Array]:
            features = jax.vmap(apply_mlp, (0, 1), 1)(predictor, inputs)
            wanted = jax.vmap(apply_mlp, (0, 1), 1)(target, inputs)
            error = jnp.mean((features - wanted) ** 2, -1)  # [delay, P, B]
            return error.mean((0, 2)).sum(), error

        gradient, error = jax.grad(loss, has_aux=True)(predictor)
        updates, optimizer = jax.vmap(optax.adam(learning_rate).update)(gradient, optimizer)
        novelty = error / (error.std((0, 2), keepdims=True) + 1e-8)
        moved = jax.tree.map(jnp.add, predictor, updates)
        return (moved, optimizer), novelty

    (predictor, optimizer), novelty = jax.lax.scan(step, (predictor, optimizer), observation)
    return predictor, optimizer, novelty
