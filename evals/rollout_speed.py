"""Environment steps a second of a policy whose whole context is cached, beside the environments alone.

    python evals/rollout_speed.py --rows-to experiments/results/rollout_speed.csv

Sixteen environments step together. Their context is a prompt of stored trajectories, which is read once
and kept once for all of them, and the trials that each of them has had. A step is a control step; the
policy decides once in as many as an action is held for. What takes turns, within which ratios are taken:

    alone      the environments under random actions, drawn anew at each decision
    cached     the same environments under the policy: 4 new tokens a decision for each of them
    again      the whole context encoded again, for one environment and one decision; a step of all then
               takes as many encodings as there are environments, one after the other

Weights and prompt are random: how fast they are does not depend on what they say. Before anything is timed
the actions of the cached policy are compared with those of encoding everything again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich
from gymnasium.vector import VectorEnv
from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentic_ring import cli
from agentic_ring.data.scaling import Scaling
from agentic_ring.data.tasks import Domain, parse_task
from agentic_ring.errors import AgenticRingError, ConfigError
from agentic_ring.inference import ContextBytes, InContextPolicy
from agentic_ring.mesh import MeshShape, make_mesh, simulate_cpu_devices
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig, ChainSteps
from agentic_ring.models.transformer import TransformerConfig
from agentic_ring.progress import say
from agentic_ring.training.state import Model, Params
from evals.environments import make_environments
from evals.rows import write_rows
from evals.trials import RandomPolicy, TrialPolicy
from evals.turns import Spread, take_turns

MODELS = {
    "demo": TransformerConfig(width=128, layers=3, heads=4, ffn_width=256, remat="none"),
    "tiny": TransformerConfig(width=16, layers=1, heads=2, ffn_width=32, remat="none"),
}
"""Stacks by name: the demo preset's, and one that shows in seconds that everything runs."""

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
      devices: those that share the environments out.
      trials: of the trajectories in context so many, the last one among them, are the environments' own.
    """

    model: Model[AgenticTransformerConfig]
    params: Params
    domain: Domain
    decisions: int
    environments: int
    devices: int
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

    def policy(self, prompt: ChainSteps | None) -> InContextPolicy:
        """With its prompt read and its first trial begun."""
        as_they_are = Scaling(
            (0.0,) * self.domain.observation_dim, (1.0,) * self.domain.observation_dim, 1, 1
        )
        mesh = make_mesh(MeshShape(data=self.devices, ring=1), jax.devices()[: self.devices])
        decisions = self.trials * self.decisions
        policy = InContextPolicy(
            self.model, self.params, mesh, as_they_are, 0.0, self.environments, decisions, prompt
        )
        policy.begin_trial()
        return policy


@dataclass(frozen=True)
class SpeedRow:
    """Steps at one length of context.

    Attributes:
      trajectories: in context, the environments' own last trial included.
      tokens: of those.
      bytes: that the context takes.
      steps: control steps of all environments in a turn.
      alone: seconds of these.
      cached: seconds of as many under the policy.
      slower: the policy's seconds over those of the environments alone, turn by turn.
      again: seconds of as many with everything encoded again; None where that was not measured.
      faster: those over the policy's, turn by turn.
      turns: timed.
    """

    trajectories: int
    tokens: int
    bytes: ContextBytes
    steps: int
    alone: Spread
    cached: Spread
    slower: Spread
    again: Spread | None
    faster: Spread | None
    turns: int

    def columns(self) -> dict[str, Any]:
        """The row as one level of named cells, for a CSV file."""
        cells = {name: getattr(self, name) for name in ("trajectories", "tokens", "steps", "turns")}
        cells |= {"prompt_bytes": self.bytes.prompt, "environments_bytes": self.bytes.environments}
        spreads = {"alone_seconds": self.alone, "cached_seconds": self.cached, "slower": self.slower}
        if self.again is not None and self.faster is not None:
            spreads |= {"again_seconds": self.again, "faster": self.faster}
        for name, spread in spreads.items():
            cells |= {name: spread.median, f"{name}_low": spread.low, f"{name}_high": spread.high}
        return cells


class EncodedAgain:
    """The first environment's action by encoding its whole context, with no cache.

    Args:
      scene: whose model it is.
      prompt: steps [1, S] that come first.
    """

    def __init__(self, scene: Scene, prompt: ChainSteps | None):
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


def compare_actions(scene: Scene, prompt: ChainSteps | None, again: EncodedAgain) -> None:
    """Takes a few decisions on random observations both ways.

    Raises:
      ActionsDifferError: they are not the same.
    """
    policy, left = scene.policy(prompt), 0.0
    random = np.random.default_rng(0)
    for decision in range(CHECKED_DECISIONS):
        observation = random.normal(size=(scene.environments, scene.domain.observation_dim))
        observation = observation.astype(np.float32)
        action, reward = policy.act(observation), random.uniform(size=scene.environments).astype(np.float32)
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


def stepper(policy: TrialPolicy, environments: VectorEnv, decisions: int) -> Callable[[], np.ndarray]:
    """A function that takes so many decisions, and returns the last observations."""
    observation, _ = environments.reset()

    def steps() -> np.ndarray:
        nonlocal observation
        for _ in range(decisions):
            observation, reward, *_ = environments.step(policy.act(observation))
            policy.receive(reward.astype(np.float32), last=False)
        return observation

    return steps


def measure(
    scene: Scene,
    environments: VectorEnv,
    action_repeat: int,
    trajectories: int,
    decisions: int,
    turns: int,
    encode_again: bool,
) -> SpeedRow:
    """One row; ``decisions`` are those of a turn. All functions step the same environments in turn.

    Raises:
      ConfigError: the turns take longer than an episode, or the context has no place for the trials.
      ActionsDifferError: the cached policy does not act as the model does.
    """
    taken = 2 * decisions * (turns + 1)
    if taken > scene.decisions:
        raise ConfigError(
            f"{turns} turns after an untimed one are {taken} decisions, and an episode has "
            f"{scene.decisions}; take fewer turns or fewer decisions in each"
        )
    prompt = scene.prompt(trajectories)
    say(f"reading {trajectories - scene.trials} trajectories")
    policy = scene.policy(prompt)
    functions: list[Callable[[], Any]] = [
        stepper(RandomPolicy(scene.environments, scene.domain.action_dim, 0), environments, decisions),
        stepper(policy, environments, decisions),
    ]
    if encode_again:
        again = EncodedAgain(scene, prompt)
        say("comparing actions")
        compare_actions(scene, prompt, again)
        functions.append(partial(again.act, 0))
    say(f"timing {trajectories} trajectories of context")
    alone, cached, *encoding = take_turns(turns, *functions)
    # A decision takes as many encodings as there are environments, which step no slower for it.
    others = [
        [decisions * scene.environments * x + stepping for x, stepping in zip(xs, alone, strict=True)]
        for xs in encoding
    ]
    return SpeedRow(
        trajectories=trajectories,
        tokens=trajectories * scene.decisions * TOKENS_PER_STEP,
        bytes=policy.context_bytes,
        steps=decisions * scene.environments * action_repeat,
        alone=Spread.of(alone),
        cached=Spread.of(cached),
        slower=_ratio(cached, alone),
        again=Spread.of(others[0]) if others else None,
        faster=_ratio(others[0], cached) if others else None,
        turns=turns,
    )


def _ratio(seconds: list[float], others: list[float]) -> Spread:
    return Spread.of(x / y for x, y in zip(seconds, others, strict=True))


def print_rows(rows: list[SpeedRow]) -> None:
    """One table of all."""
    table = Table(title="control steps a second", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("context", "prompt MB", "own", "alone", "cached", "slower", "again", "faster"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        encoded = ("", "")
        if row.again is not None and row.faster is not None:
            encoded = (f"{row.steps / row.again.median:,.3g}", f"{row.faster.median:,.3g}")
        table.add_row(
            str(row.trajectories),
            *(f"{x / 1e6:,.1f}" for x in (row.bytes.prompt, row.bytes.environments)),
            *(f"{row.steps / x.median:,.0f}" for x in (row.alone, row.cached)),
            f"{row.slower.median:.2f} ({row.slower.low:.2f} to {row.slower.high:.2f})",
            *encoded,
        )
    rich.print(table)


def main(
    trajectories: tuple[int, ...] = (4, 32, 128),
    task: str = "walker_run",
    action_repeat: int = 4,
    model: str = "demo",
    environments: int = 16,
    devices: int = 1,
    trials: int = 1,
    decisions: int = 20,
    turns: int = 5,
    encode_again_up_to: int = 32,
    rows_to: Path | None = None,
) -> None:
    """Times rollouts at several lengths of context.

    Args:
      trajectories: In context, the one that is being rolled out included.
      task: What the environments do.
      action_repeat: Control steps that an action is held for.
      model: A shape: demo or tiny.
      environments: Stepped together.
      devices: Simulated devices that share the environments out, each with the whole prompt.
      trials: Of the trajectories in context, those that are the environments' own; the others are stored
        ones, which all environments share.
      decisions: In a turn.
      turns: Timed ones.
      encode_again_up_to: Trajectories up to which encoding everything again is measured as well.
      rows_to: CSV file for the rows; none is written if left out.
    """
    if model not in MODELS:
        raise ConfigError(f"model is {model!r}; it must be one of {', '.join(MODELS)}")
    simulate_cpu_devices(devices)
    parsed = parse_task(task)
    domain, length = parsed.domain, -(-parsed.domain.episode_steps // action_repeat)
    config = AgenticTransformerConfig(MODELS[model], domain.observation_dim, domain.action_dim, length)
    built = Model(config)
    params = jax.jit(built.init_params)(jax.random.key(0))
    scene = Scene(built, params, domain, length, environments, devices, trials)
    stepped = make_environments(parsed, range(environments), action_repeat)
    try:
        rows = [
            measure(scene, stepped, action_repeat, count, decisions, turns, count <= encode_again_up_to)
            for count in trajectories
        ]
    finally:
        stepped.close()
    print_rows(rows)
    if rows_to is not None:
        setting = {
            "model": model,
            "parameters": built.parameter_count(),
            "task": task,
            "action_repeat": action_repeat,
            "environments": environments,
            "devices": devices,
            "own_trials": trials,
            "encoded_environments": 1,
        }
        write_rows(rows_to, [setting | row.columns() for row in rows])


if __name__ == "__main__":
    cli.run(main)
