"""Collects episodes of a dm_control domain with exploring agents and writes ExoRL episode files.

    python -m data_prep.collect --domain walker                    `mix`: noise, curiosity and task rewards
    python -m data_prep.collect --collector family --processes 2   a reward for each member, as in the demo
    python -m data_prep.collect --collector long --processes 2     the same and tasks, for up to an hour
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
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from agentic_ring.data.domains import Task, domain_named, task_named
from agentic_ring.data.recorded_environments import Environments, control_step_rewards, open_environments
from agentic_ring.data.rewards.tasks import RewardOfFeatures, task_reward
from agentic_ring.data.store import data_root
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import ConfigError, check_at_least_one
from agentic_ring.files.run_folder import only_writer
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.terminal.cli import optional_flag, run
from agentic_ring.terminal.progress import Advance, progress
from agentic_ring.training.td3 import TD3Config
from data_prep.episode_files import (
    LABEL,
    OWN_COLLECTOR,
    REWARD_FREE_SUFFIX,
    CollectionFolder,
    collector_folder,
    episode_file,
    read_episode,
    read_labels,
)
from data_prep.explorers import Explorer, NoiseExplorer, PopulationExplorer, ReplayBuffer, append_skill
from data_prep.learners import (
    DIAYN,
    INTRINSIC_REWARDS,
    IntrinsicRewardLearner,
    JoinedLearners,
    TD3Learner,
)
from data_prep.population import LEARNED

Collector = Literal["random", "ou", "rnd", "icm", "icm_apt", "diayn", "td3", "mix", "family", "long"]


@dataclass(frozen=True)
class DomainPlan:
    """Defaults of a domain; see ``docs/data.md``.

    Attributes:
      action_repeat: control steps for which an action is held, in collections and in the demo's decisions.
      tasks: task whose reward each TD3 member observes, in turn.
      episodes: episodes of `mix`, and of a single explorer.
      updates: TD3 critic updates for each decision of all environments together.
      members: learners of an explorer.
      family_episodes: episodes of `family`.
      long_tasks: task whose reward each member of `long` observes, beside the members of `family`.
      long_episodes: episodes of `long`.
    """

    action_repeat: int
    tasks: tuple[str, ...]
    episodes: int
    updates: int
    members: int = 3
    family_episodes: int = 432
    long_tasks: tuple[str, ...] = ()
    long_episodes: int = 8000


_FOUR_SPOTS = ("reach_top_left", "reach_top_right", "reach_bottom_left", "reach_bottom_right")

PLANS = {
    # A walker that runs also stands and walks (stand >= walk >= run at every state), so two members that
    # run and one that walks serve all three tasks.
    "walker": DomainPlan(
        4, ("run", "run", "walk"), 400, 10, long_tasks=("run", "run", "walk", "flip", "run_backward")
    ),
    "cheetah": DomainPlan(
        4, ("run", "run", "run"), 300, 8, long_tasks=("run", "run", "run_backward", "flip", "flip_backward")
    ),
    "cartpole": DomainPlan(
        8,
        ("swingup", "swingup", "swingup"),
        320,
        8,
        long_tasks=("swingup", "swingup_sparse"),
        long_episodes=2000,
    ),
    "quadruped": DomainPlan(
        4, ("run", "jump", "walk"), 400, 8, long_tasks=("run", "run", "walk", "walk", "jump", "stand")
    ),
    "point_mass_maze": DomainPlan(8, _FOUR_SPOTS, 400, 8, members=4, family_episodes=4000),
    # Episodes of 250 steps, a quarter of the others', so more of them.
    "jaco": DomainPlan(2, _FOUR_SPOTS, 800, 8, members=4, family_episodes=2000),
}

# Shares of `mix` that worked well; the rest is TD3. With half noise imitation fails, and reward-free
# exploration on its own yields no good episodes to end a chain.
RND_SHARE = 0.3
OU_SHARE = 0.05
RANDOM_SHARE = 0.05
_NOISE_JOBS = ("random", "ou")


_POPULATIONS = {"family": 10, "long": 4}
"""Collectors whose members learn the rewards of ``data_prep/population.py``, and their updates, as in
``DomainPlan``."""
# They have many members: narrow networks where the reward is no task, and few calls with many updates each.
_NARROW = TD3Config(hidden=128)
_POPULATION_EXPLORER: dict[str, Any] = {"period": 5, "own_share": 0.5}


@dataclass(frozen=True)
class CollectConfig:
    """Settings of a collection.

    Attributes:
      domain: Domain to explore: walker, cheetah, cartpole, quadruped, point_mass_maze or jaco.
      collector: What chooses the actions: noise (random, ou), curiosity (rnd, icm, icm_apt), skills (diayn),
        task reward (td3), the mix of noise, rnd and td3, rewards that are no tasks (family; random actions
        from anywhere in the maze and for Jaco), or these and the tasks (long).
      tasks: Tasks whose rewards TD3 observes, assigned to its members in turn. Default: the domain's plan.
      episodes: Number of episodes, rounded to whole rounds. Default: the domain's plan.
      seed: Seed of all randomness.
      action_repeat: Control steps for which an action is held. Default: the domain's plan.
      members: Number of learners, with seeds of their own, trained as one population. Default: the domain's
        plan.
      environments: Number of environments per member. Default: 2 for family and long, else 4; 40 for
        family's random actions.
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
    environments: Annotated[int | None, optional_flag()] = None
    processes: int = 1
    output: Annotated[Path | None, optional_flag()] = None

    def __post_init__(self) -> None:
        domain_named(self.domain)
        counts = ("episodes", "action_repeat", "members", "environments", "processes")
        check_at_least_one(self, *(name for name in counts if getattr(self, name) is not None))
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or more")
        given = {name: getattr(self, name) for name in ("tasks", "members") if getattr(self, name)}
        if self.collector in _POPULATIONS and given:
            raise ConfigError(
                f"{given} is given, but the members of {self.collector} are those of its plan; leave it out"
            )
        if self.collector == "long" and self.domain not in LEARNED:
            raise ConfigError(f"no members of long are known for {self.domain}; use family, or mix")


