"""Environment steps a second of a policy whose whole context is cached, beside the environments alone.

    python evals/rollout_speed.py --rows-to experiments/results/rollout_speed.csv

Sixteen environments step together. Their context is a prompt of stored trajectories, which is read once
and kept once for all of them, and the trials that each of them has had. A step is a control step; the
policy decides once in as many as an action is held for. What takes turns, within which ratios are taken:

    alone      the environments under random actions, drawn anew at each decision
    cached     as many under the policy, as an evaluation rolls them out (``rollout_policies``): 4 new
               tokens a decision for each of them
    again      the whole context encoded again, for one environment and one decision; a step of all then
               takes as many encodings as there are environments, one after the other

Before anything is timed the actions of the cached policy are compared with those of encoding everything
again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich
from gymnasium.vector import SyncVectorEnv
from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentic_ring import cli
from agentic_ring.data.tasks import Task, parse_task
from agentic_ring.errors import ConfigError
from agentic_ring.inference import ContextBytes
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig
from agentic_ring.models.model import Model
from agentic_ring.models.transformer import TransformerConfig
from agentic_ring.progress import say
from evals.common.rows import write_rows
from evals.rollouts.environments import shared_environments
from evals.rollouts.policies import context_bytes
from evals.rollouts.trials import Cohort, RandomPolicy, TrialPolicy
from evals.speed.interleaved import Spread, time_interleaved
from evals.speed.rollout_scene import EncodedAgain, Scene, compare_actions

MODELS = {
    "demo": TransformerConfig(width=128, layers=3, heads=4, ffn_width=256, remat="none"),
    "tiny": TransformerConfig(width=16, layers=1, heads=2, ffn_width=32, remat="none"),
}
"""Stacks by name: the demo preset's, and one that shows in seconds that everything runs."""


@dataclass(frozen=True)
class SpeedRow:
    """Steps at one length of context.

    Attributes:
      trajectories: in context, the environments' own last trial included.
      tokens: of those.
      bytes: that the context takes.
      policies: that share the environments.
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
    policies: int
    steps: int
    alone: Spread
    cached: Spread
    slower: Spread
    again: Spread | None
    faster: Spread | None
    turns: int

    def columns(self) -> dict[str, Any]:
        """The row as one level of named cells, for a CSV file."""
        cells = {
            name: getattr(self, name) for name in ("trajectories", "tokens", "policies", "steps", "turns")
        }
        cells |= {"prompt_bytes": self.bytes.prompt, "environments_bytes": self.bytes.environments}
        spreads = {"alone_seconds": self.alone, "cached_seconds": self.cached, "slower": self.slower}
        if self.again is not None and self.faster is not None:
            spreads |= {"again_seconds": self.again, "faster": self.faster}
        for name, spread in spreads.items():
            cells |= {name: spread.median, f"{name}_low": spread.low, f"{name}_high": spread.high}
        return cells


@dataclass(frozen=True)
class Timing:
    """How each row is timed.

    Attributes:
      task: what the environments do.
      action_repeat: control steps that an action is held for.
      decisions: of a turn.
      turns: timed ones.
    """

    task: Task
    action_repeat: int
    decisions: int
    turns: int

    def stepper(
        self, policies: Sequence[TrialPolicy], environments: Sequence[SyncVectorEnv]
    ) -> Callable[[], np.ndarray]:
        """A function that takes a turn's decisions, and returns the last rewards."""
        cohorts = [Cohort(*pair) for pair in zip(policies, environments, strict=True)]
        for cohort in cohorts:
            cohort.begin(trial=0)

        def steps() -> np.ndarray:
            rewards = np.zeros(0)
            for _ in range(self.decisions):
                rewards = np.concatenate([cohort.step()[0] for cohort in cohorts])
            return rewards

        return steps


