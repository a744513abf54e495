"""Collects episodes of a dm_control domain with exploring agents and writes ExoRL episode files.

    python -m data_prep.collect --domain walker                    the `mix` that the demo trains on
    python -m data_prep.collect --domain cartpole --collector rnd  a single explorer

The file format is ExoRL's, the data are not: every episode (``episodes.jsonl``) and the whole collection
(``collection.json``) are labelled "exorl-mini (ours)". Episodes of explorers that observe a task reward
(TD3) and of those that observe none (RND, noise) are written to two folders.

Collection proceeds in rounds of one episode per environment. After each round the episodes, the learners'
weights and the labels are written. A collection that was killed and is started again with the same flags
continues after its last complete round, and produces the same files as an uninterrupted one (bit for bit
on the same machine and versions and as many devices; on a CPU this script and the main one simulate 8).
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from agentic_ring.data.store import data_root
from agentic_ring.data.tasks import Domain, domain_named
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import only_writer
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.terminal.cli import optional_flag, run
from agentic_ring.terminal.progress import Advance, progress
from data_prep.collection_environments import Environments, open_environments
from data_prep.collection_folder import LABEL, CollectionFolder
from data_prep.episode_files import collector_folder, episode_file, read_episode
from data_prep.explorers import Explorer, ReplayBuffer, append_skill
from data_prep.relabel import Relabeller
from data_prep.schedule import PLANS, Job, Schedule, round_generator

Collector = Literal["random", "ou", "rnd", "icm", "icm_apt", "diayn", "td3", "mix"]


@dataclass(frozen=True)
class CollectConfig:
    """Settings of a collection.

    Attributes:
      domain: Domain to explore: walker, cheetah, cartpole, quadruped, point_mass_maze or jaco.
      collector: What chooses the actions: noise (random, ou), curiosity (rnd, icm, icm_apt), skills (diayn),
        task reward (td3), or the mix of noise, rnd and td3.
      tasks: Tasks whose rewards TD3 observes, assigned to its members in turn. Default: the domain's plan.
      episodes: Number of episodes, rounded to whole rounds. Default: the domain's plan.
      seed: Seed of all randomness.
      action_repeat: Control steps for which an action is held. Default: the domain's plan.
      members: Number of learners, with seeds of their own, trained as one population. Default: the domain's
        plan.
      environments: Number of environments per member.
      processes: Number of processes that step the environments; it does not change the episodes.
      output: Data folder. Default: $AGENTIC_RING_DATA or ./data.
    """

    domain: str = "walker"
    collector: Collector = "mix"
    tasks: Annotated[tuple[str, ...], optional_flag()] = ()
    episodes: Annotated[int | None, optional_flag()] = None
    seed: int = 0
    action_repeat: Annotated[int | None, optional_flag()] = None
    members: Annotated[int | None, optional_flag()] = None
    environments: int = 4
    processes: int = 1
    output: Annotated[Path | None, optional_flag()] = None

    def __post_init__(self) -> None:
        domain_named(self.domain)
        for name in ("episodes", "action_repeat", "members", "environments", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or more")


@dataclass(frozen=True)
class CollectionSummary:
    """Contents of a complete collection.

    Attributes:
      folders: collector folders, each with a ``buffer``.
      episodes: number of episodes in all folders, collected now or before.
      seconds: wall time of this call.
    """

    folders: tuple[Path, ...]
    episodes: int
    seconds: float


def collect(config: CollectConfig) -> CollectionSummary:
    """Collects the episodes that a collection still lacks; waits while another process does.

    Raises:
      ConfigError: the folder holds a collection made with other settings.
      UnknownNameError: there is no such domain or task.
    """
    start = time.perf_counter()
    domain = domain_named(config.domain)
    plan = PLANS[config.domain]
    action_repeat = config.action_repeat or plan.action_repeat
    episodes = config.episodes or plan.episodes
    members = config.members or plan.members
    schedule = Schedule(domain, config.tasks, episodes, config.seed, members, config.environments)
    jobs = schedule.jobs(config.collector)
    settings = asdict(config)
    settings |= {"episodes": episodes, "action_repeat": action_repeat, "members": members}
    settings["tasks"] = list(config.tasks)
    del settings["output"], settings["processes"]
    root = config.output or data_root()
    folders = {job.folder: CollectionFolder(collector_folder(root, domain.name, job.folder)) for job in jobs}
    with ExitStack() as stack:
        for folder in folders.values():
            stack.enter_context(only_writer(folder.path, wait=True))
        for folder in folders.values():
            folder.begin(settings)
        with progress(f"collecting {domain.name}", sum(job.episodes for job in jobs)) as advance:
            for job in jobs:
                _run_job(job, domain, action_repeat, config, folders, advance)
        for folder in folders.values():
            folder.forget_states()
        return CollectionSummary(
            folders=tuple(folder.path for folder in folders.values()),
            episodes=sum(len(folder.labels()) for folder in folders.values()),
            seconds=time.perf_counter() - start,
        )


def _run_job(
    job: Job,
    domain: Domain,
    action_repeat: int,
    config: CollectConfig,
    folders: dict[str, CollectionFolder],
    advance: Advance,
) -> None:
    folder = folders[job.folder]
    done = sum(label.job == job.name for label in folder.labels()) // len(job.tasks)
    if done == job.rounds:
        return
    explorer = job.make_explorer(_fill_replay(job, domain, action_repeat, folders))
    if done:
        explorer.restore(folder.load_state(job.name, done, explorer.state()))
    settings = domain, job.tasks, job.reward_tasks, action_repeat
    with open_environments(*settings, config.processes) as environments:
        for number in range(done, job.rounds):
            generator = round_generator(config.seed, job.name, number)
            seeds = generator.integers(2**31, size=len(job.tasks)).tolist()
            collected = _run_round(explorer, environments, generator, seeds)
            about = {"round": number, "action_repeat": action_repeat}
            labels = [label | about for label in explorer.labels()]
            folder.add_round(job.name, number + 1, collected, labels, explorer.state())
            best = max(float(episode.reward.sum()) for episode in collected)
            finished = sum(len(each.labels()) for each in folders.values())
            advance(finished, f"{job.name}, best return of the round", last_return=best)


def _run_round(
    explorer: Explorer, environments: Environments, generator: np.random.Generator, seeds: Sequence[int]
) -> list[Episode]:
    """Collects one episode in every environment."""
    observation = environments.reset(seeds)
    explorer.begin_round(generator, observation)
    for _ in range(environments.decisions):
        action = explorer.act(observation).astype(np.float32)
        explorer.learn()  # runs in the background while the environments step
        observation, reward = environments.step(action)
        explorer.observe(action, reward, observation)
    return environments.episodes()


def _fill_replay(
    job: Job, domain: Domain, action_repeat: int, folders: dict[str, CollectionFolder]
) -> ReplayBuffer:
    """A replay buffer with room for the job, filled with its episodes so far and those it starts from."""
    used = (job.name, *job.starts_from)
    labelled = [(folder, label) for folder in folders.values() for label in folder.labels()]
    before = [(folder, label) for folder, label in labelled if label.job in used]
    size = len(before) + job.episodes
    seen = domain.observation_dim + job.skills
    decisions = domain.decisions(action_repeat)
    replay = ReplayBuffer(size, decisions, seen, domain.action_dim, len(job.reward_tasks))
    names = [task.name for task in job.reward_tasks]
    relabeller = Relabeller(domain, names) if names else None
    for folder, label in before:
        episode = read_episode(episode_file(folder.buffer / label.file), domain)
        rewards = relabeller.rewards(episode) if relabeller else {}
        observation, *taken = _decisions(episode, [rewards[name] for name in names], action_repeat)
        if job.skills:
            observation = append_skill(observation, label.skill or 0, job.skills)
        replay.add_episode(observation, *taken)
    return replay


def _decisions(
    episode: Episode, rewards: Sequence[np.ndarray], action_repeat: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An episode as the learners observe it: observations [D + 1, O], actions [D, A], rewards [D, K]."""
    steps = len(episode)
    starts = np.arange(0, steps, action_repeat)
    observation = episode.observation[np.append(starts, steps)]
    summed = [np.add.reduceat(reward[1:].astype(np.float64), starts).astype(np.float32) for reward in rewards]
    reward = np.stack(summed, -1) if summed else np.zeros((len(starts), 0), np.float32)
    return observation, episode.action[starts + 1], reward


def main(config: Annotated[CollectConfig, tyro.conf.arg(name="")]) -> None:
    """Collects episodes of a dm_control domain and writes them in ExoRL's format."""
    simulate_cpu_devices()
    summary = collect(config)
    print(f"{LABEL}: {summary.episodes} episodes in {', '.join(map(str, summary.folders))}")
    collector = summary.folders[-1].name
    print(
        f"took {summary.seconds:.0f} s; next: "
        f"python -m data_prep.exorl --domain {config.domain} --collector {collector}"
    )


if __name__ == "__main__":
    run(main)
