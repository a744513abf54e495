"""Acting with a trained model: prefill a prompt once, then one call of 4 tokens a step.

Everything a policy has seen, of this trial and of those before it, stays in a key/value cache that is
sharded along the sequence over the ring. The prompt has a cache of its own, of one row, which all
environments read: its size does not depend on how many there are.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_ring.attention.cache import KVCache, cache_specs, empty_cache, first_row, slots_needed
from agentic_ring.attention.cache.storage import CacheDtype
from agentic_ring.data.scaling import Scaling
from agentic_ring.errors import ConfigError
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig, ChainSteps
from agentic_ring.models.layer_by_layer import layer_by_layer, suits
from agentic_ring.models.model import Model, Params


@dataclass(frozen=True)
class ContextBytes:
    """What a policy keeps of its context, in bytes on all devices together.

    Attributes:
      prompt: of the stored trajectories, once for all environments.
      environments: of all environments' own trials, full or not.
    """

    prompt: int
    environments: int

    @classmethod
    def planned(
        cls,
        config: AgenticTransformerConfig,
        num_environments: int,
        decisions: int,
        prompt_steps: int = 0,
        ring: int = 1,
        cache_dtype: CacheDtype | None = None,
    ) -> "ContextBytes":
        """Of a policy that is yet to be made; ``prompt_steps`` with padding, the rest as it takes them."""

        def size(batch: int, slots: int) -> int:
            return _bytes(jax.eval_shape(partial(_empty, config, batch, slots, ring, cache_dtype)))

        prompt = size(1, _prompt_slots(prompt_steps, ring)) if prompt_steps else 0
        return cls(prompt, size(num_environments, _own_slots(decisions, ring)))


class InContextPolicy:
    """Acts in E environments at once and remembers all trials, as ``evals.rollouts.trials.TrialPolicy`` asks.

    Args:
      model, params: the trained model; ``params`` live on ``mesh``.
      mesh: its data and fsdp axes share the environments out.
      scaling: that of the training data.
      target: return that every trial aims at, unscaled.
      num_environments: E, a multiple of the data x fsdp devices.
      decisions: steps of all trials together; the cache is made for as many.
      prompt: [1, S] steps of stored trajectories, before the first trial; S a multiple of the ring.
        It is encoded and kept once for all environments.
      prompt_chunk: steps of the prompt that are encoded at a time, where memory is short; a multiple
        of the ring. None encodes all of them at once.
      cache_dtype: how keys and values are kept; the model's dtype where absent.

    Raises:
      ConfigError: the environments do not divide over the mesh, or the chunk not over the ring.
    """

    def __init__(
        self,
        model: Model[AgenticTransformerConfig],
        params: Params,
        mesh: Mesh,
        scaling: Scaling,
        target: float,
        num_environments: int,
        decisions: int,
        prompt: ChainSteps | None = None,
        prompt_chunk: int | None = None,
        cache_dtype: CacheDtype | None = None,
    ):
        rules = model.config.transformer.rules
        copies = mesh.shape["data"] * mesh.shape["fsdp"]
        if num_environments % copies:
            raise ConfigError(
                f"{num_environments} environments do not divide over data x fsdp = {copies} devices; "
                f"choose a multiple of {copies}"
            )
        if prompt_chunk is not None and (prompt_chunk < 1 or prompt_chunk % mesh.shape["ring"]):
            raise ConfigError(
                f"prompt_chunk {prompt_chunk} is no positive multiple of the ring of {mesh.shape['ring']} "
                "devices; choose one that is"
            )
        # Weights are gathered over the ring once, not again at every step.
        whole = model.param_shardings(mesh, replace(rules, embed=()))
        trained = model.bind(jax.device_put(params, whole))
        # Only its leaves: taking nnx's state apart at every call is a third of the time to start one.
        structure, weights = nnx.split(layer_by_layer(trained) if suits(mesh) else trained)
        self._weights, tree = jax.tree.flatten(weights)

        def bound(weights: list[jax.Array]) -> Any:
            return nnx.merge(structure, jax.tree.unflatten(tree, weights))

        self._mesh = mesh
        self._scaling = scaling
        self._target = target
        self._environments = num_environments
        self._decisions = decisions
        self._prompt_chunk = prompt_chunk
        self._observation_dim = model.config.observation_dim
        self._action_dim = model.config.action_dim

        ring, layers = mesh.shape["ring"], model.config.transformer.layers
        dtype = cache_dtype or model.config.transformer.dtype

        def fresh(batch: int, slots: int) -> KVCache:
            return _empty(model.config, batch, slots, ring, cache_dtype)

        def shardings(rules: ShardingRules) -> KVCache:
            return jax.tree.map(lambda spec: NamedSharding(mesh, spec), cache_specs(rules, dtype, layers))

        def encoder(at_once: bool) -> Any:
            def encode(weights: list[jax.Array], steps: ChainSteps, cache: KVCache) -> KVCache:
                trained = bound(weights)
                return (trained.prefill if at_once else trained.prefill_chunk)(steps, cache)

            return jax.jit(encode, donate_argnames="cache", out_shardings=shardings(rules))

        encoders = {at_once: encoder(at_once) for at_once in (True, False)}
        empty = jax.jit(partial(fresh, copies), static_argnums=0, out_shardings=shardings(rules))
        first = jax.jit(first_row, out_shardings=shardings(replace(rules, batch=())))

        def prefill(chunks: Sequence[ChainSteps], advance: Callable[[int], None]) -> KVCache:
            """The prompt's cache. Every group of devices that shares a batch out encodes one copy."""
            ends = np.cumsum([chunk.position.shape[1] for chunk in chunks]).tolist()
            cache = empty(_prompt_slots(ends[-1], ring))
            encode = encoders[len(chunks) == 1]
            for chunk, end in zip(chunks, ends, strict=True):
                cache = encode(
                    self._weights, jax.tree.map(lambda x: np.repeat(x, copies, axis=0), chunk), cache
                )
                jax.block_until_ready(cache)
                advance(end)
            return first(cache)

        def act(
            weights: list[jax.Array],
            previous: ChainSteps,
            current: ChainSteps,
            cache: KVCache,
            prefix: KVCache | None,
        ) -> tuple[jax.Array, KVCache]:
            return bound(weights).act(previous, current, cache, prefix)

        self._prefill = prefill
        own = partial(fresh, num_environments, _own_slots(decisions, ring))
        self._own_cache = jax.jit(own, out_shardings=shardings(rules))
        self._act = jax.jit(
            act,
            donate_argnames="cache",
            out_shardings=(NamedSharding(mesh, PartitionSpec()), shardings(rules)),
        )
        self.start_over(prompt)

    def start_over(
        self, prompt: ChainSteps | None, advance: Callable[[int], None] = lambda done: None
    ) -> None:
        """Forgets all trials and the prompt, and reads another one.

        Args:
          prompt: as for the constructor.
          advance: called with the number of its steps that have been read, after each chunk.
        """
        self._prompt_end = _End.of(prompt)
        self._prefix = self._cache = None  # freed before new ones are made
        if prompt is not None:
            with jax.set_mesh(self._mesh):
                self._prefix = self._prefill(_chunks(prompt, self._prompt_chunk), advance)
        self._forget_trials()

    def twin(self) -> "InContextPolicy":
        """Another policy with the same weights, programs and prompt, and no trials yet."""
        twin = copy(self)
        twin._forget_trials()
        return twin

    def _forget_trials(self) -> None:
        self._decisions_left = self._decisions
        self._position, self._trial = self._prompt_end
        self._timestep = 0
        self._previous = self._steps(position=-1)
        with jax.set_mesh(self._mesh):
            self._cache = self._own_cache()

    @property
    def context_bytes(self) -> ContextBytes:
        """What the context takes."""
        return ContextBytes(_bytes(self._prefix), _bytes(self._cache))

    def begin_trial(self) -> None:
        """Starts the next trial at the full target; the context stays."""
        self._trial += 1
        self._timestep = 0
        self._return_to_go = np.full(self._environments, self._target)

    def act(self, observation: np.ndarray) -> jax.Array:
        """Actions float32 [E, A] for observations float32 [E, O]; they may still be on their way.

        Raises:
          ConfigError: the cache is full.
        """
        if self._decisions_left == 0:
            raise ConfigError(
                f"the policy was made for {self._decisions} decisions and has taken them all; "
                "make it for more"
            )
        self._decisions_left -= 1
        self._observation = self._scaling.observation(observation)
        current = self._steps(
            position=self._position,
            observation=self._observation,
            return_to_go=self._return_to_go / self._scaling.return_scale,
        )
        with jax.set_mesh(self._mesh):
            self._action, self._cache = self._act(
                self._weights, self._previous, current, self._cache, self._prefix
            )
        return self._action

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Takes the rewards float32 [E] of the actions just given; ``last`` ends the trial."""
        self._return_to_go = self._return_to_go - reward
        self._previous = self._steps(
            position=self._position,
            observation=self._observation,
            action=np.asarray(self._action),
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


class _End(NamedTuple):
    """Where a prompt ends: the next step's position, and the number of its last trajectory."""

    position: int
    trajectory: int

    @classmethod
    def of(cls, prompt: ChainSteps | None) -> "_End":
        if prompt is None:
            return cls(0, -1)
        return cls(int(np.max(prompt.position)) + 1, int(np.max(prompt.trajectory)))


def _chunks(prompt: ChainSteps, size: int | None) -> list[ChainSteps]:
    """The steps [1, S] in pieces of ``size``, the last what is left; all of them where it is None."""
    length = prompt.position.shape[1]
    return [
        jax.tree.map(lambda x, first=first: x[:, first : first + (size or length)], prompt)
        for first in range(0, length, size or length)
    ]


def _empty(
    config: AgenticTransformerConfig, batch: int, slots: int, ring: int, dtype: CacheDtype | None
) -> KVCache:
    stack = config.transformer
    size = (stack.layers, batch, slots, stack.key_value_heads, stack.head_dim)
    return empty_cache(*size, dtype=dtype or stack.dtype, ring=ring)


def _prompt_slots(steps: int, ring: int) -> int:
    return slots_needed(TOKENS_PER_STEP * steps, 0, 0, ring)


def _own_slots(decisions: int, ring: int) -> int:
    return slots_needed(0, decisions, TOKENS_PER_STEP, ring)


def _bytes(cache: KVCache | None) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