@dataclass(frozen=True)
class Job:
    """One explorer's part of a collection."""

    name: str
    """The algorithm."""
    folder: str
    """Collector folder to write to."""
    rounds: int
    """Number of episodes per environment."""
    tasks: list[Task]
    """[E], task whose initial states and recorded reward each environment uses."""
    rewards: dict[str, RewardOfFeatures]
    """Rewards that the explorer observes, by name."""
    skills: int
    """Number of skills, of which an episode's label names one; 0 for none."""


class Collection:
    """The jobs and folders of a collection; its domain's plan fills in what the settings leave open."""

    def __init__(self, config: CollectConfig):
        self.domain = domain_named(config.domain)
        plan = PLANS[config.domain]
        self.action_repeat = config.action_repeat or plan.action_repeat
        self._updates = plan.updates
        self._config = config
        self._learns = config.collector != "family" or config.domain in LEARNED
        own: dict[str, RewardOfFeatures] = {}
        if config.collector in _POPULATIONS:
            own |= LEARNED.get(config.domain, {})
            long = config.collector == "long"
            episodes = plan.long_episodes if long else plan.family_episodes
            environments = 2 if self._learns else 40
            tasks = [Task(self.domain, name) for name in plan.long_tasks if long]
            start = Task(self.domain, self.domain.exploration or self.domain.tasks[0])
            self._tasks = [start] * max(1, len(own) + len(tasks))
        else:
            episodes, environments = plan.episodes, 4
            members, names = config.members or plan.members, config.tasks or plan.tasks
            tasks = [task_named(self.domain, names[member % len(names)]) for member in range(members)]
            self._tasks = tasks
        self._narrow = len(own)  # members, the first ones, whose reward is no task
        self._rewards = own | {task.full_name: task_reward(task) for task in tasks}
        self._learned = [*own, *(task.full_name for task in tasks)]
        self._episodes = config.episodes or episodes
        self._environments = config.environments or environments
        self._seeds = [config.seed * 1000 + member for member in range(len(self._tasks))]
        self.jobs = self._jobs()
        root = config.output or data_root()
        self.folders = {
            job.folder: CollectionFolder(collector_folder(root, config.domain, job.folder))
            for job in self.jobs
        }

    def settings(self) -> dict[str, Any]:
        """What determines the episodes, for ``collection.json``."""
        chosen = {
            "action_repeat": self.action_repeat,
            "episodes": self._episodes,
            "environments": self._environments,
            "members": len(self._tasks),
            "tasks": list(self._config.tasks),
        }
        settings = asdict(self._config) | chosen
        return {name: value for name, value in settings.items() if name not in ("output", "processes")}

    def _jobs(self) -> list[Job]:
        """The jobs in running order; later ones may learn from episodes of earlier ones."""
        collector = self._config.collector
        if not self._learns:
            return [self._job("random", f"mini_{collector}", 1.0)]
        if collector != OWN_COLLECTOR:
            return [self._job(collector, f"mini_{collector}", 1.0)]
        reward_free = OWN_COLLECTOR + REWARD_FREE_SUFFIX
        return [
            self._job("random", reward_free, RANDOM_SHARE),
            self._job("ou", reward_free, OU_SHARE),
            self._job("rnd", reward_free, RND_SHARE),
            self._job("td3", OWN_COLLECTOR, 1 - RND_SHARE - OU_SHARE - RANDOM_SHARE),
        ]

    def _job(self, name: str, folder: str, share: float) -> Job:
        intrinsic = INTRINSIC_REWARDS.get(name)
        skills = intrinsic.skills if isinstance(intrinsic, DIAYN) else 0
        members = self._tasks if name == "td3" else self._tasks[:1] * len(self._tasks)
        tasks = [task for task in members for _ in range(self._environments)]
        rounds = max(1, round(self._episodes * share / len(tasks)))
        rewards = self._rewards if name == "td3" or name in _POPULATIONS else {}
        return Job(name, folder, rounds, tasks, rewards, skills)

    def _explorer(self, job: Job, replay: ReplayBuffer) -> Explorer:
        dims = self.domain.observation_dim + job.skills, self.domain.action_dim
        algorithm = "td3" if job.rewards else job.name
        labels = [{"algorithm": algorithm, "task": None, "learner_seed": seed} for seed in self._seeds]
        if job.name in _NOISE_JOBS:
            return NoiseExplorer(job.name, len(job.tasks), self.domain.action_dim)
        if job.rewards:
            names = list(job.rewards)
            columns = [names.index(name) for name in self._learned]
            parts = [(_NARROW, slice(self._narrow)), (TD3Config(), slice(self._narrow, None))]
            learners = [
                TD3Learner(networks, *dims, self._seeds[members], columns[members])
                for networks, members in parts
                if columns[members]
            ]
            learner = learners[0] if len(learners) == 1 else JoinedLearners(*learners)
            labels = [label | {"task": name} for label, name in zip(labels, self._learned, strict=True)]
            settings = {"updates": _POPULATIONS.get(job.name, self._updates)}
            settings |= _POPULATION_EXPLORER if job.name in _POPULATIONS else {}
        else:
            settings, intrinsic = {"updates": 1, "skills": job.skills}, INTRINSIC_REWARDS[job.name]
            learner = IntrinsicRewardLearner(intrinsic, TD3Config(horizon=1), *dims, self._seeds, job.skills)
        return PopulationExplorer(learner, replay, labels, self._environments, **settings)

    def run(self, job: Job, advance: Advance) -> None:
        """Collects the rounds that a job still lacks."""
        folder = self.folders[job.folder]
        done = sum(label.job == job.name for label in read_labels(folder.path)) // len(job.tasks)
        if done == job.rounds:
            return
        explorer = self._explorer(job, self._replay(job))
        if done:
            explorer.restore(folder.load_state(job.name, done, explorer.state()))
        settings = self.domain, job.tasks, list(job.rewards.values()), self.action_repeat
        with open_environments(*settings, self._config.processes) as environments:
            for number in range(done, job.rounds):
                generator = np.random.default_rng([self._config.seed, number, *job.name.encode()])
                collected = _run_round(explorer, environments, generator, len(job.tasks))
                about = {"round": number, "action_repeat": self.action_repeat}
                labels = [label | about for label in explorer.labels()]
                folder.add_round(job.name, number + 1, collected, labels, explorer.state())
                best = max(float(episode.reward.sum()) for episode in collected)
                advance(self.finished(), f"{job.name}, best return of the round", last_return=best)

    def finished(self) -> int:
        """Number of finished episodes in all folders."""
        return sum(len(read_labels(folder.path)) for folder in self.folders.values())

    def _replay(self, job: Job) -> ReplayBuffer:
        """A replay buffer with room for the job, filled with its episodes so far and those it starts from."""
        labelled = [(folder, label) for folder in self.folders.values() for label in read_labels(folder.path)]
        # RND's episodes are left out: they are so many that they crowd out TD3's own. Those of noise have no
        # skill.
        read = (job.name,) if job.skills or job.name in _NOISE_JOBS else (job.name, *_NOISE_JOBS)
        before = [each for each in labelled if each[1].job in read]
        replay = ReplayBuffer(
            len(before) + job.rounds * len(job.tasks),
            self.domain.decisions(self.action_repeat),
            self.domain.observation_dim + job.skills,
            self.domain.action_dim,
            len(job.rewards),
        )
        for folder, label in before:
            episode = read_episode(episode_file(folder.buffer / label.file), self.domain)
            steps = episode.physics[1:], episode.action[1:]
            rewards = control_step_rewards(self.domain, list(job.rewards.values()), *steps)
            observation, *taken = _decisions(episode, rewards, self.action_repeat)
            if job.skills:
                observation = append_skill(observation, label.skill or 0, job.skills)
            replay.add_episode(observation, *taken)
        return replay


