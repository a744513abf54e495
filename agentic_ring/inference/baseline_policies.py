"""Policies without memory of earlier trials; each is a ``TrialPolicy`` (``agentic_ring.rollouts.trials``)."""

from collections.abc import Callable

import jax
import numpy as np

from agentic_ring.data.store import Scaling
from agentic_ring.models.baselines import BehaviorCloningConfig, DecisionTransformerConfig, Windows
from agentic_ring.models.model import Model, Params


class ReactivePolicy:
    """Acts on the current observation only.

    Args:
      choose: returns actions [E, A] in [-1, 1] for normalised observations [E, O].
      scaling: scaling of the training data.
    """

    def __init__(self, choose: Callable[[np.ndarray], np.ndarray], scaling: Scaling):
        self._choose, self._scaling = choose, scaling

    def begin_trial(self) -> None:
        """Does nothing: there is no memory."""

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Returns actions float32 [E, A] for observations float32 [E, O]."""
        return self._choose(self._scaling.observation(observation))

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Does nothing: rewards are not read."""


class WindowPolicy:
    """Acts on the last decisions of the current trial, and on a target return if the model reads returns.

    Args:
      model, params: a trained behaviour cloning model or Decision Transformer.
      scaling: scaling of the training data.
      target: return at which every trial aims, unscaled.
      num_environments: E.
    """

    def __init__(
        self,
        model: Model[BehaviorCloningConfig] | Model[DecisionTransformerConfig],
        params: Params,
        scaling: Scaling,
        target: float,
        num_environments: int,
    ):
        self._config, self._params, self._scaling = model.config, params, scaling
        self._target, self._environments = target, num_environments
        self._predict = jax.jit(lambda params, windows: model.bind(params)(windows)[:, -1])

    def begin_trial(self) -> None:
        """Discards the previous trial and starts with the full target as return-to-go."""
        shape = (self._environments, self._config.window)
        self._windows = Windows(
            return_to_go=np.zeros(shape, np.float32),
            observation=np.zeros((*shape, self._config.observation_dim), np.float32),
            action=np.zeros((*shape, self._config.action_dim), np.float32),
            timestep=np.zeros(shape, np.int32),
            present=np.zeros(shape, bool),
        )
        self._return_to_go = np.full(self._environments, self._target)
        self._timestep = 0

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Returns actions float32 [E, A] for observations float32 [E, O]."""
        windows = self._windows = jax.tree.map(lambda field: np.roll(field, -1, axis=1), self._windows)
        windows.return_to_go[:, -1] = self._return_to_go / self._scaling.return_scale
        windows.observation[:, -1] = self._scaling.observation(observation)
        windows.action[:, -1] = 0
        windows.timestep[:, -1] = self._timestep
        windows.present[:, -1] = True
        action = np.asarray(self._predict(self._params, windows))
        windows.action[:, -1] = action
        return action

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Records the rewards float32 [E] of the last actions."""
        self._return_to_go = self._return_to_go - reward
        self._timestep += 1
