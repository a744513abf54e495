"""The policy of the Agentic Transformer: one call per chosen action, on a key/value cache.

All steps that the policy has seen, of this trial and of earlier ones, stay in a cache that is sharded along
the sequence over the ring, and grows with them. A prompt has a cache of its own, which is only read: of one
row if all environments share the prompt, so that its size does not depend on their number.
"""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.attention.cache import grown, slots_needed
from agentic_ring.attention.cache.kv_cache import SLOTS_UNIT, CacheDtype
from agentic_ring.data.store import Scaling
from agentic_ring.errors import ConfigError
from agentic_ring.inference.cached_model import array_bytes, new_cache, program
from agentic_ring.inference.cached_policy import CachedPolicy, ContextPrograms, draw_action
from agentic_ring.inference.sampling import Sampling
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig, ChainSteps
from agentic_ring.models.model import Model, Params


@dataclass(frozen=True)
class ContextBytes:
    """Memory of a policy's context, in bytes, summed over all devices."""

    prompt: int
    """Cache of the stored trajectories."""
    environments: int
    """Caches of the environments' own trials."""

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
        """Memory of a policy that has not been created, once it has taken all decisions.

        ``prompt_steps`` are those of a prompt that all environments share, padding included.
        """

        def size(batch: int, slots: int) -> int:
            fresh = partial(new_cache, config.transformer, batch, slots, ring, cache_dtype)
            return array_bytes(jax.eval_shape(fresh))

        tokens = config.tokens_per_step
        prompt = size(1, slots_needed(tokens * prompt_steps, 0, 0, ring)) if prompt_steps else 0
        return cls(prompt, size(num_environments, slots_needed(0, decisions, tokens, ring)))


@dataclass(frozen=True)
class _Programs(ContextPrograms):
    """The compiled functions of a policy."""

    @program(())
    def act(self, weights, previous, current, cache, prefix, sampling, environments, decision):
        """Returns the actions [E, A] and the cache; ``environments`` [E] and ``decision`` are numbers."""
        mixture, cache = self.bind(weights).act(previous, current, cache, prefix)
        return draw_action(mixture, sampling, environments, decision), cache