def measure(scene: Scene, timing: Timing, trajectories: int, encode_again: bool) -> SpeedRow:
    """One row.

    Raises:
      ConfigError: the turns take longer than an episode, or the context has no place for the trials.
      ActionsDifferError: the cached policy does not act as the model does.
    """
    taken = timing.decisions * (timing.turns + 1)
    if taken >= scene.decisions:
        raise ConfigError(
            f"{timing.turns} turns after an untimed one are {taken} decisions, and an episode has "
            f"{scene.decisions}; take fewer turns or fewer decisions in each, so that it does not end"
        )
    prompt = scene.prompt(trajectories)
    say(f"reading {trajectories - scene.trials} trajectories")
    policies = scene.policies(prompt)
    again = EncodedAgain(scene, prompt) if encode_again else None
    if again is not None:
        say("comparing actions")
        compare_actions(policies[0].fresh_copy(), scene.environments // len(policies), again)
    scene.live_through(policies, scene.trials - 1)
    by_chance = [RandomPolicy(scene.environments, scene.domain.action_dim, 0)]
    rivals: list[Sequence[TrialPolicy]] = [by_chance, policies]
    environments = [
        shared_environments(timing.task, 0, scene.environments, len(rival), timing.action_repeat)
        for rival in rivals
    ]
    try:
        functions: list[Callable[[], Any]] = [*map(timing.stepper, rivals, environments)]
        if again is not None:
            functions.append(partial(again.act, 0))
        say(f"timing {trajectories} trajectories of context")
        alone, cached, *encoding = time_interleaved(timing.turns, *functions)
    finally:
        for each in environments[0] + environments[1]:
            each.close()
    # A decision takes as many encodings as there are environments, which step no slower for it.
    others = [
        [timing.decisions * scene.environments * x + stepping for x, stepping in zip(xs, alone, strict=True)]
        for xs in encoding
    ]
    return SpeedRow(
        trajectories=trajectories,
        tokens=trajectories * scene.decisions * TOKENS_PER_STEP,
        bytes=context_bytes(policies),
        policies=len(policies),
        steps=timing.decisions * scene.environments * timing.action_repeat,
        alone=Spread.of(alone),
        cached=Spread.of(cached),
        slower=_ratio(cached, alone),
        again=Spread.of(others[0]) if others else None,
        faster=_ratio(others[0], cached) if others else None,
        turns=timing.turns,
    )


def _ratio(seconds: list[float], others: list[float]) -> Spread:
    return Spread.of(x / y for x, y in zip(seconds, others, strict=True))


def print_rows(rows: list[SpeedRow]) -> None:
    """One table of all, in control steps a second."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("context", "prompt MB", "own MB", "alone/s", "cached/s", "slower", "again/s", "faster"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        encoded = ("", "")
        if row.again is not None and row.faster is not None:
            encoded = (f"{row.steps / row.again.median:,.3g}", f"{row.faster.median:,.3g}")
        table.add_row(
            str(row.trajectories),
            *(f"{x / 1e6:,.1f}" for x in (row.bytes.prompt, row.bytes.environments)),
            *(f"{row.steps / x.median:,.0f}" for x in (row.alone, row.cached)),
            f"{row.slower.median:.2f} ({row.slower.low:.2f}-{row.slower.high:.2f})",
            *encoded,
        )
    rich.print(table)


def main(
    trajectories: tuple[int, ...] = (4, 32, 128),
    task: str = "walker_run",
    action_repeat: int = 4,
    model: str = "demo",
    environments: int = 16,
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
      trials: Of the trajectories in context, those that are the environments' own; the others are stored
        ones, which all environments share.
      decisions: In a turn.
      turns: Timed ones.
      encode_again_up_to: Trajectories up to which encoding everything again is measured as well.
      rows_to: CSV file for the rows; none is written if left out.
    """
    if model not in MODELS:
        raise ConfigError(f"model is {model!r}; it must be one of {', '.join(MODELS)}")
    simulate_cpu_devices(8)
    parsed = parse_task(task)
    domain, length = parsed.domain, parsed.domain.decisions(action_repeat)
    config = AgenticTransformerConfig(MODELS[model], domain.observation_dim, domain.action_dim, length)
    built = Model(config)
    params = jax.jit(built.init_params)(jax.random.key(0))
    scene = Scene(built, params, domain, length, environments, trials)
    timing = Timing(parsed, action_repeat, decisions, turns)
    rows = [measure(scene, timing, count, count <= encode_again_up_to) for count in trajectories]
    print_rows(rows)
    if rows_to is not None:
        setting = {
            "model": model,
            "parameters": built.parameter_count(),
            "task": task,
            "action_repeat": action_repeat,
            "environments": environments,
            "own_trials": trials,
            "encoded_environments": 1,
        }
        write_rows(rows_to, [setting | row.columns() for row in rows])


if __name__ == "__main__":
    cli.run(main)
