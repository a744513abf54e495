"""The policies of a trained Agentic Transformer: where they live, and how many share the environments.

Two that take turns hide the time of the one behind the environments of the other. On a CPU both want the
same cores:

    little in context    two policies on all cores but one, which steps the environments
    a long prompt        one policy on all cores, a shard of the prompt each: attending to it takes far
                         longer than the environments do, and a prompt is read by more rows at once
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.chain_loader import ChainLoader
from agentic_ring.data.hindsight_chains import StratifiedSampler
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.inference import ContextBytes, InContextPolicy
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, ChainSteps
from agentic_ring.models.model import Model, Params
from agentic_ring.progress import progress
from agentic_ring.provenance import usable_cores
from agentic_ring.run import RunConfig

LONG_PROMPT = 8192
"""Tokens of a prompt that keeps all cores busy. On 2 cores, walker and the demo's model, 16 environments:
two policies took 17 ms a decision behind 3,000 tokens and one on both cores 22; behind 31,000, 73 and 48."""


@dataclass(frozen=True)
class RolloutPlan:
    """Who rolls out where.

    Attributes:
      mesh: of each policy.
      policies: that share the environments evenly.
    """

    mesh: Mesh
    policies: int

    @classmethod
    def of(cls, mesh: Mesh, environments: int, prompt_tokens: int) -> "RolloutPlan":
        """For so many environments behind a prompt; on ``mesh``, or on a part where a CPU simulates it.

        More simulated devices than cores would take turns, and wait for each other twice a layer.
        """
        if jax.process_count() > 1 or mesh.devices.flat[0].platform != "cpu":
            copies = mesh.shape["data"] * mesh.shape["fsdp"]
            return cls(mesh, 2 if environments % (2 * copies) == 0 else 1)
        devices = list(mesh.devices.flat)[: usable_cores()]
        if prompt_tokens > LONG_PROMPT:
            return cls(make_mesh(MeshShape(ring=len(devices)), devices), 1)
        policies = 1 if environments % 2 else 2
        share = environments // policies
        copies = max(n for n in range(1, max(2, len(devices))) if share % n == 0)
        return cls(make_mesh(MeshShape(data=copies, ring=1), devices[:copies]), policies)


def plan_of(config: RunConfig, mesh: Mesh) -> RolloutPlan:
    """How a run is rolled out that was trained on ``mesh``."""
    tokens = config.evaluation.prompt_trajectories * config.decisions * TOKENS_PER_STEP
    return RolloutPlan.of(mesh, config.evaluation.environments, tokens)


def in_context_policies(
    config: RunConfig, model: Model, params: Params, mesh: Mesh, prompt_chunk: int | None = None
) -> list[InContextPolicy]:
    """Policies of a trained Agentic Transformer that share the environments, with their prompt read.

    Args:
      config: of the run.
      model, params: of its checkpoint.
      mesh: that it was trained on.
      prompt_chunk: steps of the prompt read at a time; see ``InContextPolicy``.
    """
    evaluation, plan = config.evaluation, plan_of(config, mesh)
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
    """The policy and copies of it, ``count`` in total."""
    return [policy, *(policy.fresh_copy() for _ in range(count - 1))]


def context_bytes(policies: Sequence[InContextPolicy]) -> ContextBytes:
    """Memory of the context of copies, which share one prompt."""
    each = [policy.context_bytes for policy in policies]
    return ContextBytes(each[0].prompt, sum(size.environments for size in each))


def read_prompt(store: TrajectoryStore, config: RunConfig, ring: int) -> ChainSteps:
    """Stored trajectories below the target, in ascending return and told to aim at it: [1, S] steps.

    S is a multiple of ``ring``.
    """
    count = config.evaluation.prompt_trajectories
    loader = ChainLoader(
        store, replace(config.chains, trajectories=count, layout="contiguous"), config.scaling, ring=ring
    )
    returns = store.returns(config.chains.task)
    below = np.flatnonzero(returns <= config.target)
    sampler = StratifiedSampler(
        returns[below],
        loader.learnable[below],
        count,
        config.chains.top_fraction,
        config.evaluation.first_seed,
    )
    plan = sampler(0)
    plan = replace(plan, episodes=tuple(int(below[e]) for e in plan.episodes), target=config.target)
    fields = loader.load(plan, slice(0, loader.length))
    steps: dict[str, Any] = {name: array[None] for name, array in fields.items() if name != "weight"}
    return ChainSteps(**steps)
