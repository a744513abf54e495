"""Policies of a trained Agentic Transformer: devices, prompt, and number of policies.

Two policies that act alternately overlap: one computes while the environments of the other are stepped. On
a CPU both need the same cores:

    short context    two policies on all cores but one; that core steps the environments
    long prompt      one policy on all cores, with a shard of the prompt on each: attention to the prompt
                     takes far longer than the environments do, and more rows read the prompt at once
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.chain_loader import ChainLoader
from agentic_ring.data.hindsight_chains import ChainPlan, StratifiedSampler
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.errors import ConfigError
from agentic_ring.inference.in_context_policy import ContextBytes, InContextPolicy
from agentic_ring.mesh import MeshShape, make_mesh, without_stages
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, ChainSteps
from agentic_ring.models.model import Model, Params
from agentic_ring.provenance import usable_cores
from agentic_ring.rollouts.trials import PolicyWrapper
from agentic_ring.run import RunConfig
from agentic_ring.terminal.progress import progress

LONG_PROMPT = 8192
"""Prompts of more tokens than this occupy all cores. Two policies, and one policy on both of 2 cores, took 17
and 22 ms per decision after a prompt of 3,000 tokens, and 73 and 48 ms after 31,000 (walker, the demo)."""


@dataclass(frozen=True)
class RolloutPlan:
    """Mesh of each policy of a rollout, and number of policies, which share the environments equally."""

    mesh: Mesh
    policies: int

    @classmethod
    def choose(cls, mesh: Mesh, environments: int, prompt_tokens: int) -> "RolloutPlan":
        """The plan for ``mesh``, or for a part of it where a CPU simulates the devices.

        More simulated devices than cores would run alternately and wait for each other twice per layer.
        """
        if jax.process_count() > 1 or mesh.devices.flat[0].platform != "cpu":
            mesh = without_stages(mesh)
            copies = mesh.shape["data"] * mesh.shape["fsdp"]
            return cls(mesh, 2 if environments % (2 * copies) == 0 else 1)
        devices = list(mesh.devices.flat)[: usable_cores()]
        if prompt_tokens > LONG_PROMPT:
            return cls(make_mesh(MeshShape(ring=len(devices)), devices), 1)
        policies = 1 if environments % 2 else 2
        share = environments // policies
        copies = max(n for n in range(1, max(2, len(devices))) if share % n == 0)
        return cls(make_mesh(MeshShape(data=copies, ring=1), devices[:copies]), policies)


def rollout_plan(config: RunConfig, mesh: Mesh) -> RolloutPlan:
    """The plan for a run that was trained on ``mesh``."""
    tokens = config.evaluation.prompt_trajectories * config.decisions * TOKENS_PER_STEP
    return RolloutPlan.choose(mesh, config.evaluation.environments, tokens)


def in_context_policies(
    config: RunConfig, model: Model, params: Params, mesh: Mesh, prompt_chunk: int | None = None
) -> list[InContextPolicy]:
    """Policies of a run that share the environments; their prompt is prefilled.

    ``mesh`` is the one it was trained on; for ``prompt_chunk`` see ``InContextPolicy``.
    """
    evaluation, plan = config.evaluation, rollout_plan(config, mesh)
    policy = InContextPolicy(
        model,
        params,
        plan.mesh,
        config.scaling,
        config.target,
        evaluation.environments // plan.policies,
        config.decisions * evaluation.trials,
        prompt_chunk=prompt_chunk,
    )
    if evaluation.prompt_trajectories:
        with TrajectoryStore.open(config.store) as store:
            prompt = read_prompt(store, config, plan.mesh.shape["ring"])
        with progress("reading the prompt, decisions", prompt.position.shape[1]) as advance:
            policy.start_over(prompt, lambda done: advance(done, ""))
    return with_copies(policy, plan.policies)


def with_copies(policy: InContextPolicy, count: int) -> list[InContextPolicy]:
    """``count`` policies: this one and copies that share its prompt; their environments are numbered on."""
    return [policy, *(policy.fresh_copy(number * policy.num_environments) for number in range(1, count))]


class TrialWindowPolicy(PolicyWrapper[InContextPolicy]):
    """Acts as ``policy`` does with exactly the last ``trials`` trials in context, the current one included.

    With a window of 1 every trial begins with the prompt of ``policy`` only, or without context. A cache
    whose oldest entries are dropped does not do: in the upper layers, a kept entry was computed from the
    dropped ones. Here the kept trials are encoded again at the beginning of each trial, from position 0:

        n = 3    trial 0   trial 1   trial 2   trial 3   trial 4
        context  0         0 1       0 1 2       1 2 3       2 3 4      the last one is the current trial
        encoded  -         -         -           1 2         2 3        the others are in the cache

    ``policy`` holds the decisions of ``trials`` trials, and has a prompt at most with a window of 1.

    Raises:
      ConfigError: ``trials`` is below 1.
    """

    def __init__(self, policy: InContextPolicy, trials: int):
        if trials < 1:
            raise ConfigError(f"the window has {trials} trials; it must hold at least the current one")
        super().__init__(policy)
        self._earlier: deque[list[ChainSteps]] = deque(maxlen=trials - 1)
        self._current: list[ChainSteps] = []
        self._trials = trials
        self._begun = 0

    def begin_trial(self) -> None:
        if self._trials == 1:
            self._policy.discard_trials()
        elif self._begun >= self._trials:
            self._policy.start_over(as_prompt(self._earlier))
        self._begun += 1
        super().begin_trial()

    def receive(self, reward: np.ndarray, last: bool) -> None:
        super().receive(reward, last)
        self._current.append(self._policy.last_step)
        if last:
            self._earlier.append(self._current)
            self._current = []


def as_prompt(trials: Sequence[list[ChainSteps]]) -> ChainSteps:
    """The steps of trials as one prompt [E, S], counted from 0."""
    joined = ChainSteps.joined([step for trial in trials for step in trial])
    shape = joined.position.shape
    numbers = np.repeat(np.arange(len(trials), dtype=np.int32), [len(trial) for trial in trials])
    return replace(
        joined,
        position=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        trajectory=np.broadcast_to(numbers, shape),
    )


def without_context(policies: Sequence[InContextPolicy]) -> list[TrialWindowPolicy]:
    """Policies with the same weights that begin every trial with an empty context, without a prompt."""
    copies = [policy.fresh_copy() for policy in policies]
    for policy in copies:
        policy.start_over(None)
    return [TrialWindowPolicy(policy, 1) for policy in copies]


def context_bytes(policies: Sequence[InContextPolicy]) -> ContextBytes:
    """Bytes of the contexts of policies that share one prompt, which is counted once."""
    each = [policy.context_bytes for policy in policies]
    return ContextBytes(each[0].prompt, sum(size.environments for size in each))


def read_prompt(store: TrajectoryStore, config: RunConfig, ring: int) -> ChainSteps:
    """Prompt of stored trajectories with returns up to the target, ascending, conditioned on the target.

    Returns:
      Steps [1, S], with S a multiple of ``ring``.
    """
    count, seed = config.evaluation.prompt_trajectories, config.evaluation.first_seed
    chains = replace(config.chains, trajectories=count, layout="contiguous")
    loader = ChainLoader(store, chains, config.scaling, ring)
    returns = store.returns(chains.task)
    below = np.flatnonzero(returns <= config.target)
    sampler = StratifiedSampler(returns[below], store.learnable[below], count, chains.top_fraction, seed)
    episodes = below[list(sampler(0, demonstrations=1).episodes)].tolist()
    fields = loader.load(ChainPlan(tuple(episodes), config.target), slice(0, loader.length))
    steps: dict[str, Any] = {name: array[None] for name, array in fields.items() if name != "weight"}
    return ChainSteps(**steps)
