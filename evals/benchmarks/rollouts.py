"""Environment steps per second of a policy with a cached context, and of the environments only.

The context of all environments is a prompt of stored trajectories, encoded and stored once, and the current
trial of each. A step is a control step; the policy makes one decision per action repeat. Weights and prompt
are random: speed does not depend on their values.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from gymnasium.vector import SyncVectorEnv

from agentic_ring.data.scaling import Scaling
from agentic_ring.data.tasks import parse_task
from agentic_ring.errors import ConfigError
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.mesh import make_mesh
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig, ChainSteps
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.timing import Spread, time_interleaved
from agentic_ring.rollouts.environments import shared_environments
from agentic_ring.rollouts.policies import RolloutPlan, context_bytes, with_copies
from agentic_ring.rollouts.trials import Cohort, RandomPolicy, TrialPolicy
from evals.benchmarks.rows import Line

RANDOM, CACHED, AGAIN = "random actions", "cached context", "encoding again"


def rollouts(
    task: str,
    action_repeat: int,
    width: int,
    layers: int,
    environments: int,
    trajectories: Sequence[int],
    decisions: int,
    encode_again_up_to: int,
    rounds: int,
) -> list[Line]:
    """Times rollouts of an Agentic Transformer at several context lengths.

    Args:
      task: task of the environments.
      action_repeat: control steps for which an action is repeated.
      width, layers: sizes of the transformer.
      environments: number of environments that are stepped together.
      trajectories: numbers of trajectories in context, the current trial included.
      decisions: decisions per round.
      encode_again_up_to: largest number of trajectories for which encoding the whole context again, for each
        decision of each environment, is timed too: once per round, for one environment.
      rounds: number of timed rounds.

    Raises:
      ConfigError: the rounds are longer than an episode.
    """
    parsed = parse_task(task)
    length = parsed.domain.decisions(action_repeat)
    if decisions * (rounds + 1) >= length:
        raise ConfigError(
            f"{rounds} rounds and a warm-up of {decisions} decisions are longer than an episode of {length}"
        )
    stack = TransformerConfig(width=width, layers=layers, heads=2, ffn_width=2 * width, remat="attention")
    observed, acted = parsed.domain.observation_dim, parsed.domain.action_dim
    model = Model(AgenticTransformerConfig(stack, observed, acted, length))
    params = jax.jit(model.init_params)(jax.random.key(0))
    lines = []
    for count in trajectories:
        stored = (count - 1) * length
        prompt = _random_steps(model.config, stored) if stored else None
        plan = RolloutPlan.choose(make_mesh(), environments, stored * TOKENS_PER_STEP)
        scaling, share = Scaling((0.0,) * observed, (1.0,) * observed, 1, 1), environments // plan.policies
        policy = InContextPolicy(model, params, plan.mesh, scaling, 0.0, share, length, prompt)
        contenders: dict[str, Sequence[TrialPolicy]] = {
            RANDOM: [RandomPolicy(environments, acted, 0)],
            CACHED: with_copies(policy, plan.policies),
        }
        parts = [
            shared_environments(parsed, 0, environments, len(policies), action_repeat)
            for policies in contenders.values()
        ]
        functions = [_stepper(*pair, decisions) for pair in zip(contenders.values(), parts, strict=True)]
        if count <= encode_again_up_to:
            functions.append(_encoder(model, params, stored + length))
        times = dict(zip((RANDOM, CACHED, AGAIN), time_interleaved(rounds, *functions), strict=False))
        for environment in (each for part in parts for each in part):
            environment.close()
        if AGAIN in times:  # one encoding per decision and environment, besides stepping the environments
            pairs = zip(times[AGAIN], times[RANDOM], strict=True)
            times[AGAIN] = [decisions * environments * again + stepping for again, stepping in pairs]
        size = context_bytes(contenders[CACHED])
        details = {"tokens": count * length * TOKENS_PER_STEP, "policies": plan.policies, **vars(size)}
        steps = decisions * environments * action_repeat
        for name, seconds in times.items():
            ratios = {x: Spread.ratio(seconds, times[x]) for x in (RANDOM, CACHED) if x != name}
            rate = Spread.of(steps / x for x in seconds)
            lines.append(Line(f"{count} trajectories", name, rate, "steps/s", ratios, details))
    return lines


def _random_steps(config: AgenticTransformerConfig, length: int) -> ChainSteps:
    """Random steps [1, length] in place of stored trajectories."""
    random = np.random.default_rng(0)

    def floats(*size: int) -> Any:
        return random.normal(size=(1, length, *size)).astype(np.float32)

    place: Any = np.arange(length, dtype=np.int32)[None]
    return ChainSteps(
        return_to_go=floats(),
        observation=floats(config.observation_dim),
        action=np.tanh(floats(config.action_dim)),
        reward=floats(),
        completion=0 * floats(),
        timestep=place % config.max_timestep,
        trajectory=place // config.max_timestep,
        position=place,
    )


def _stepper(
    policies: Sequence[TrialPolicy], environments: Sequence[SyncVectorEnv], decisions: int
) -> Callable[[], np.ndarray]:
    """A function that executes the decisions of a round and returns the last rewards."""
    cohorts = [Cohort(*pair) for pair in zip(policies, environments, strict=True)]
    for cohort in cohorts:
        cohort.begin(trial=0)

    def steps() -> np.ndarray:
        rewards = np.zeros(0)
        for _ in range(decisions):
            rewards = np.concatenate([cohort.step()[0] for cohort in cohorts])
        return rewards

    return steps


def _encoder(model: Model[AgenticTransformerConfig], params: Any, length: int) -> Callable[[], jax.Array]:
    """A function that computes one action by encoding a context of ``length`` steps without a cache."""

    def action(params: Any, steps: ChainSteps) -> jax.Array:
        return model.bind(params)(steps, layout="contiguous")[0, -1]

    return partial(jax.jit(action), params, _random_steps(model.config, length))
