"""Returns of a model that trajectories tell goals: all hidden goals of a domain at once, with controls.

    python evals/goal_returns.py --run runs/point_mass_maze_reach_top_left-demo-seed0 --output DIR

rolls out a run of ``--conditioning context`` whose tasks are goals, for the positions of its domain's tasks
and the hidden goals that were kept out of training. Each goal has several environments, with initial states
and stored trajectories of their own, none of which the run trained on. A context of n is the first n of them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import rich
import tyro
from jax.sharding import Mesh

from agentic_ring.data.domains import parse_task
from agentic_ring.data.recorded_environments import open_environments
from agentic_ring.data.rewards.family import RewardFunction, goal_reward
from agentic_ring.data.rewards.tasks import TARGETS
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.told_chains import ToldDecisions
from agentic_ring.data.told_rewards import hidden_goals
from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import Stages
from agentic_ring.inference.told_policy import ToldPolicy, told_prompt, told_sampling
from agentic_ring.mesh import mesh_on_first_devices, simulate_cpu_devices
from agentic_ring.models.model import Model, Params
from agentic_ring.policies.policy import load_params, policy_folder
from agentic_ring.provenance import usable_cores
from agentic_ring.results.intervals import mean_interval
from agentic_ring.results.results_file import Figure, Results, figure_table, write_results
from agentic_ring.rollouts.policies import RolloutPlan
from agentic_ring.rollouts.told_returns import run_recorded
from agentic_ring.rollouts.trials import RandomPolicy, TrialPolicy
from agentic_ring.run import ToldRunConfig, load_told_config
from agentic_ring.terminal import cli
from evals.maze_oracle import MazeOracle

OWN_TRIALS = 8


def tested_goals(config: ToldRunConfig) -> list[RewardFunction]:
    """The positions of the domain's tasks, and the hidden goals."""
    domain = parse_task(config.task).domain
    if not config.chains.goals:
        raise ConfigError(
            f"the run is of {config.task}, whose domain has no goals; take evals/dmc_returns.py, or a run in "
            "point_mass_maze or jaco"
        )
    return [*(goal_reward(domain, each) for each in TARGETS[domain.name].values()), *hidden_goals(domain)]


def evaluate_goals(
    config: ToldRunConfig, params: Params, mesh: Mesh, draws: int, seed: int
) -> dict[str, np.ndarray]:
    """Undiscounted returns, float64 [goals, draws], by the name of what is in context.

    ``n128`` has 128 trajectories, ``zeroed`` and ``another_goal`` as many with other rewards, and
    ``own_trials/trial_3`` nothing but two trials; ``random_policy`` and, in the maze, ``oracle`` have no
    model.
    ``met/n128`` is whether the goal was met in the context.
    """
    task, goals, chains = parse_task(config.task), tested_goals(config), config.chains
    most, count = max(config.evaluation.contexts), len(goals) * draws
    with TrajectoryStore.open(config.store) as store:
        held_back = np.arange(store.num_episodes)[-config.held_back :]
        data = ToldDecisions(store, config.scaling, chains.action_repeat, held_back)
    goal = np.arange(len(goals)).repeat(draws)
    rewards = np.stack([data.rewards(each, np.arange(len(data.action))) for each in goals])
    generators = [np.random.default_rng((seed, number)) for number in range(count)]
    stored = np.stack([each.permutation(len(data.action))[:most] for each in generators])
    right, scale = rewards[goal[:, None], stored], chains.scale(rewards)
    other = rewards[(goal[:, None] + len(goals) // 2) % len(goals), stored]
    told = {f"n{n}": right[:, :n] for n in config.evaluation.contexts[1:]}
    told |= {"zeroed": np.zeros_like(right), "another_goal": other}
    policy = ToldPolicy(
        *(Model(config.model), params, RolloutPlan.choose(mesh, count, prompt_tokens=0).mesh),
        *(config.scaling, count, OWN_TRIALS, data.action.shape[1], chains.spans),
        sampling=told_sampling(chains, seed),
        reward_scale=scale,
        shown=chains.shown,
    )
    settings = task.domain, [task] * count, goals, chains.action_repeat, usable_cores()
    with open_environments(*settings) as environments:

        def roll_out(policy: TrialPolicy, label: str, trials: int = 1) -> np.ndarray:
            found, _ = run_recorded(policy, environments, seed + np.arange(count), trials, label, goal)
            return found.reshape(len(goals), draws, trials)

        own = roll_out(policy, "nothing stored", OWN_TRIALS)
        returns = {f"own_trials/trial_{i + 1}": own[..., i] for i in range(OWN_TRIALS)} | {"n0": own[..., 0]}
        for name, each in told.items():
            shown = stored[:, : each.shape[1]]
            prompt = data.observation[shown], data.action[shown], scale(each)
            policy.start_over(told_prompt(*prompt, chains.spans, chains.shown))
            returns[name] = roll_out(policy, name)[..., 0]
        others: dict[str, TrialPolicy] = {"random_policy": RandomPolicy(count, task.domain.action_dim, seed)}
        if task.domain.name == "point_mass_maze":
            others["oracle"] = MazeOracle(np.array([each.goal for each in goals])[goal])
        returns |= {name: roll_out(each, name)[..., 0] for name, each in others.items()}
    met = {name: each.any(axis=(1, 2)).reshape(len(goals), draws) for name, each in told.items()}
    return returns | {f"met/{name}": each.astype(float) for name, each in met.items() if name[0] == "n"}


def figures_of(returns: Mapping[str, np.ndarray]) -> list[Figure]:
    """The mean over goals of each entry, with its interval, and that of each goal [goals, draws]."""
    figures = []
    for name, each in returns.items():
        unit, by_goal = "share of contexts" if name.startswith("met/") else "return", each.mean(axis=1)
        figures.append(Figure.from_interval(name, mean_interval(by_goal), unit))
        figures += [Figure(f"{name}/goal_{i:02d}", float(value), unit) for i, value in enumerate(by_goal)]
    return figures


def main(
    run: Path,
    output: Path,
    draws: Annotated[int, tyro.conf.arg(metavar="N")] = 8,
    first_seed: Annotated[int, tyro.conf.arg(metavar="SEED")] = 10_000,
) -> None:
    """Rolls out a run for all hidden goals of its domain and prints the mean return by what is in context.

    Args:
      run: Folder of a run of --conditioning context in the maze or of Jaco.
      output: Folder for results.json, which has the return of each goal too.
      draws: Number of initial states and contexts for each goal.
      first_seed: Seed of the first environment; the others have the next ones.
    """
    folder = policy_folder(run)
    config = load_told_config(folder)
    simulate_cpu_devices()
    mesh, stages = mesh_on_first_devices(config.mesh), Stages()
    params, step = load_params(folder, config, mesh, "last")
    with stages.stage("evaluation"):
        figures = figures_of(evaluate_goals(config, params, mesh, draws, first_seed))
    shown = [figure for figure in figures if "/goal_" not in figure.name]
    rich.print(figure_table(shown, f"{len(tested_goals(config))} hidden goals, checkpoint {step}"))
    write_results(output / "results.json", Results.of_this_process(asdict(config), stages.seconds, figures))


if __name__ == "__main__":
    cli.run(main)
