"""Environment steps per second of a policy with a cached context, and of the environments only.

    python evals/rollout_speed.py --rows-to experiments/results/rollout_speed.csv

Sixteen environments are stepped together. Their context is a prompt of stored trajectories, which is encoded
and stored once for all of them, and the previous trials of each. A step is a control step; the policy makes
one decision per action repeat. The timed functions alternate, and ratios are taken within a round:

    alone      the environments with random actions, drawn at each decision
    cached     the environments with the policy, as in an evaluation: 4 new tokens per decision for each
    again      the whole context encoded again for one decision of one environment; a decision of all then
               takes one such encoding for each environment

Before the timing, the actions of the cached policy are compared with those of a full encoding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import rich
from gymnasium.vector import SyncVectorEnv
from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentic_ring.data.tasks import Task, parse_task
from agentic_ring.errors import ConfigError
from agentic_ring.inference.in_context_policy import ContextBytes
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.rows import write_rows
from agentic_ring.rollouts.environments import shared_environments
from agentic_ring.rollouts.policies import context_bytes
from agentic_ring.rollouts.trials import Cohort, RandomPolicy, TrialPolicy
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from evals.speed.interleaved import Spread, time_interleaved
from evals.speed.rollout_scene import FullEncoding, Scene, compare_actions

MODELS = {
    "demo": TransformerConfig(width=128, layers=3, heads=2, ffn_width=256, remat="attention"),
    "tiny": TransformerConfig(width=16, layers=1, heads=2, ffn_width=32, remat="none"),
}
"""Transformers by name: that of the demo preset, and a tiny one for a quick trial."""


@dataclass(frozen=True)
class SpeedRow:
    """Speed at one context length.

    Attributes:
      trajectories: trajectories in context, including the environments' current trial.
      tokens: tokens of these trajectories.
      bytes: memory of the context.
      policies: number of policies that share the environments.
      steps: control steps of all environments in a round.
      alone: seconds for these steps with random actions.
      cached: seconds for these steps with the cached policy.
      slower: ``cached`` divided by ``alone``, round by round.
      again: seconds for these steps with a full encoding per decision; None if not measured.
      faster: ``again`` divided by ``cached``, round by round.
      turns: number of timed rounds.
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
        """The row as flat columns of a CSV file."""
        cells = {
            name: getattr(self, name) for name in ("trajectories", "tokens", "policies", "steps", "turns")
        }
        cells |= {"prompt_bytes": self.bytes.prompt, "environments_bytes": self.bytes.environments}
        spreads = {"alone_seconds": self.alone, "cached_seconds": self.cached, "slower": self.slower}
        if self.again is not None and self.faster is not None:
            spreads |= {"again_seconds": self.again, "faster": self.faster}
        for name, spread in spreads.items():
            cells |= spread.cells(name)
        return cells


@dataclass(frozen=True)
class Timing:
    """How each row is timed.

    Attributes:
      task: task of the environments.
      action_repeat: control steps for which an action is repeated.
      decisions: decisions per round.
      turns: number of timed rounds.
    """

    task: Task
    action_repeat: int
    decisions: int
    turns: int

    def stepper(
        self, policies: Sequence[TrialPolicy], environments: Sequence[SyncVectorEnv]
    ) -> Callable[[], np.ndarray]:
        """A function that executes the decisions of a round and returns the last rewards."""
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
    """Measures one row.

    Raises:
      ConfigError: the rounds are longer than an episode, or the context is too short for the trials.
      ActionsDifferError: the cached policy's actions differ from the model's.
    """
    needed = timing.decisions * (timing.turns + 1)
    if needed >= scene.decisions:
        raise ConfigError(
            f"{timing.turns} rounds after a warm-up round are {needed} decisions, but an episode has only "
            f"{scene.decisions}; reduce --turns or --decisions"
        )
    prompt = scene.prompt(trajectories)
    say(f"encoding {trajectories - scene.trials} trajectories")
    policies = scene.policies(prompt)
    again = FullEncoding(scene, prompt) if encode_again else None
    if again is not None:
        say("comparing actions")
        compare_actions(policies[0].fresh_copy(), scene.environments // len(policies), again)
    scene.fill_context(policies, scene.trials - 1)
    random = [RandomPolicy(scene.environments, scene.domain.action_dim, 0)]
    contenders: list[Sequence[TrialPolicy]] = [random, policies]
    environments = [
        shared_environments(timing.task, 0, scene.environments, len(contender), timing.action_repeat)
        for contender in contenders
    ]
    try:
        functions: list[Callable[[], Any]] = [*map(timing.stepper, contenders, environments)]
        if again is not None:
            functions.append(partial(again.act, 0))
        say(f"timing a context of {trajectories} trajectories")
        alone, cached, *encoding = time_interleaved(timing.turns, *functions)
    finally:
        for each in environments[0] + environments[1]:
            each.close()
    # A decision takes one encoding per environment, in addition to stepping the environments.
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
    """Prints the rows as a table; speeds are control steps per second."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("context", "prompt MB", "own MB", "random/s", "cached/s", "slowdown", "full/s", "speedup"):
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
    rows_to: Annotated[Path | None, cli.optional_flag(metavar="FILE")] = None,
) -> None:
    """Times rollouts at several context lengths.

    Args:
      trajectories: Numbers of trajectories in context, including the current trial.
      task: Task of the environments.
      action_repeat: Control steps for which an action is repeated.
      model: Shape of the model: demo or tiny.
      environments: Number of environments that are stepped together.
      trials: How many of the trajectories in context are an environment's own trials; all environments
        share the others, which are stored trajectories.
      decisions: Decisions per round.
      turns: Number of timed rounds; medians are reported.
      encode_again_up_to: Largest number of trajectories at which a full encoding is timed too.
      rows_to: CSV file to write. Default: none.
    """
    if model not in MODELS:
        raise ConfigError(f"model is {model!r}; it must be one of {', '.join(MODELS)}")
    simulate_cpu_devices()
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
