"""Rolls out a trained policy in new environments and prints the return of every trial.

    python -m agentic_ring.play walker --task walker_flip

All earlier trials are in context. ``evals/told_tasks.py --run walker`` rolls out all tasks, and controls.
"""

from collections.abc import Iterator
from typing import Annotated

import numpy as np

from agentic_ring.data.domains import parse_task
from agentic_ring.errors import ArgumentError, ConfigError
from agentic_ring.extras import needs_extra
from agentic_ring.policies.acting import ActingPolicy, Policy
from agentic_ring.policies.policy import load_policy
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import progress

with needs_extra("models"):
    import tyro


def main(
    policy: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    task: Annotated[str | None, cli.optional_flag(metavar="DOMAIN_TASK")] = None,
    environments: int = 8,
    seed: int = 0,
    target: Annotated[float | None, cli.optional_flag(metavar="RETURN")] = None,
) -> None:
    """Rolls out a trained policy in new environments and prints the return of every trial.

    Args:
      policy: Name of a shipped policy, such as walker, or the folder of a run.
      task: Task that stored trajectories tell the policy. Default: that of its run.
      environments: Number of environments that run at once.
      seed: Seed of the first environment; the others have the next ones.
      target: Return that every trial is conditioned on. Default: as in the run.
    """
    for flag, value, least in (("environments", environments, 1), ("seed", seed, 0)):
        if value < least:
            raise ArgumentError(f"--{flag} is {value}; it must be at least {least}")
    loaded = load_policy(policy, target)
    if isinstance(loaded, Policy):
        if task is not None:
            raise ConfigError(f"{policy} knows the task {loaded.task} only; leave --task out")
        aim = f"target {loaded.target:.1f}"
    else:
        loaded.tell(task=task or loaded.task)
        aim = "told by stored trajectories"
    name = task or loaded.task
    print(f"{name}, {environments} environments, {aim}")
    for trial, returns in enumerate(play(loaded, name, environments, seed), start=1):
        spread = f"lowest {returns.min():6.1f}, highest {returns.max():6.1f}"
        print(f"trial {trial}: mean return {returns.mean():6.1f} ({spread})", flush=True)


def play(policy: ActingPolicy, task: str, environments: int, seed: int) -> Iterator[np.ndarray]:
    """Resets a policy and lets it act in all its trials; yields the undiscounted returns of each, [E].

    The E environments have the random seeds from ``seed`` on.
    """
    with needs_extra("rl"):
        import gymnasium

    from agentic_ring.data import gymnasium_environments  # noqa: F401  registers the tasks

    tasks = gymnasium.make_vec(f"agentic_ring/{task}-v0", environments)
    policy.reset()
    observation, _ = tasks.reset(seed=seed)
    steps = parse_task(task).domain.episode_steps
    try:
        for _ in range(policy.trials):
            returns, done, step = np.zeros(environments), np.zeros(environments, bool), 0
            with progress(f"playing {task}", steps) as advance:
                while not done.any():
                    action = policy.act(observation)
                    observation, reward, terminated, truncated, _ = tasks.step(action)
                    done = terminated | truncated
                    policy.receive(reward, done)
                    returns += reward
                    advance(step := step + 1, "")
            yield returns
    finally:
        tasks.close()


if __name__ == "__main__":
    cli.run(main, prog="python -m agentic_ring.play")
