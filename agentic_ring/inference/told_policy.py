"""The policy of an Agentic Transformer of single tokens: stored trajectories tell it the task.

Its context is the known steps of the prompt and of the trials that have ended. A decision reads them and
stores nothing, so all decisions of a trial have the same context and the same position:

    context       position of the decisions
    prompt        S             trial 0; its known steps are then stored at S to S + spans - 1
    and trial 0   S + spans     trial 1
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.attention.cache import slots_needed
from agentic_ring.attention.cache.kv_cache import CacheDtype
from agentic_ring.data.spans import Shown, span_edges, span_fields
from agentic_ring.data.store import Scaling
from agentic_ring.data.told_chains import AS_IT_IS, RewardScale, ToldChainConfig
from agentic_ring.errors import ConfigError
from agentic_ring.inference.cached_model import program
from agentic_ring.inference.cached_policy import CachedPolicy, ContextPrograms, chunked, draw_action
from agentic_ring.inference.sampling import Sampling
from agentic_ring.mesh import devices_along
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig, ChainSteps
from agentic_ring.models.model import Model, Params

PROMPT_CHUNK = 8192
"""Known steps of a prompt to encode at a time, at most; rounded up to a multiple of the ring."""
TEMPERATURE = 0.4
"""Of the draw of actions: unlikely ones are mistakes, or another behaviour's. At 1 the maze is worse (0.43 of
an oracle's return for 0.54), and so is cheetah; the likeliest alone are worse as well."""


@dataclass(frozen=True)
class _Programs(ContextPrograms):
    """The compiled functions of a policy."""

    @program(())
    def decide(self, weights, steps, cache, prefix, sampling, environments, decision):
        """Returns the actions [E, A] and the cache as it was; arguments as those of ``draw_action``."""
        mixture = self.bind(weights).decide(steps, cache, prefix)
        return draw_action(mixture, sampling, environments, decision), cache


