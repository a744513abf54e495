"""The plan of each domain, and the jobs of a collection: which explorers collect how many episodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from agentic_ring.data.domains import Domain, Task, task_named
from agentic_ring.training.td3 import TD3Config
from data_prep.explorers import (
    Explorer,
    Learner,
    NoiseExplorer,
    PopulationExplorer,
    ReplayBuffer,
    SkillExplorer,
)
from data_prep.learners import APT, DIAYN, ICM, RND, IntrinsicReward, IntrinsicRewardLearner, TD3Learner


@dataclass(frozen=True)
class DomainPlan:
    """Defaults of a domain; see ``docs/data.md``.

    Attributes:
      action_repeat: control steps for which an action is held, in collections and in the demo's decisions.
      tasks: task whose reward each TD3 member observes, in turn.
      episodes: episodes of `mix`.
      updates: TD3 critic updates for each decision of all environments together.
      members: learners of an explorer.
    """

    action_repeat: int
    tasks: tuple[str, ...]
    episodes: int
    updates: int
    members: int = 3


_FOUR_SPOTS = ("reach_top_left", "reach_top_right", "reach_bottom_left", "reach_bottom_right")

# Action repeat, tasks of TD3, episodes, updates.
PLANS = {
    # A walker that runs also stands and walks (stand >= walk >= run at every state), so two members that
    # run and one that walks serve all three tasks.
    "walker": DomainPlan(4, ("run", "run", "walk"), 400, 10),
    "cheetah": DomainPlan(4, ("run", "run", "run"), 300, 8),
    "cartpole": DomainPlan(8, ("swingup", "swingup", "swingup"), 320, 8),
    "quadruped": DomainPlan(4, ("run", "jump", "walk"), 400, 8),
    "point_mass_maze": DomainPlan(8, _FOUR_SPOTS, 400, 8, members=4),
    # Episodes of 250 steps, a quarter of the others', so more of them.
    "jaco": DomainPlan(2, _FOUR_SPOTS, 800, 8, members=4),
}


# Shares of `mix` that worked well; the rest is TD3. With half noise imitation fails, and reward-free
# exploration on its own yields no good episodes to end a chain.
RND_SHARE = 0.3
OU_SHARE = 0.05
RANDOM_SHARE = 0.05
_NOISE_JOBS = ("random", "ou")
_INTRINSIC_REWARDS: dict[str, IntrinsicReward] = {
    "rnd": RND(),
    "icm": ICM(),
    "icm_apt": APT(),
    "diayn": DIAYN(),
}
_SKILLS = {"diayn": DIAYN().skills}
# Number of transitions collected with uniform actions if the replay buffer starts empty.
_FIRST_LEARN_SIZE = 1000


@dataclass(frozen=True)
class Job:
    """One explorer's part of a collection.

    Attributes:
      folder: collector folder to write to.
      rounds: number of episodes per environment.
      tasks: [E], task whose initial states and recorded reward each environment uses.
      reward_tasks: tasks whose rewards the explorer observes.
      make_explorer: makes the explorer from a replay buffer.
      starts_from: jobs whose episodes the replay buffer holds at the start.
      skills: number of skills, of which an episode's label names one; 0 for none.
    """

    name: str
    folder: str
    rounds: int
    tasks: list[Task]
    reward_tasks: list[Task]
    make_explorer: Callable[[ReplayBuffer], Explorer]
    starts_from: tuple[str, ...] = ()
    skills: int = 0

    @property
    def episodes(self) -> int:
        """Total number of episodes."""
        return self.rounds * len(self.tasks)


def member_tasks(domain: Domain, tasks: Sequence[str], members: int) -> list[Task]:
    """The task of each TD3 member: ``tasks`` in turn, or those of the domain's plan if empty.

    Raises:
      UnknownNameError: the domain has no such task.
    """
    names = tasks or PLANS[domain.name].tasks
    return [task_named(domain, names[member % len(names)]) for member in range(members)]


@dataclass(frozen=True)
class Schedule:
    """Makes the jobs of a collection.

    Attributes:
      seed: members are seeded with ``seed * 1000 + member``.
      members: P of every population.
      environments: M of every member.
    """

    domain: Domain
    tasks: tuple[str, ...]
    episodes: int
    seed: int
    members: int
    environments: int

    def jobs(self, collector: str) -> list[Job]:
        """The jobs of a collector in running order; later ones may learn from episodes of earlier ones."""
        if collector == "mix":
            rest, reward_free = "mix", "mix_reward_free"
            return [
                self._noise_job("random", reward_free, RANDOM_SHARE),
                self._noise_job("ou", reward_free, OU_SHARE),
                self._intrinsic_job("rnd", reward_free, RND_SHARE),
                self._td3_job(rest, 1 - RND_SHARE - OU_SHARE - RANDOM_SHARE),
            ]
        folder = f"mini_{collector}"
        if collector in _INTRINSIC_REWARDS:
            return [self._intrinsic_job(collector, folder, 1.0)]
        if collector == "td3":
            return [self._td3_job(folder, 1.0)]
        return [self._noise_job(collector, folder, 1.0)]

    def _rounds(self, share: float) -> int:
        return max(1, round(self.episodes * share / (self.members * self.environments)))

    def _seeds(self) -> list[int]:
        return [self.seed * 1000 + member for member in range(self.members)]

    @property
    def _plain_tasks(self) -> list[Task]:
        return [member_tasks(self.domain, self.tasks, 1)[0]] * (self.members * self.environments)

    def _noise_job(self, kind: Any, folder: str, share: float) -> Job:
        def make(_: ReplayBuffer) -> Explorer:
            return NoiseExplorer(kind, self.members * self.environments, self.domain.action_dim)

        return Job(kind, folder, self._rounds(share), self._plain_tasks, [], make)

    def _intrinsic_job(self, name: str, folder: str, share: float) -> Job:
        skills = _SKILLS.get(name, 0)

        def make(replay: ReplayBuffer) -> Explorer:
            dims = self.domain.observation_dim + skills, self.domain.action_dim
            config = TD3Config(horizon=1)
            learner = IntrinsicRewardLearner(_INTRINSIC_REWARDS[name], config, *dims, self._seeds(), skills)
            labels = [{"algorithm": name, "task": None, "learner_seed": seed} for seed in self._seeds()]
            return self._population(learner, replay, labels, updates=1, skills=skills)

        # Episodes of noise jobs have no skill.
        starts_from = () if skills else _NOISE_JOBS
        return Job(name, folder, self._rounds(share), self._plain_tasks, [], make, starts_from, skills)

    def _td3_job(self, folder: str, share: float) -> Job:
        tasks = member_tasks(self.domain, self.tasks, self.members)
        reward_tasks = sorted(set(tasks), key=lambda task: task.name)
        columns = [reward_tasks.index(task) for task in tasks]

        def make(replay: ReplayBuffer) -> Explorer:
            dims = self.domain.observation_dim, self.domain.action_dim
            learner = TD3Learner(TD3Config(), *dims, self._seeds(), columns)
            labels = [
                {"algorithm": "td3", "task": task.full_name, "learner_seed": seed}
                for task, seed in zip(tasks, self._seeds(), strict=True)
            ]
            return self._population(learner, replay, labels, PLANS[self.domain.name].updates)

        environments = [task for task in tasks for _ in range(self.environments)]
        # RND's episodes are left out: they are so many that they crowd out TD3's own.
        return Job("td3", folder, self._rounds(share), environments, reward_tasks, make, _NOISE_JOBS)

    def _population(
        self,
        learner: Learner,
        replay: ReplayBuffer,
        labels: list[dict[str, Any]],
        updates: int,
        skills: int = 0,
    ) -> Explorer:
        kind = partial(SkillExplorer, skills) if skills else PopulationExplorer
        return kind(
            learner,
            replay,
            labels,
            environments_per_member=self.environments,
            max_noise=0.3,
            updates_per_learn=2 * updates,
            learn_every=2,
            first_learn_size=_FIRST_LEARN_SIZE,
        )


def round_generator(seed: int, job: str, number: int) -> np.random.Generator:
    """The random generator of one round."""
    return np.random.default_rng([seed, number, *job.encode()])
