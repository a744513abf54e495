"""Environment steps per second of a policy with a cached context, and of the environments only.

The context of all environments is a prompt of stored trajectories, encoded and stored once, and the current
trial of each. A step is a control step; the policy makes one decision per action repeat. Weights are
random and the prompt is zeros: speed does not depend on their values.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from gymnasium.vector import SyncVectorEnv

from agentic_ring.data.domains import parse_task
from agentic_ring.data.gymnasium_environments import shared_environments
from agentic_ring.data.store import Scaling
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.mesh import make_mesh
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig, ChainSteps
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.timing import Spread, time_interleaved
from agentic_ring.rollouts.policies import RolloutPlan, context_bytes, with_copies
from agentic_ring.rollouts.trials import Cohort, RandomPolicy, TrialPolicy
from evals.benchmarks.rows import Line

RANDOM, CACHED = "random actions", "cached context"


def rollouts(
    task: str,
    action_repeat: int,
    width: int,
    layers: int,
    environments: int,
    trajectories: Sequence[int],
    decisions: int,
    rounds: int,
) -> list[Line]:
    """Times rollouts of an Agentic Transformer, with ``decisions`` per round, at several context lengths.

    ``trajectories`` are numbers of those in context, the current trial included. The rounds and a warm-up
    must be shorter than an episode.
    """
    parsed = parse_task(task)
    length = parsed.domain.decisions(action_repeat)
    stack = TransformerConfig(width=width, layers=layers, heads=2, ffn_width=2 * width, remat="attention")
    observed, acted = parsed.domain.observation_dim, parsed.domain.action_dim
    model = Model(AgenticTransformerConfig(stack, observed, acted, length))
    params = jax.jit(model.init_params)(jax.random.key(0))
    lines = []
    for count in trajectories:
        stored = (count - 1) * length
        prompt = _steps_of_zeros(model.config, stored) if stored else None
        plan = RolloutPlan.choose(make_mesh(), environments, stored * TOKENS_PER_STEP)
        scaling, share = Scaling((0.0,) * observed, (1.0,) * observed, 1, 1), environments // plan.policies
        policy = InContextPolicy(model, params, plan.mesh, scaling, 0.0, share, length, prompt)
        cached = with_copies(policy, plan.policies)
        contenders: list[Sequence[TrialPolicy]] = [[RandomPolicy(environments, acted, 0)], cached]
        parts = [
            shared_environments(parsed, 0, environments, len(each), action_repeat) for each in contenders
        ]
        functions = [_stepper(*pair, decisions) for pair in zip(contenders, parts, strict=True)]
        times = dict(zip((RANDOM, CACHED), time_interleaved(rounds, *functions), strict=True))
        for environment in (each for part in parts for each in part):
            environment.close()
        size = context_bytes(cached)
        details = {"tokens": count * length * TOKENS_PER_STEP, "policies": plan.policies, **vars(size)}
        steps = decisions * environments * action_repeat
        for name, seconds in times.items():
            ratios = {x: Spread.ratio(seconds, times[x]) for x in (RANDOM,) if x != name}
            rate = Spread.of(steps / x for x in seconds)
            lines.append(Line(f"{count} trajectories", name, rate, "steps/s", ratios, details))
    return lines


def _steps_of_zeros(config: AgenticTransformerConfig, length: int) -> ChainSteps:
    """Steps [1, length] in place of stored trajectories."""
    zeros: Any = np.zeros((1, length), np.float32)
    place: Any = np.arange(length, dtype=np.int32)[None]
    sizes = (config.observation_dim, config.action_dim)
    observation, action = (zeros[..., None].repeat(size, axis=-1) for size in sizes)
    timestep, trajectory = place % config.max_timestep, place // config.max_timestep
    return ChainSteps(zeros, observation, action, zeros, zeros, timestep, trajectory, place)


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
