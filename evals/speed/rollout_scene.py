"""Policies for the benchmark of rollouts: random weights and a random prompt, with and without a cache.

Speed does not depend on the values of weights and prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from agentic_ring.data.scaling import Scaling
from agentic_ring.data.tasks import Domain
from agentic_ring.errors import AgenticRingError, ConfigError
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig, ChainSteps
from agentic_ring.models.model import Model, Params
from agentic_ring.rollouts.policies import RolloutPlan, with_copies

CHECKED_DECISIONS = 3
LARGEST_DIFFERENCE = 1e-4
"""Allowed difference of actions, which lie in [-1, 1]."""


class ActionsDifferError(AgenticRingError):
    """The cached policy's actions differ from the model's, so its speed would be meaningless."""


@dataclass(frozen=True)
class Scene:
    """Model and environments of a benchmark.

    Attributes:
      model, params: the model of the policy and its parameters.
      domain: domain of the environments.
      decisions: decisions per trajectory.
      environments: E, the number of environments.
      trials: number of an environment's own trials in context, including the current one.
    """

    model: Model[AgenticTransformerConfig]
    params: Params
    domain: Domain
    decisions: int
    environments: int
    trials: int

    def prompt(self, trajectories: int) -> ChainSteps | None:
        """Random steps [1, S] in place of the stored trajectories, or None if there are none."""
        stored = trajectories - self.trials
        if stored < 0:
            raise ConfigError(
                f"{trajectories} trajectories of context cannot hold {self.trials} trials; increase "
                "--trajectories or reduce --trials"
            )
        return self.steps(1, stored * self.decisions) if stored else None

    def steps(self, batch: int, length: int, first: int = 0) -> ChainSteps:
        """Random steps [batch, length] that begin at position ``first`` of the chain."""
        random = np.random.default_rng(first)

        def floats(*width: int) -> Any:
            return random.normal(size=(batch, length, *width)).astype(np.float32)

        place: Any = np.broadcast_to(np.arange(first, first + length, dtype=np.int32), (batch, length))
        return ChainSteps(
            return_to_go=floats(),
            observation=floats(self.domain.observation_dim),
            action=np.tanh(floats(self.domain.action_dim)),
            reward=floats(),
            completion=0 * floats(),
            timestep=place % self.decisions,
            trajectory=place // self.decisions,
            position=place,
        )

    def policies(self, prompt: ChainSteps | None) -> list[InContextPolicy]:
        """The policies that share the environments, with their prompt encoded and no trial begun."""
        identity = Scaling((0.0,) * self.domain.observation_dim, (1.0,) * self.domain.observation_dim, 1, 1)
        tokens = 0 if prompt is None else prompt.position.shape[1] * TOKENS_PER_STEP
        plan = RolloutPlan.choose(make_mesh(MeshShape()), self.environments, tokens)
        policy = InContextPolicy(
            self.model,
            self.params,
            plan.mesh,
            identity,
            0.0,
            self.environments // plan.policies,
            self.trials * self.decisions,
            prompt,
        )
        return with_copies(policy, plan.policies)

    def fill_context(self, policies: Sequence[InContextPolicy], trials: int) -> None:
        """Runs trials on random observations, to fill the context."""
        share = self.environments // len(policies)
        random = np.random.default_rng(0)
        for step in range(trials * self.decisions):
            for policy in policies:
                if step % self.decisions == 0:
                    policy.begin_trial()
                policy.act(random.normal(size=(share, self.domain.observation_dim)).astype(np.float32))
                policy.receive(np.zeros(share, np.float32), last=(step + 1) % self.decisions == 0)


class FullEncoding:
    """Computes the first environment's action by encoding its whole context, without a cache.

    Args:
      scene: model and environments.
      prompt: steps [1, S] before the trials.
    """

    def __init__(self, scene: Scene, prompt: ChainSteps | None):
        self.observation_dim = scene.domain.observation_dim
        self._first = 0 if prompt is None else prompt.position.shape[1]
        own = _unfilled(scene.steps(1, scene.trials * scene.decisions, self._first))
        self.steps: Any = own if prompt is None else ChainSteps.joined([prompt, own])

        def action(params: Params, steps: ChainSteps, place: jax.Array) -> jax.Array:
            return scene.model.bind(params)(steps, layout="contiguous")[0, place]

        self._action = partial(jax.jit(action), scene.params)

    def set_fields(self, decision: int, **fields: np.ndarray | float) -> None:
        """Sets fields of a decision of the first trial; decisions count from 0."""
        place = self._first + decision
        for name, value in {**fields, "position": place}.items():
            getattr(self.steps, name)[0, place] = value

    def act(self, decision: int) -> np.ndarray:
        """The action float32 [A] of a decision."""
        return np.asarray(self._action(self.steps, np.int32(self._first + decision)))


def _unfilled(steps: ChainSteps) -> ChainSteps:
    """The steps marked as padding."""
    return replace(steps, position=np.full_like(steps.position, -1))


def compare_actions(policy: InContextPolicy, environments: int, again: FullEncoding) -> None:
    """Compares a policy's first actions on random observations with those of a full encoding.

    Raises:
      ActionsDifferError: the actions differ.
    """
    return_to_go, random = 0.0, np.random.default_rng(0)
    policy.begin_trial()
    for decision in range(CHECKED_DECISIONS):
        observation = random.normal(size=(environments, again.observation_dim)).astype(np.float32)
        action = np.asarray(policy.act(observation))
        reward = random.uniform(size=environments).astype(np.float32)
        again.set_fields(decision, observation=observation[0], return_to_go=return_to_go)
        difference = np.abs(action[0] - again.act(decision)).max()
        if not difference < LARGEST_DIFFERENCE:
            raise ActionsDifferError(
                f"decision {decision}: the cached policy's action differs by up to {difference:.2g} from "
                "that of a full encoding; the times of different computations cannot be compared"
            )
        again.set_fields(decision, action=action[0], reward=reward[0], completion=0.0)
        policy.receive(reward, last=False)
        return_to_go -= float(reward[0])
