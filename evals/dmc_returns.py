"""Returns of a trained Agentic Transformer in dm_control: trials one after another, all in context.

    python evals/dmc_returns.py --run runs/walker_run-demo-seed0 --first-seed 20000

rolls out a run's last checkpoint or an exported policy again, for example in other environments, and prints
the returns of every trial, with all earlier trials in context and with an empty context.

    python evals/dmc_returns.py --run runs/walker_run-demo-seed0 --task walker_flip
    python evals/dmc_returns.py --run runs/walker_run-demo-seed0 --reward my_rewards.py:hop

tells a run of ``--conditioning context`` another task, or a function of features (``data.rewards``), without
training: the run's stored trajectories are relabelled with it. The controls are those of the run.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import rich
from jax.sharding import Mesh

from agentic_ring.data.domains import parse_task
from agentic_ring.data.rewards.family import RewardFunction
from agentic_ring.data.rewards.features import Features
from agentic_ring.data.rewards.held_out import outside
from agentic_ring.data.rewards.tasks import task_reward
from agentic_ring.data.rewards.user_reward import UserReward, load_reward
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.data.told_rewards import compared_features, draw_training_rewards
from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import Stages
from agentic_ring.mesh import mesh_on_first_devices, simulate_cpu_devices
from agentic_ring.models.model import Model, Params
from agentic_ring.policies.policy import load_params, policy_folder, write_policy
from agentic_ring.results.results_file import Results, figure_table, write_results
from agentic_ring.rollouts.returns import (
    EvaluationRecord,
    ReturnReport,
    evaluate_returns,
    read_record,
    write_record,
)
from agentic_ring.rollouts.told_returns import ToldReport, evaluate_told
from agentic_ring.run import RunConfig, ToldRunConfig, load_any_config
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from evals.plots.told_returns import plot_told_returns


def training_data(folder: Path, config: RunConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns and algorithms of the training trajectories, from the record of a run or from its store."""
    if record := read_record(folder):
        return record.data_returns, record.data_algorithms
    with TrajectoryStore.open(config.store) as store:
        return store.returns(parse_task(config.task).name), np.array(store.algorithms)


def evaluate_aimed(
    folder: Path, config: RunConfig, params: Params, mesh: Mesh
) -> tuple[ReturnReport, EvaluationRecord]:
    """Rolls out a model that a target return tells what to do."""
    data, algorithms = training_data(folder, config)
    report = evaluate_returns(config, Model(config.model), params, mesh, data)
    return report, EvaluationRecord(data, algorithms, report.rollout)


def evaluate_asked(
    config: ToldRunConfig, asked: UserReward | None, params: Params, mesh: Mesh
) -> tuple[ToldReport, EvaluationRecord]:
    """Rolls out a model that is told the reward ``asked``, or the task of ``config``."""
    task, repeat = parse_task(config.task), config.chains.action_repeat
    with TrajectoryStore.open(config.store) as store:
        decisions, told = ToldDecisions.of_store(store, config.scaling, repeat).split(config.held_back)
        algorithms = store.algorithms[-config.held_back :]
    if asked is not None:
        asked.require_variation(decisions.step_features())
    trained = draw_training_rewards(task.domain, decisions, config.rewards, config.chains.seed).kept
    if asked is not None:
        say_if_known(asked, trained, compared_features(task.domain, decisions))
    report = evaluate_told(config, params, None, mesh, told, asked or task_reward(task), trained)
    return report, report.record(algorithms, repeat)


def say_if_known(reward: UserReward, trained: Sequence[RewardFunction], features: Features) -> None:
    """Says how many of the reward functions that a model was trained on are like this one, if any."""
    if np.ptp(reward(features)) < 1e-6:  # it varies in other rows of the data only
        return
    like = outside(trained, [reward], features).too_close[0]
    if like:
        say(
            f"{like} of the {len(trained)} reward functions of training are like {reward.name}: their "
            "correlation is 0.9 or more, so it is less new to the model than a task"
        )


def main(
    run: str | Path,
    task: Annotated[str | None, cli.optional_flag(metavar="DOMAIN_TASK")] = None,
    reward: Annotated[str | None, cli.optional_flag(metavar="FILE.py:FUNCTION")] = None,
    environments: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    first_seed: Annotated[int | None, cli.optional_flag(metavar="SEED")] = None,
    checkpoint: Literal["last", "best"] = "last",
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
) -> None:
    """Rolls out a trained policy again and prints the returns of every trial.

    Args:
      run: Folder of a run or of an exported policy.
      task: Task of the run's domain that stored trajectories tell a run of --conditioning context. Default:
        the run's task.
      reward: Function of features that they tell it in place of a task, such as my_rewards.py:hop; episodes
        begin as those of the run's task.
      environments: Number of environments that run at once. Default: as in the run.
      first_seed: Seed of the first environment; the others have the next ones. Default: as in the run.
      checkpoint: The last checkpoint, or the one with the lowest training loss.
      output: New folder for the returns, one environment's trials and the policy, which evals/report.py
        reads. Default: nothing is written.
    """
    folder = policy_folder(run)
    if output is not None and output.exists() and output.samefile(folder):
        raise ConfigError(f"--output {output} is the folder of the policy; name another one")
    if output is not None and (output / "metrics.jsonl").exists():
        raise ConfigError(f"--output {output} holds a trained run or its policy; name another folder")
    config = load_any_config(folder)
    if task is not None and reward is not None:
        raise ConfigError(f"--task {task} and --reward {reward} both say what to do; give one of them")
    if isinstance(config, RunConfig) and (task or reward):
        raise ConfigError(
            f"{folder} holds a run of --conditioning return, which knows {config.task} only; leave "
            f"{'--task' if task else '--reward'} out, or give a run of --conditioning context"
        )
    if task is not None:
        config = replace(config, task=parse_task(task, parse_task(config.task).domain).full_name)
    asked = None if reward is None else load_reward(reward)
    chosen = {"environments": environments, "first_seed": first_seed}
    changes = {name: value for name, value in chosen.items() if value is not None}
    config = replace(config, evaluation=replace(config.evaluation, **changes))
    simulate_cpu_devices()
    mesh = mesh_on_first_devices(config.mesh)
    params, step = load_params(folder, config, mesh, checkpoint)
    stages = Stages()
    with stages.stage("evaluation"):
        if isinstance(config, ToldRunConfig):
            report, record = evaluate_asked(config, asked, params, mesh)
        else:
            report, record = evaluate_aimed(folder, config, params, mesh)
    name = reward or config.task
    rich.print(figure_table(report.figures(), f"{name}, checkpoint {step}"))
    print(report.verdict())
    if output is not None:
        write_policy(output, config, params, step)
        settings = asdict(config) | ({} if reward is None else {"reward": reward})
        write_results(
            output / "results.json", Results.of_this_process(settings, stages.seconds, report.figures())
        )
        write_record(output, record)
        if isinstance(report, ToldReport):
            plot_told_returns(output / "returns.png", name, report)
        print(f"written to {output}; python evals/report.py {output} makes a page of it")


if __name__ == "__main__":
    cli.run(main)
