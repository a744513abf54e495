"""Exports a run's checkpoint as a policy: safetensors, configuration and a model card.

    python evals/export_policy.py runs/walker_run-demo-seed0 --output policies/walker

A policy that trajectories tell its task keeps as many stored ones as a chain of training has. It is rolled
out in every task of its domain, told by these, and the returns go to its ``tasks.json`` and its card.

``agentic_ring.load_policy("policies/walker")`` acts with it, ``evals/dmc_returns.py --run`` and
``evals/report.py`` read it as they do a run. The card's other figures are those of the run's
``results.json``.
"""

import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jinja2
import numpy as np
import tyro

from agentic_ring.data.domains import Domain, Task, all_tasks, parse_task
from agentic_ring.data.rewards.tasks import task_reward
from agentic_ring.data.spans import middle_decisions
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.files.atomic import replacing_folder
from agentic_ring.files.run_folder import Stages
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Model
from agentic_ring.policies.policy import (
    SHIPPED,
    TASKS,
    WEIGHTS,
    load_params,
    policy_trajectories,
    read_policy,
    write_policy,
)
from agentic_ring.results.results_file import Figure, Results, read_results, short_number, write_results
from agentic_ring.results.rows import read_rows
from agentic_ring.rollouts.returns import FILE_NAME, read_record
from agentic_ring.run import RunConfig, ToldRunConfig, load_any_config
from agentic_ring.terminal import cli
from evals.told_tasks import evaluate_tasks, task_figures

CARD = Path(__file__).with_name("policy_card.jinja")
KEPT_FILES = ("results.json", FILE_NAME)
"""Files that the policy keeps as they are."""
METRICS, METRICS_ROWS = "metrics.jsonl", 150
"""It keeps at most so many rows of this one; a folder of ``dmc_returns.py --output`` has none."""
FIGURES = {
    "return/n0": "nothing in context",
    "return/n128": "told by 128 relabelled trajectories",
    "control/zeroed": "rewards zeroed",
    "control/another_task": "rewards of another task",
    "own_trials/trial_4": "trial 4 with only its own trials in context",
    "return/random_policy": "random policy",
    "return/data_median": "training data, median",
    "return/data_p90": "training data, 90th percentile",
    "return/data_p95": "training data, 95th percentile",
    "return/data_best": "training data, best",
    "return/target": "target of every trial",
    "return/trial_1": "trial 1",
    "return/last_trial": "last trial, earlier ones in context",
    "return/best_of_trials": "best of the trials",
    "return/context_gain": "gain from the context",
}
"""Row of the card for each figure of a run."""


def returns_in_tasks(policy: Path, config: ToldRunConfig) -> Results:
    """Rolls out a policy in all tasks of its domain, told by the trajectories that it keeps.

    Returns:
      Figures NAME/TASK of ``evaluate_tasks``, and the ``data_median`` and ``data_best`` of its store.
    """
    stages, kept = Stages(), policy_trajectories(policy, config)
    params, _ = read_policy(policy, Model(config.model), make_mesh(MeshShape(), jax.devices()[:1]))
    domain, evaluation = parse_task(config.task).domain, config.evaluation
    with stages.stage("evaluation"):
        settings = evaluation.environments, evaluation.first_seed
        returns, _ = evaluate_tasks(config, params, kept, *settings)
    figures = task_figures(domain.tasks, returns)
    with TrajectoryStore.open(config.store) as store:
        data = ToldDecisions.of_store(store, config.scaling, config.chains.action_repeat)
    for task in domain.tasks:
        earned = data.returns(data.rewards(task_reward(Task(domain, task))))
        for name, value in (("median", np.median(earned)), ("best", earned.max())):
            figure = Figure(f"data_{name}/{task}", float(value), "return", n=len(earned), over="trajectories")
            figures.append(figure)
    return Results.of_this_process(asdict(config), stages.seconds, figures)