class InContextPolicy(CachedPolicy[_Programs]):
    """Acts in E environments at once with all trials in context, as a ``rollouts.trials.TrialPolicy``.

    Args:
      model, params: the trained model; ``params`` live on ``mesh``.
      mesh: the model's sharding rules say which axes divide the environments, and which their steps.
      scaling: scaling of the training data.
      target: return at which every trial aims, unscaled. With None, returns-to-go and completion bits are 0,
        as in chains of hidden tasks: only rewards tell how good a trial is.
      num_environments: E, a multiple of the data x fsdp devices.
      decisions: steps of all trials together; sets the largest size of the cache.
      prompt: steps of stored trajectories before the first trial: [1, S], encoded and stored once for all
        environments, or [E, S], a prompt for each of them, all equally long. Padding may come last.
      prompt_chunk: steps of the prompt to encode at a time, to limit memory; a multiple of the ring.
        None encodes all of them at once.
      cache_dtype: storage dtype of keys and values; None uses the model's dtype.
      sampling: how the component of the action's mixture is drawn; at temperature 0 it is the likeliest. A
        draw is a function of the seed, the environment's number and the number of the decision since the
        policy was made: it does not depend on the mesh, or on which policies share the environments.
      hold: steps for which an action is held. All of them stand in the context; those of one action are
        encoded together, when the next one is chosen.

    Raises:
      ConfigError: the environments do not divide over the mesh, the chunk does not divide over the ring, or
        as in ``start_over``.
    """

    def __init__(
        self,
        model: Model[AgenticTransformerConfig],
        params: Params,
        mesh: Mesh,
        scaling: Scaling,
        target: float | None,
        num_environments: int,
        decisions: int,
        prompt: ChainSteps | None = None,
        prompt_chunk: int | None = None,
        cache_dtype: CacheDtype | None = None,
        sampling: Sampling = Sampling(),
        hold: int = 1,
    ):
        self._target, self._decisions, self._hold = target, decisions, hold
        super().__init__(
            _Programs, model, params, mesh, scaling, num_environments, prompt_chunk, cache_dtype, sampling
        )
        self.start_over(prompt)

    def discard_trials(self) -> None:
        """Discards all trials; the prompt stays."""
        self._decisions_left = self._decisions
        self._position, self._trial = self._prompt_end
        self._timestep = 0
        self._previous = [self._steps(position=-1)] * self._hold
        with jax.set_mesh(self._programs.mesh):
            self._cache = self._programs.placed_cache(self.num_environments, self._slots(1))

    def _slots(self, steps: int) -> int:
        """Slots of the environments' cache up to this number of steps; later ones may need a larger cache.

        A call reads all slots, so a cache that grows with the context takes half the time. Each size is
        compiled once; they grow by half, so that there are few.
        """
        ring, tokens = self._programs.ring, self._config.tokens_per_step
        unit = SLOTS_UNIT // tokens
        size = unit
        while size * ring < steps:
            size += -(-size // (2 * unit)) * unit
        calls = -(-min(size * ring, self._decisions) // self._hold)
        return slots_needed(0, calls, tokens * self._hold, ring)

    @property
    def context_bytes(self) -> ContextBytes:
        """Memory that the context takes now; the environments' part grows up to what is planned."""
        return ContextBytes(array_bytes(self._prefix), array_bytes(self._cache))

    @property
    def last_step(self) -> ChainSteps:
        """The last step that received its rewards, [E, 1], as the context holds it."""
        return self._previous[-1]

    def begin_trial(self) -> None:
        """Starts the next trial with the full target as return-to-go; the context stays.

        Raises:
          ConfigError: the last trial ended while an action was held.
        """
        if self._timestep % self._hold:
            raise ConfigError(
                f"the last trial had {self._timestep} steps, and actions are held for {self._hold}; "
                f"expected trials of a multiple of {self._hold} steps"
            )
        self._trial += 1
        self._timestep = 0
        self._return_to_go = np.full(self.num_environments, self._target or 0.0)

    def act(self, observation: np.ndarray) -> jax.Array:
        """Returns actions float32 [E, A] for observations float32 [E, O], dispatched asynchronously.

        Raises:
          ConfigError: the cache is full.
        """
        if self._decisions_left == 0:
            raise ConfigError(
                f"the policy was made for {self._decisions} decisions and has taken all of them; "
                "create it with a larger number of decisions"
            )
        self._decisions_left -= 1
        self._observation = self._scaling.observation(observation)
        if self._timestep % self._hold == 0:
            self._action = self._choose()
        self._decision += 1
        return self._action

    def _choose(self) -> jax.Array:
        """Encodes the steps of the last action and the current state, and draws the next action."""
        current = self._steps(
            position=self._position,
            observation=self._observation,
            return_to_go=self._return_to_go / self._scaling.return_scale,
        )
        with jax.set_mesh(self._programs.mesh):
            programs, slots = self._programs, self._slots(self._decisions - self._decisions_left)
            if self._cache.positions.shape[1] < slots:
                self._cache = grown(self._cache, slots, programs.ring)
            steps = ChainSteps.joined(self._previous), current
            draw = self._sampling, self._numbers, np.int32(self._decision)
            action, self._cache = programs.act(programs.weights, *steps, self._cache, self._prefix, *draw)
        return action

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Records the rewards float32 [E] of the last actions; ``last`` ends the trial."""
        aimed, left = self._target is not None, self._return_to_go
        if aimed:
            self._return_to_go = left - reward
        step = self._steps(
            position=self._position,
            observation=self._observation,
            action=np.asarray(self._action),
            reward=reward / self._scaling.reward_scale,
            return_to_go=left / self._scaling.return_scale,
            completion=(self._return_to_go <= 0) & (last and aimed),
        )
        # Those of the action before stand in the cache since this one was chosen.
        self._previous = [step] if self._timestep % self._hold == 0 else [*self._previous, step]
        self._position += 1
        self._timestep += 1

    def _steps(self, position: int, **known: np.ndarray) -> ChainSteps:
        """One step of every environment, [E, 1]; fields that are not given are 0."""
        places = {"timestep": self._timestep, "trajectory": max(self._trial, 0), "position": position}
        return self.new_steps(1, **places, **{name: value[:, None] for name, value in known.items()})