def collect(config: CollectConfig) -> Collection:
    """Collects the episodes that a collection still lacks; waits while another process does.

    Raises:
      ConfigError: the folder holds a collection made with other settings.
      UnknownNameError: there is no such task.
    """
    collection = Collection(config)
    folders = collection.folders.values()
    with ExitStack() as stack:
        for folder in folders:
            stack.enter_context(only_writer(folder.path, wait=True))
        for folder in folders:
            folder.begin(collection.settings())
        total = sum(job.rounds * len(job.tasks) for job in collection.jobs)
        with progress(f"collecting {config.domain}", total) as advance:
            for job in collection.jobs:
                collection.run(job, advance)
        for folder in folders:
            folder.forget_states()
    return collection


def _run_round(
    explorer: Explorer, environments: Environments, generator: np.random.Generator, count: int
) -> list[Episode]:
    """Collects one episode in each of ``count`` environments."""
    observation = environments.reset(generator.integers(2**31, size=count).tolist())
    explorer.begin_round(generator, observation)
    for _ in range(environments.decisions):
        action = explorer.act(observation).astype(np.float32)
        explorer.learn()  # runs in the background while the environments step
        observation, reward = environments.step(action)
        explorer.observe(action, reward, observation)
    return environments.episodes()


def _decisions(
    episode: Episode, rewards: np.ndarray, action_repeat: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An episode, with rewards [T, K] of its control steps, as the learners observe it.

    Returns:
      Observations [D + 1, O], actions [D, A], rewards [D, K].
    """
    steps = len(episode)
    starts = np.arange(0, steps, action_repeat)
    observation = episode.observation[np.append(starts, steps)]
    summed = np.add.reduceat(rewards, starts, dtype=np.float64).astype(np.float32)
    return observation, episode.action[starts + 1], summed


def main(config: Annotated[CollectConfig, tyro.conf.arg(name="")]) -> None:
    """Collects episodes of a dm_control domain and writes them in ExoRL's format."""
    simulate_cpu_devices()
    start = time.perf_counter()
    collection = collect(config)
    folders = [folder.path for folder in collection.folders.values()]
    print(f"{LABEL}: {collection.finished()} episodes in {', '.join(map(str, folders))}")
    command = f"python -m data_prep.exorl --domain {config.domain} --collector {folders[-1].name}"
    print(f"took {time.perf_counter() - start:.0f} s; next: {command}")


if __name__ == "__main__":
    run(main)
