"""What rollouts are timed on: a policy with random weights and a random prompt, and the same without a cache.

How fast they are does not depend on what they say.
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
from agentic_ring.inference import InContextPolicy
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig, ChainSteps
from agentic_ring.models.model import Model, Params
from evals.rollouts.policies import RolloutPlan, with_copies

CHECKED_DECISIONS = 3
LARGEST_DIFFERENCE = 1e-4
"""Of actions, which lie in [-1, 1]."""


class ActionsDifferError(AgenticRingError):
    """The cached policy does not act as the model does, so that its speed means nothing."""


@dataclass(frozen=True)
class Scene:
    """Who acts where.

    Attributes:
      model, params: of the policy.
      domain: of the environments.
      decisions: of a trajectory.
      environments: E.
      trials: of the trajectories in context so many, the last one among them, are the environments' own.
    """

    model: Model[AgenticTransformerConfig]
    params: Params
    domain: Domain
    decisions: int
    environments: int
    trials: int

    def prompt(self, trajectories: int) -> ChainSteps | None:
        """All but the environments' own: random steps [1, S]."""
        stored = trajectories - self.trials
        if stored < 0:
            raise ConfigError(
                f"{trajectories} trajectories of context cannot hold {self.trials} trials; ask for more, or "
                "for fewer --trials"
            )
        return self.steps(1, stored * self.decisions) if stored else None

    def steps(self, batch: int, length: int, first: int = 0) -> ChainSteps:
        """Random steps [batch, length], from place ``first`` of the chain on."""
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
        """Those that share the environments, with their prompt read and no trial begun."""
        as_they_are = Scaling(
            (0.0,) * self.domain.observation_dim, (1.0,) * self.domain.observation_dim, 1, 1
        )
        tokens = 0 if prompt is None else prompt.position.shape[1] * TOKENS_PER_STEP
        plan = RolloutPlan.choose(make_mesh(MeshShape()), self.environments, tokens)
        policy = InContextPolicy(
            self.model,
            self.params,
            plan.mesh,
            as_they_are,
            0.0,
            self.environments // plan.policies,
            self.trials * self.decisions,
            _padded(prompt, plan.mesh.shape["ring"]),
        )
        return with_copies(policy, plan.policies)

    def live_through(self, policies: Sequence[InContextPolicy], trials: int) -> None:
        """So many trials of random observations, to have them in context."""
        share = self.environments // len(policies)
        random = np.random.default_rng(0)
        for step in range(trials * self.decisions):
            for policy in policies:
                if step % self.decisions == 0:
                    policy.begin_trial()
                policy.act(random.normal(size=(share, self.domain.observation_dim)).astype(np.float32))
                policy.receive(np.zeros(share, np.float32), last=(step + 1) % self.decisions == 0)


class EncodedAgain:
    """The first environment's action by encoding its whole context, with no cache.

    Args:
      scene: whose model it is.
      prompt: steps [1, S] that come first.
    """

    def __init__(self, scene: Scene, prompt: ChainSteps | None):
        self.observation_dim = scene.domain.observation_dim
        self._first = 0 if prompt is None else prompt.position.shape[1]
        own = _unfilled(scene.steps(1, scene.trials * scene.decisions, self._first))
        self.steps: Any = own if prompt is None else _joined(prompt, own)

        def action(params: Params, steps: ChainSteps, place: jax.Array) -> jax.Array:
            return scene.model.bind(params)(steps, layout="contiguous")[0, place]

        self._action = partial(jax.jit(action), scene.params)

    def remember(self, decision: int, **fields: np.ndarray | float) -> None:
        """Writes what is known of a decision of the first trial, counted from 0."""
        place = self._first + decision
        for name, value in {**fields, "position": place}.items():
            getattr(self.steps, name)[0, place] = value

    def act(self, decision: int) -> np.ndarray:
        """The action float32 [A] of that decision."""
        return np.asarray(self._action(self.steps, np.int32(self._first + decision)))


def _unfilled(steps: ChainSteps) -> ChainSteps:
    """The steps as places that nothing has filled yet."""
    return replace(steps, position=np.full_like(steps.position, -1))


def _joined(*parts: ChainSteps) -> ChainSteps:
    return jax.tree.map(lambda *fields: np.concatenate(fields, axis=1), *parts)


def _padded(steps: ChainSteps | None, ring: int) -> ChainSteps | None:
    """Steps [1, S], S made a multiple of the ring by places that nothing fills."""
    missing = 0 if steps is None else -steps.position.shape[1] % ring
    if steps is None or not missing:
        return steps
    return _joined(steps, _unfilled(jax.tree.map(lambda x: x[:, :missing], steps)))


def compare_actions(policy: InContextPolicy, environments: int, again: EncodedAgain) -> None:
    """Takes the first decisions of a policy of so many environments on random observations, both ways.

    Raises:
      ActionsDifferError: they are not the same.
    """
    left, random = 0.0, np.random.default_rng(0)
    policy.begin_trial()
    for decision in range(CHECKED_DECISIONS):
        observation = random.normal(size=(environments, again.observation_dim)).astype(np.float32)
        action = np.asarray(policy.act(observation))
        reward = random.uniform(size=environments).astype(np.float32)
        again.remember(decision, observation=observation[0], return_to_go=left)
        difference = np.abs(action[0] - again.act(decision)).max()
        if not difference < LARGEST_DIFFERENCE:
            raise ActionsDifferError(
                f"decision {decision}: the cached policy's action differs by up to {difference:.2g} from "
                "that of encoding everything again; they must agree before times mean a thing"
            )
        again.remember(decision, action=action[0], reward=reward[0], completion=0.0)
        policy.receive(reward, last=False)
        left -= float(reward[0])