def read_td3(table: Path, domain: Domain) -> dict[str, float]:
    """Mean return over training seeds of TD3, in its last trial, by task of a domain that a table has.

    A table without any is a ``DataError``.
    """
    found: dict[str, dict[str, float]] = {}
    for row in read_rows(table):
        if row["method"] == "td3" and row["trial"].isdecimal() and row["task"] in all_tasks():
            task = parse_task(row["task"])
            if task.domain == domain:  # a later trial replaces an earlier one
                found.setdefault(task.name, {})[row["seed"]] = float(row["return"])
    if not found:
        raise DataError(f"{table} has no TD3 in a task of {domain.name}; give another table, or none")
    return {task: float(np.mean([*seeds.values()])) for task, seeds in found.items()}


def main(
    run: Annotated[Path, tyro.conf.Positional],
    output: Path,
    checkpoint: Literal["last", "best"] = "last",
    table: Annotated[Path | None, cli.optional_flag(metavar="FILE")] = None,
) -> None:
    """Exports a run's checkpoint as a policy: safetensors, configuration and a model card.

    Args:
      run: Folder of a finished run, such as runs/walker_run-demo-seed0.
      output: New folder of the policy.
      checkpoint: The last checkpoint, whose returns the run has measured, or the one with the lowest loss.
      table: The table.csv of Table 5 on the same data, whose TD3 the card compares with, where trajectories
        tell the task.
    """
    if output.exists():
        raise ConfigError(f"{output} exists; name a new folder, or remove that one")
    config, results = load_any_config(run), read_results(run / "results.json")
    if isinstance(config, RunConfig) and config.evaluation.prompt_trajectories:
        raise ConfigError(
            f"the trials of {run} come after a prompt of {config.evaluation.prompt_trajectories} stored "
            "trajectories, which a policy does not hold; export a run without a prompt"
        )
    if isinstance(config, RunConfig) and table is not None:
        raise ConfigError(f"--table is for policies that trajectories tell, which {run} is not; leave it out")
    domain = parse_task(config.task).domain
    td3 = {} if table is None else read_td3(table, domain)
    record = read_record(run)
    if record is None:
        raise DataError(f"{run} holds no {FILE_NAME}; run its command again, which repeats the evaluation")
    params, step = load_params(run, config, make_mesh(MeshShape(), jax.devices()[:1]), checkpoint)
    name = output.name if output.parent.resolve() == SHIPPED else output.as_posix()
    named = {figure.name: figure for figure in results.figures}
    algorithms = Counter(record.data_algorithms.tolist()).most_common()
    collected = ", ".join(f"{episodes} of {kind}" for kind, episodes in algorithms)
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False)
    environment.filters["short"] = short_number
    card = environment.from_string(CARD.read_text(encoding="utf-8"))
    about: dict[str, Any] = {
        "policy": name,
        "config": config,
        "told": isinstance(config, ToldRunConfig),
        "results": results,
        "step": step,
        "checkpoint": checkpoint,
        "parameters": Model(config.model).parameter_count(),
        "store": Path(config.store).stem,
        "data": f"{len(record.data_returns)} episodes ({collected})",
        "tasks": domain.tasks,
        "td3": td3,
        "figures": [(label, named[figure]) for figure, label in FIGURES.items() if figure in named],
    }
    with replacing_folder(output) as beside:
        write_policy(beside, config, params, step)
        if isinstance(config, ToldRunConfig):
            kept = policy_trajectories(run, config)
            decisions, chains = kept.action.shape[1], config.chains
            best = chains.shown == "best"
            kept.write(beside, np.arange(decisions) if best else middle_decisions(decisions, chains.spans))
            in_tasks = returns_in_tasks(beside, config)
            write_results(beside / TASKS, in_tasks)
            about |= {"in_tasks": {each.name: each for each in in_tasks.figures}}
        for name in KEPT_FILES:
            shutil.copyfile(run / name, beside / name)
        if (run / METRICS).exists():
            rows = (run / METRICS).read_text(encoding="utf-8").splitlines(keepends=True)
            every = -(-len(rows) // METRICS_ROWS)
            (beside / METRICS).write_text("".join(rows[every - 1 :: every]), encoding="utf-8")
        (beside / "README.md").write_text(card.render(about), encoding="utf-8")
    size = sum(file.stat().st_size for file in output.iterdir()) / 1e6
    print(f"written to {output}: {WEIGHTS} of checkpoint {step}, {size:.1f} MB in all")


if __name__ == "__main__":
    cli.run(main)
