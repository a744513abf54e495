"""Acting with a trained model: prefill a prompt once, then one call of 4 tokens a step.

Everything a policy has seen, of this trial and of those before it, stays in a key/value cache that is
sharded along the sequence over the ring.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.attention.cache import KVCache, cache_specs, empty_cache, slots_needed
from agentic_ring.data.scaling import Scaling
from agentic_ring.errors import ConfigError
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, ChainSteps
from agentic_ring.training.state import Model, Params


class InContextPolicy:
    """Acts in E environments at once and remembers all trials; a ``TrialPolicy`` of ``evals.trials``.

    Args:
      model, params: the trained model; ``params`` live on ``mesh``.
      mesh, rules: the mesh, whose data and fsdp axes share the environments out.
      scaling: that of the training data.
      target: return that every trial aims at, unscaled.
      num_environments: E, a multiple of the data x fsdp devices.
      decisions: steps of all trials together; the cache is made for as many.
      prompt: [1, S] steps of stored trajectories, before the first trial; S a multiple of the ring.
        It is encoded once for all environments.

    Raises:
      ConfigError: the environments do not divide over the mesh.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        mesh: Mesh,
        scaling: Scaling,
        target: float,
        num_environments: int,
        decisions: int,
        prompt: ChainSteps | None = None,
        rules: ShardingRules = ShardingRules(),
    ):
        copies = mesh.shape["data"] * mesh.shape["fsdp"]
        if num_environments % copies:
            raise ConfigError(
                f"{num_environments} environments do not divide over data x fsdp = {copies} devices; "
                f"choose a multiple of {copies}"
            )
        # Weights are gathered over the ring once, not again at every step.
        whole = model.param_shardings(mesh, replace(rules, embed=()))
        self._params = jax.device_put(params, whole)
        self._mesh = mesh
        self._scaling = scaling
        self._target = target
        self._environments = num_environments
        self._decisions = self._decisions_left = decisions
        self._position = 0 if prompt is None else int(np.max(prompt.position)) + 1
        self._trial = -1 if prompt is None else int(np.max(prompt.trajectory))
        self._timestep = 0
        self._observation_dim = model.config.observation_dim
        self._action_dim = model.config.action_dim
        self._previous = self._steps(position=-1)

        config, ring = model.config.transformer, mesh.shape["ring"]
        prompt_tokens = 0 if prompt is None else TOKENS_PER_STEP * prompt.position.shape[1]
        capacity = slots_needed(prompt_tokens, decisions, TOKENS_PER_STEP, ring)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), cache_specs(rules))

        def fresh(batch: int) -> KVCache:
            size = (config.layers, batch, capacity, config.key_value_heads, config.head_dim)
            return empty_cache(*size, dtype=jnp.dtype(config.dtype), ring=ring)

        def prefill(params: Params, prompt: ChainSteps) -> KVCache:
            prompt = jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), prompt)
            cache = model.bind(params).prefill(prompt, fresh(copies))
            share = partial(jnp.repeat, repeats=num_environments // copies)
            return KVCache(
                share(cache.keys, axis=1),
                share(cache.values, axis=1),
                share(cache.positions, axis=0),
                cache.filled,
                cache.calls,
            )

        def act(
            params: Params, previous: ChainSteps, current: ChainSteps, cache: KVCache
        ) -> tuple[jax.Array, KVCache]:
            return model.bind(params).act(previous, current, cache)

        with jax.set_mesh(mesh):
            if prompt is None:
                self._cache = jax.jit(partial(fresh, num_environments), out_shardings=shardings)()
            else:
                self._cache = jax.jit(prefill, out_shardings=shardings)(self._params, prompt)
            self._act = jax.jit(
                act, donate_argnames="cache", out_shardings=(NamedSharding(mesh, PartitionSpec()), shardings)
            )

    def begin_trial(self) -> None:
        """Starts the next trial at the full target; the context stays."""
        self._trial += 1
        self._timestep = 0
        self._return_to_go = np.full(self._environments, self._target)

    def act(self, observation: np.ndarray) -> np.ndarray:
        """Actions float32 [E, A] for observations float32 [E, O].

        Raises:
          ConfigError: the cache is full.
        """
        if self._decisions_left == 0:
            raise ConfigError(
                f"the policy was made for {self._decisions} decisions and has taken them all; "
                "make it for more"
            )
        self._decisions_left -= 1
        current = self._steps(
            position=self._position,
            observation=self._scaling.observation(observation),
            return_to_go=self._return_to_go / self._scaling.return_scale,
        )
        with jax.set_mesh(self._mesh):
            actions, self._cache = self._act(self._params, self._previous, current, self._cache)
        self._action = np.asarray(actions)
        return self._action

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Takes the rewards float32 [E] of the actions just given; ``last`` ends the trial."""
        self._return_to_go = self._return_to_go - reward
        self._previous = self._steps(
            position=self._position,
            action=self._action,
            reward=reward / self._scaling.reward_scale,
            completion=(self._return_to_go <= 0) & last,
        )
        self._position += 1
        self._timestep += 1

    def _steps(self, position: int, **fields: np.ndarray) -> ChainSteps:
        """One step of every environment, [E, 1]; what is not given is 0."""

        def floats(name: str, *width: int) -> Any:
            values = np.broadcast_to(fields.get(name, np.float32(0)), (self._environments, *width))
            return values.astype(np.float32)[:, None]

        def integers(value: int) -> Any:
            return np.full((self._environments, 1), value, np.int32)

        return ChainSteps(
            return_to_go=floats("return_to_go"),
            observation=floats("observation", self._observation_dim),
            action=floats("action", self._action_dim),
            reward=floats("reward"),
            completion=floats("completion"),
            timestep=integers(self._timestep),
            trajectory=integers(max(self._trial, 0)),
            position=integers(position),
        )
