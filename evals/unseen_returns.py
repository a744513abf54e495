"""Returns of a told model under many reward functions at once, none of which it trained on, with controls.

    python evals/unseen_returns.py --run runs/walker_run-demo-seed0 --output DIR

rolls out a run of ``--conditioning context``. In the maze and for Jaco the reward functions are the goals of
the domain's tasks and hidden ones that were kept out of training; elsewhere they are new draws of the family,
none like a task. Each has several environments, with initial states and stored trajectories of their own: of
those that the run held back from training, if it did. A context of n is the first n of them.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import rich
import tyro
from jax.sharding import Mesh

from agentic_ring.data.domains import Domain, parse_task
from agentic_ring.data.recorded_environments import open_environments
from agentic_ring.data.rewards.family import RewardFunction, goal_reward
from agentic_ring.data.rewards.tasks import POSITIONS, TARGETS
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.data.told_rewards import draw_training_rewards, hidden_goals
from agentic_ring.files.run_folder import Stages
from agentic_ring.inference.told_policy import told_prompt
from agentic_ring.mesh import mesh_on_first_devices, simulate_cpu_devices
from agentic_ring.models.model import Params
from agentic_ring.policies.policy import load_params, policy_folder
from agentic_ring.provenance import usable_cores
from agentic_ring.results.intervals import mean_interval
from agentic_ring.results.results_file import Figure, Results, figure_table, write_results
from agentic_ring.rollouts.told_returns import (
    as_told,
    context_generators,
    draw_contexts,
    run_recorded,
    told_policy,
)
from agentic_ring.rollouts.trials import RandomPolicy, TrialPolicy
from agentic_ring.run import ToldRunConfig, load_told_config
from agentic_ring.terminal import cli
from evals.maze_oracle import MazeOracle

OWN_TRIALS = 8
DRAWN = 48
"""Number of new draws of the family."""
_DRAWING_SEED = 1_000_003  # larger than that of a run


def unseen_rewards(domain: Domain, data: ToldDecisions) -> list[RewardFunction]:
    """The goals of the domain's tasks and the hidden ones; where rewards are no goals, new draws."""
    if domain.name in POSITIONS:
        return [*(goal_reward(domain, each) for each in TARGETS[domain.name].values()), *hidden_goals(domain)]
    return [*draw_training_rewards(domain, data, 2 * DRAWN, _DRAWING_SEED).kept[:DRAWN]]


