"""Base of the policies that act with an Agentic Transformer on key/value caches.

The steps of a prompt stand in a cache that is only read, those of the environments' own trials in another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike

from agentic_ring.attention.cache import KVCache, first_row, slots_needed
from agentic_ring.attention.cache.kv_cache import CacheDtype
from agentic_ring.data.store import Scaling
from agentic_ring.errors import ConfigError
from agentic_ring.inference.cached_model import CachedModel, program
from agentic_ring.inference.sampling import Sampling, SamplingValues, sample_next_token
from agentic_ring.mesh import batch_shards, devices_along
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig, ChainSteps
from agentic_ring.models.model import Model, Params


@dataclass(frozen=True)
class ContextPrograms(CachedModel):
    """The compiled functions that store steps."""

    @program()
    def encode(self, weights: list[jax.Array], steps: ChainSteps, cache: KVCache) -> KVCache:
        """Stores a whole prompt."""
        return self.bind(weights).prefill(steps, cache)

    @program()
    def encode_chunk(
        self, weights: list[jax.Array], steps: ChainSteps, cache: KVCache, prefix: KVCache | None = None
    ) -> KVCache:
        """Stores the next chunk of a prompt, or of what comes after the prompt in ``prefix``."""
        return self.bind(weights).prefill_chunk(steps, cache, prefix)

    @cached_property
    def _first_row(self) -> Any:
        return jax.jit(first_row, out_shardings=self.cache_shardings(replace(self.rules, batch=())))

    def prefill(self, chunks: Sequence[ChainSteps], advance: Callable[[int], None]) -> KVCache:
        """The cache of a prompt [B, S]."""
        rows = chunks[0].position.shape[0]
        copies = self.copies if rows == 1 else 1  # one for every group of devices that shares a batch out
        ends = np.cumsum([chunk.position.shape[1] for chunk in chunks]).tolist()
        slots = slots_needed(self.module.config.tokens_per_step * ends[-1], 0, 0, self.ring)
        cache = self.placed_cache(copies * rows, slots)
        encode = self.encode if len(chunks) == 1 else self.encode_chunk
        for chunk, end in zip(chunks, ends, strict=True):
            cache = encode(self.weights, jax.tree.map(lambda x: np.repeat(x, copies, axis=0), chunk), cache)
            jax.block_until_ready(cache)
            advance(end)
        return self._first_row(cache) if rows == 1 else cache


Programs = TypeVar("Programs", bound=ContextPrograms)


class CachedPolicy(ABC, Generic[Programs]):
    """A policy of E environments with a prompt; subclasses act, and call ``start_over`` when they are made.

    Args:
      programs: class of the compiled functions.
      model, params, mesh, scaling, num_environments, prompt_chunk, cache_dtype, sampling: see
        ``InContextPolicy``.

    Raises:
      ConfigError: the environments do not divide over the mesh, or the chunk does not divide over the ring.
    """

    def __init__(
        self,
        programs: type[Programs],
        model: Model[AgenticTransformerConfig],
        params: Params,
        mesh: Mesh,
        scaling: Scaling,
        num_environments: int,
        prompt_chunk: int | None,
        cache_dtype: CacheDtype | None,
        sampling: Sampling,
    ):
        rules = model.config.transformer.rules
        copies, ring = batch_shards(mesh, rules), devices_along(mesh, rules.sequence)
        if num_environments % copies:
            raise ConfigError(
                f"{num_environments} environments do not divide over {' x '.join(rules.batch)} = {copies} "
                f"devices; choose a multiple of {copies}"
            )
        if prompt_chunk is not None and (prompt_chunk < 1 or prompt_chunk % ring):
            raise ConfigError(
                f"prompt_chunk {prompt_chunk} is not a positive multiple of the ring of {ring} devices; "
                "choose one that is"
            )
        # Gathers the weights over the ring once instead of at every step.
        whole = model.param_shardings(mesh, replace(rules, embed=()))
        self._programs = programs(model.bind(jax.device_put(params, whole)), mesh, cache_dtype)
        self._config, self._scaling = model.config, scaling
        self.num_environments, self._prompt_chunk = num_environments, prompt_chunk
        self._sampling = jax.device_put(sampling.values, NamedSharding(mesh, PartitionSpec()))
        self._number_environments(0)
        self._decision = 0

    @abstractmethod
    def discard_trials(self) -> None:
        """Discards all trials; the prompt stays."""

    def start_over(
        self, prompt: ChainSteps | None, advance: Callable[[int], None] = lambda done: None
    ) -> None:
        """Discards all trials and the prompt, and encodes another prompt, which is as for the constructor.

        ``advance`` is called after each chunk with the number of prompt steps encoded so far.

        Raises:
          ConfigError: the prompt has neither 1 nor E rows, or its rows differ in length.
        """
        # Freed before new ones are made.
        self._prefix: KVCache | None = None
        self._cache: Any = None
        # Position of the next step, and index of the last trajectory.
        self._prompt_end = (0, -1)
        if prompt is not None:
            rows = (np.asarray(prompt.position) >= 0).sum(axis=1).tolist()
            if len(rows) not in (1, self.num_environments) or np.ptp(prompt.position, axis=0).any():
                raise ConfigError(
                    f"the prompt has {len(rows)} rows of {rows} steps; expected one row, or "
                    f"{self.num_environments} of the same length, one per environment"
                )
            self._prompt_end = int(np.max(prompt.position)) + 1, int(np.max(prompt.trajectory))
            chunks = chunked(prompt, self._prompt_chunk, self._programs.ring)
            with jax.set_mesh(self._programs.mesh):
                self._prefix = self._programs.prefill(chunks, advance)
        self.discard_trials()

    def fresh_copy(self, first_environment: int = 0) -> Self:
        """Another policy with the same weights, compiled functions and prompt, and without trials.

        ``first_environment`` is the number of its first one, if several policies share the environments.
        """
        other = copy(self)
        other._decision = 0
        other._number_environments(first_environment)
        other.discard_trials()
        return other

    def _number_environments(self, first: int) -> None:
        numbers = np.arange(first, first + self.num_environments, dtype=np.int32)
        self._numbers = jax.device_put(numbers, NamedSharding(self._programs.mesh, PartitionSpec()))

    def new_steps(self, length: int, **values: ArrayLike) -> ChainSteps:
        """Steps [E, length] with these values, which broadcast to their fields; other fields are 0."""
        widths = {"observation": (self._config.observation_dim,), "action": (self._config.action_dim,)}

        def field_values(name: str) -> Any:
            shape = (self.num_environments, length, *widths.get(name, ()))
            dtype = np.int32 if name in ("timestep", "trajectory", "position") else np.float32
            return np.broadcast_to(values.get(name, 0), shape).astype(dtype)

        names = [x.name for x in fields(ChainSteps) if x.default is MISSING or x.name in values]
        return ChainSteps(**{name: field_values(name) for name in names})


def draw_action(
    mixture: tuple[jax.Array, jax.Array],
    sampling: SamplingValues,
    environments: jax.Array,
    decision: jax.Array,
) -> jax.Array:
    """Draws one of the actions [E, K, A] by the log probabilities [E, K]; returns [E, A].

    The draw is a function of the seed, the numbers of the environments [E] and that of the decision.
    """
    actions, log_probs = mixture
    component, _ = sample_next_token(log_probs, sampling, environments, decision)
    return jnp.take_along_axis(actions, component[:, None, None], axis=1)[:, 0]


def chunked(prompt: ChainSteps, size: int | None, ring: int) -> list[ChainSteps]:
    """Splits the steps [B, S], padded to a multiple of the ring, into chunks of ``size``; None makes one."""
    missing = -prompt.position.shape[1] % ring

    def pad(x: jax.Array, value: int) -> Any:
        return np.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)], constant_values=value)

    padded = replace(jax.tree.map(lambda x: pad(x, 0), prompt), position=pad(prompt.position, -1))
    length = padded.position.shape[1]
    parts = (slice(first, first + (size or length)) for first in range(0, length, size or length))
    return [jax.tree.map(lambda x, part=part: x[:, part], padded) for part in parts]