class ToldPolicy(CachedPolicy[_Programs]):
    """A ``rollouts.trials.TrialPolicy`` of E environments with a prompt and all earlier trials in context.

    Args:
      model, params, mesh, scaling, num_environments, sampling, cache_dtype: see ``InContextPolicy``.
      trials: largest number of trials; sets the size of the cache.
      decisions: number of decisions of a trial.
      spans: number of known steps that a trial becomes at its end (``data.spans``).
      prompt: known steps of stored trajectories: [1, S], encoded and stored once for all environments, or
        [E, S], a prompt for each of them, all equally long. Padding may come last.
      reward_scale: how rewards of trials are told, in common or for each environment, [E]; those of the
        prompt are scaled already.
      shown: choice of the decision that a known step of a trial shows, see ``data.spans``.

    Attributes:
      reward_scale: as given; one that fits another prompt may replace it.

    Raises:
      ConfigError: the model has no single tokens, the spans fit neither the decisions nor its table of
        timesteps, the environments do not divide over the mesh, or as in ``start_over``.
    """

    def __init__(
        self,
        model: Model[AgenticTransformerConfig],
        params: Params,
        mesh: Mesh,
        scaling: Scaling,
        num_environments: int,
        trials: int,
        decisions: int,
        spans: int,
        prompt: ChainSteps | None = None,
        sampling: Sampling = Sampling(),
        cache_dtype: CacheDtype | None = None,
        reward_scale: RewardScale = AS_IT_IS,
        shown: Shown = "middle",
    ):
        if not model.config.single_tokens:
            raise ConfigError(
                "the model has no single_tokens; take InContextPolicy, or a model that has them"
            )
        span_edges(decisions, spans)
        if spans > model.config.max_timestep:
            raise ConfigError(
                f"spans is {spans}, but the model was made for trajectories of at most "
                f"{model.config.max_timestep} (max_timestep); choose the number of its training"
            )
        self._trials, self._decisions, self._spans = trials, decisions, spans
        self.reward_scale = reward_scale
        self._shown: Shown = shown
        chunk = PROMPT_CHUNK + -PROMPT_CHUNK % devices_along(mesh, model.config.transformer.rules.sequence)
        super().__init__(
            _Programs, model, params, mesh, scaling, num_environments, chunk, cache_dtype, sampling
        )
        self.start_over(prompt)

    def start_over(
        self, prompt: ChainSteps | None, advance: Callable[[int], None] = lambda done: None
    ) -> None:
        """As ``CachedPolicy.start_over``; a ConfigError too if the prompt has decisions."""
        if prompt is not None and (np.asarray(prompt.trajectory) < 0).any():
            raise ConfigError("the prompt has decisions, which no step may attend to; leave only known steps")
        super().start_over(prompt, advance)

    def discard_trials(self) -> None:
        """Discards all trials; the prompt stays."""
        self._position, self._trajectory = self._prompt_end
        self._trials_left = self._trials
        ring = self._programs.ring
        slots = slots_needed(self._trials * -(-self._spans // ring) * ring, 0, 0, ring)
        with jax.set_mesh(self._programs.mesh):
            self._cache = self._programs.placed_cache(self.num_environments, slots)

    def begin_trial(self) -> None:
        """Starts the next trial; the context stays.

        Raises:
          ConfigError: the cache is full.
        """
        if self._trials_left == 0:
            raise ConfigError(
                f"the policy was made for {self._trials} trials and all of them have begun; create it with a "
                "larger number of trials"
            )
        self._trials_left -= 1
        self._observations: list[np.ndarray] = []
        self._actions: list[jax.Array] = []
        self._rewards: list[np.ndarray] = []

    def act(self, observation: np.ndarray) -> jax.Array:
        """Returns actions float32 [E, A] for observations float32 [E, O], dispatched asynchronously."""
        self._observations.append(self._scaling.observation(observation))
        steps = self.new_steps(
            1,
            observation=self._observations[-1][:, None],
            trajectory=-1,
            position=self._position,
            span_reward=0.0,
        )
        programs, draw = self._programs, (self._sampling, self._numbers, np.int32(self._decision))
        with jax.set_mesh(programs.mesh):
            action, self._cache = programs.decide(programs.weights, steps, self._cache, self._prefix, *draw)
        self._decision += 1
        self._actions.append(action)
        return action

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Records the rewards float32 [E] of the last actions; ``last`` ends the trial and stores it.

        Raises:
          ConfigError: the trial ended after another number of decisions than the policy was made for.
        """
        self._rewards.append(self.reward_scale(reward / self._scaling.reward_scale))
        if not last:
            return
        if len(self._rewards) != self._decisions:
            raise ConfigError(
                f"the trial had {len(self._rewards)} decisions, but the policy was made for trials of "
                f"{self._decisions}; create it with their number"
            )
        seen, acted, earned = (
            np.stack(x, axis=1) for x in (self._observations, self._actions, self._rewards)
        )
        self._trajectory += 1
        steps = self.new_steps(
            self._spans,
            **span_fields(seen, acted, earned, self._spans, self._shown),
            trajectory=self._trajectory,
            position=self._position + np.arange(self._spans),
        )
        self._position += self._spans
        programs = self._programs
        (padded,) = chunked(steps, None, programs.ring)
        with jax.set_mesh(programs.mesh):
            self._cache = programs.encode_chunk(programs.weights, padded, self._cache, self._prefix)


def told_prompt(
    chains: ToldChainConfig, observation: np.ndarray, action: np.ndarray, rewards: np.ndarray
) -> ChainSteps:
    """The known steps [E, n x spans] of n whole trajectories for each of E environments, as in ``chains``.

    Args:
      observation, action: [E, n, D, O], normalised, and [E, n, D, A], of all D decisions.
      rewards: float32 [E, n, D], those of each decision, as they are told.
    """
    spans = chains.spans
    known = span_fields(observation, action, rewards, spans, chains.shown)
    shape = len(rewards), rewards.shape[1] * spans
    numbers, nothing = np.arange(shape[1], dtype=np.int32), np.zeros(shape, np.float32)
    steps: dict[str, Any] = {
        name: values.reshape(*shape, *values.shape[3:]) for name, values in known.items()
    }
    steps |= {"return_to_go": nothing, "completion": nothing}
    steps["trajectory"], steps["position"] = (np.broadcast_to(x, shape) for x in (numbers // spans, numbers))
    return ChainSteps(**steps)