def evaluate_unseen(
    config: ToldRunConfig, params: Params, mesh: Mesh, draws: int, seed: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Rolls out a model under the unseen reward functions R, ``draws`` environments each.

    Returns:
      Undiscounted returns, float64 [R, draws], by the name of what is in context: ``n128`` has 128
      trajectories, ``zeroed`` and ``another`` as many with other rewards, ``own_trials/trial_3`` nothing but
      two trials; ``random_policy`` and, in the maze, ``oracle`` have no model. ``met/n128`` is whether a
      trajectory of the context was rewarded at all. And the returns float64 [R, E] of the stored episodes.
    """
    task, chains, most = parse_task(config.task), config.chains, max(config.evaluation.contexts)
    with TrajectoryStore.open(config.store) as store:
        held_back = np.arange(store.num_episodes)[-config.held_back :]
        data = ToldDecisions.of_store(store, config.scaling, chains.action_repeat, held_back)
    functions = unseen_rewards(task.domain, data)
    count, number = len(functions) * draws, np.arange(len(functions)).repeat(draws)
    rewards = np.stack([data.rewards(each) for each in functions])
    stored = draw_contexts(context_generators(seed, count), len(data.action), most, config.store)
    paid = rewards[number[:, None], stored]
    scale, right = as_told(chains, paid)
    other = as_told(chains, rewards[(number[:, None] + len(functions) // 2) % len(functions), stored])[1]
    told = {f"n{n}": right[:, :n] for n in config.evaluation.contexts[1:]}
    told |= {"zeroed": np.zeros_like(right), "another": other}
    policy = told_policy(config, params, mesh, scale, OWN_TRIALS, seed)
    settings = task.domain, [task] * count, functions, chains.action_repeat, usable_cores()
    with open_environments(*settings) as environments:

        def roll_out(policy: TrialPolicy, label: str, trials: int = 1) -> np.ndarray:
            found, _ = run_recorded(policy, environments, seed + np.arange(count), trials, label, number)
            return found.reshape(len(functions), draws, trials)

        own = roll_out(policy, "nothing stored", OWN_TRIALS)
        returns = {f"own_trials/trial_{i + 1}": own[..., i] for i in range(OWN_TRIALS)} | {"n0": own[..., 0]}
        for name, each in told.items():
            shown = stored[:, : each.shape[1]]
            prompt = data.observation[shown], data.action[shown], each
            policy.start_over(told_prompt(chains, *prompt))
            returns[name] = roll_out(policy, name)[..., 0]
        others: dict[str, TrialPolicy] = {"random_policy": RandomPolicy(count, task.domain.action_dim, seed)}
        if task.domain.name == "point_mass_maze":
            others["oracle"] = MazeOracle(np.array([each.goal for each in functions])[number])
        returns |= {name: roll_out(each, name)[..., 0] for name, each in others.items()}
    for n in config.evaluation.contexts[1:]:
        returns[f"met/n{n}"] = paid[:, :n].any(axis=(1, 2)).reshape(len(functions), draws).astype(float)
    return returns, np.stack([data.returns(each) for each in rewards])


def figures_of(returns: Mapping[str, np.ndarray], data: np.ndarray) -> list[Figure]:
    """The mean over reward functions of each entry [R, draws], with its interval, and that of each function.

    ``rank/...`` is the share of stored episodes, with the returns ``data`` [R, E], that a return exceeds.
    """
    units = {name: "share of contexts" if name.startswith("met/") else "return" for name in returns}
    ranks = {
        f"rank/{name}": (each[:, :, None] > data[:, None]).mean(axis=2)
        for name, each in returns.items()
        if units[name] == "return"
    }
    figures = []
    for name, each in {**returns, **ranks}.items():
        unit, means = units.get(name, "rank"), each.mean(axis=1)
        figures.append(Figure.from_interval(name, mean_interval(means, "functions"), unit))
        figures += [Figure(f"{name}/reward_{i:02d}", float(value), unit) for i, value in enumerate(means)]
    return figures


def main(
    run: Path,
    output: Path,
    draws: Annotated[int, tyro.conf.arg(metavar="N")] = 4,
    first_seed: Annotated[int, tyro.conf.arg(metavar="SEED")] = 10_000,
    contexts: Annotated[tuple[int, ...], cli.optional_flag(metavar="N ...")] = (),
) -> None:
    """Rolls out a run under unseen reward functions and prints mean returns and ranks by what is in context.

    Args:
      run: Folder of a run of --conditioning context.
      output: Folder for results.json, which has the return under each function too.
      draws: Number of initial states and contexts for each function.
      first_seed: Seed of the first environment; the others have the next ones.
      contexts: Numbers of stored trajectories in context, ascending from 0, also more than were trained with.
        Default: those of the run.
    """
    folder = policy_folder(run)
    config = load_told_config(folder)
    if contexts:
        config = replace(config, evaluation=replace(config.evaluation, contexts=contexts))
    simulate_cpu_devices()
    mesh, stages = mesh_on_first_devices(config.mesh), Stages()
    params, step = load_params(folder, config, mesh, "last")
    with stages.stage("evaluation"):
        returns, data = evaluate_unseen(config, params, mesh, draws, first_seed)
    figures = figures_of(returns, data)
    shown = [figure for figure in figures if "/reward_" not in figure.name]
    rich.print(figure_table(shown, f"{len(data)} unseen reward functions, checkpoint {step}"))
    write_results(output / "results.json", Results.of_this_process(asdict(config), stages.seconds, figures))


if __name__ == "__main__":
    cli.run(main)
