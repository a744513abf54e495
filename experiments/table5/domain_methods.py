"""Methods of Table 5 that train once for all tasks of a domain, and never on a reward function like a task's.

All train on the same decisions of the store; ``fre`` and ``told`` on the same drawn reward functions
(``data.told_rewards``), ``fb`` on none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.domains import Domain, Task, domain_named, parse_task
from agentic_ring.data.relabelled_states import RelabelledStates
from agentic_ring.data.rewards.tasks import task_reward
from agentic_ring.data.store import Scaling, TrajectoryStore, measure_scaling
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.data.told_rewards import draw_training_rewards
from agentic_ring.files.run_folder import Dataclass
from agentic_ring.inference.baseline_policies import ReactivePolicy
from agentic_ring.inference.told_policy import told_prompt
from agentic_ring.mesh import MeshShape, make_mesh, mesh_on_first_devices
from agentic_ring.models.layers import act_on_latent
from agentic_ring.policies.policy import load_params
from agentic_ring.rollouts.told_returns import as_told, context_generators, draw_contexts, told_policy
from agentic_ring.rollouts.trials import TrialPolicy
from agentic_ring.run import EvaluationConfig, ToldRunConfig
from agentic_ring.training import forward_backward, fre
from agentic_ring.training.forward_backward import ForwardBackwardConfig
from agentic_ring.training.fre import FREConfig
from experiments.common.launch import LaunchOptions, training_outputs
from experiments.exorl import told_pipeline
from experiments.exorl.pipeline import decision_steps
from experiments.table5.presets import TablePreset

PAIRS_FROM = 512
"""Episodes from which the states are drawn that tell a zero-shot agent a task."""


@dataclass(frozen=True)
class ZeroShotRunConfig:
    """Everything that decides the training of a zero-shot agent on a domain."""

    domain: str
    preset: str
    store: str
    """Path of the trajectory store."""
    action_repeat: int
    """Control steps per decision."""
    scaling: Scaling
    rewards: int
    """Number of reward functions that are drawn, before those like a task are left out; FB uses none."""
    learner: FREConfig | ForwardBackwardConfig


@dataclass(frozen=True)
class ZeroShotTaskConfig:
    """Everything that decides the returns of a zero-shot agent in a task."""

    task: str
    trained: ZeroShotRunConfig
    evaluation: EvaluationConfig


@dataclass(frozen=True)
class ZeroShot:
    """An agent whose task is a latent, inferred from stored states and their rewards."""

    config_kind: ClassVar[type[Dataclass]] = ZeroShotTaskConfig
    trained_kind: ClassVar[type[Dataclass]] = ZeroShotRunConfig
    paper: ClassVar[None] = None
    trajectories: ClassVar[int] = 1
    model: Literal["fre", "fb"]
    """Name of what is trained; methods that share it share the training."""
    title: str
    """Title of its column."""

    @property
    def name(self) -> str:
        """As on the command line."""
        return self.model

    def resolve_training(
        self, preset: TablePreset, domain: Domain, store: Path, seed: int
    ) -> ZeroShotRunConfig:
        """Everything that decides the training on a domain."""
        with TrajectoryStore.open(store) as opened:
            repeat = decision_steps(opened, preset.chains.action_repeat.get(domain.name, 1))
            scaling = measure_scaling(opened, domain.tasks[0], repeat)
        learner, rewards = (
            (preset.encoding, preset.told.rewards) if self.model == "fre" else (preset.forward_backward, 0)
        )
        learner = replace(learner, seed=seed)
        return ZeroShotRunConfig(
            domain.name, preset.chains.name, str(store), repeat, scaling, rewards, learner
        )

    def train(self, config: ZeroShotRunConfig, directory: Path) -> None:
        """Trains on the domain, from the newest checkpoint if there is one."""
        data, learner = _read(config.store, config.scaling, config.action_repeat), config.learner
        with training_outputs(directory, config) as outputs:
            if isinstance(learner, ForwardBackwardConfig):
                forward_backward.train_forward_backward(learner, data, _first_device(), *outputs)
            else:
                drawn = draw_training_rewards(domain_named(config.domain), data, config.rewards, learner.seed)
                fre.train_fre(learner, data, drawn.kept, _first_device(), *outputs)

    def resolve(self, preset: TablePreset, task: Task, store: Path, seed: int) -> ZeroShotTaskConfig:
        """Everything that decides the result of a cell."""
        trained = self.resolve_training(preset, task.domain, store, seed)
        return ZeroShotTaskConfig(task.full_name, trained, EvaluationConfig(trials=preset.chains.trials))

    def policies(self, config: ZeroShotTaskConfig, trained: Path) -> Sequence[TrialPolicy]:
        """The policy of the model in the folder ``trained``; each environment has pairs of its own."""
        run, evaluation, task = config.trained, config.evaluation, parse_task(config.task)
        generator, mesh, learner = np.random.default_rng(evaluation.first_seed), _first_device(), run.learner
        with TrajectoryStore.open(run.store) as store:
            some = generator.permutation(store.num_episodes)[:PAIRS_FROM]
            states = ToldDecisions.of_store(store, run.scaling, run.action_repeat, some)
        relabelled = RelabelledStates(states, [task_reward(task)])
        functions = relabelled.draw_functions(generator, evaluation.environments)
        pairs = relabelled.pairs(generator, functions, learner.pairs)
        folder, dims = trained / "checkpoints", (task.domain.observation_dim, task.domain.action_dim)
        with jax.set_mesh(mesh):
            if isinstance(learner, ForwardBackwardConfig):
                params = forward_backward.load_forward_backward(folder, learner, *dims, mesh)
                latent = forward_backward.infer(params, *pairs)
            else:
                params = fre.load_fre(folder, learner, *dims, mesh)
                latent = fre.encode(learner, params, *pairs)
        choose = partial(jax.jit(act_on_latent), params["actor"], latent)
        return [ReactivePolicy(lambda seen: np.asarray(choose(seen)), run.scaling)]

    def action_repeat(self, config: ZeroShotTaskConfig) -> int:
        """Control steps per decision."""
        return config.trained.action_repeat


@dataclass(frozen=True)
class ToldTaskConfig:
    """Everything that decides the returns in a task that relabelled trajectories tell."""

    task: str
    trained: ToldRunConfig
    """Its task is the domain's first one, and plays no part in training."""
    trajectories: int
    """Number of stored trajectories in context before the first trial."""
    evaluation: EvaluationConfig


@dataclass(frozen=True)
class Told:
    """The Agentic Transformer of ``--conditioning context``: relabelled trajectories tell the task."""

    config_kind: ClassVar[type[Dataclass]] = ToldTaskConfig
    trained_kind: ClassVar[type[Dataclass]] = ToldRunConfig
    model: ClassVar[str] = "told"
    """As in ``ZeroShot``."""
    paper: ClassVar[None] = None
    trajectories: int
    """Number of stored trajectories in context before the first trial."""

    @property
    def name(self) -> str:
        """Such as told_32."""
        return f"told_{self.trajectories}"

    @property
    def title(self) -> str:
        """Such as "told, 32"."""
        return f"told, {self.trajectories}"

    def resolve_training(self, preset: TablePreset, domain: Domain, store: Path, seed: int) -> ToldRunConfig:
        """Everything that decides the training on a domain: that of the main job."""
        mesh = told_pipeline.told_mesh(preset.told, LaunchOptions())
        return told_pipeline.resolve(preset.told, Task(domain, domain.tasks[0]), store, mesh, seed, None)

    def train(self, config: ToldRunConfig, directory: Path) -> None:
        """Trains on the domain, from the newest checkpoint if there is one."""
        domain = parse_task(config.task).domain
        data, _ = _read(config.store, config.scaling, config.chains.action_repeat).split(config.held_back)
        drawn = draw_training_rewards(domain, data, config.rewards, config.chains.seed)
        mesh = mesh_on_first_devices(config.mesh)
        chains = told_pipeline.told_chains(domain, data, drawn.kept, config.chains, mesh)
        told_pipeline.train_on(chains, config, config.training, mesh, directory)

    def resolve(self, preset: TablePreset, task: Task, store: Path, seed: int) -> ToldTaskConfig:
        """Everything that decides the result of a cell."""
        trained = self.resolve_training(preset, task.domain, store, seed)
        evaluation = EvaluationConfig(trials=preset.chains.trials)
        return ToldTaskConfig(task.full_name, trained, self.trajectories, evaluation)

    def policies(self, config: ToldTaskConfig, trained: Path) -> Sequence[TrialPolicy]:
        """The policy of the model in the folder ``trained``; each environment has a context of its own."""
        run, evaluation = config.trained, config.evaluation
        generators = context_generators(evaluation.first_seed, evaluation.environments)
        with TrajectoryStore.open(run.store) as store:
            told = run.held_back or store.num_episodes
            drawn = draw_contexts(generators, told, config.trajectories, run.store)
            numbers, places = np.unique(store.num_episodes - told + drawn, return_inverse=True)
            data = ToldDecisions.of_store(store, run.scaling, run.chains.action_repeat, numbers)
        stored = places.reshape(drawn.shape)
        scales, rewards = as_told(run.chains, data.rewards(task_reward(parse_task(config.task)))[stored])
        mesh = mesh_on_first_devices(run.mesh)
        params, _ = load_params(trained, run, mesh)
        policy = told_policy(run, params, mesh, scales, evaluation.trials, evaluation.first_seed)
        policy.start_over(told_prompt(run.chains, data.observation[stored], data.action[stored], rewards))
        return [policy]

    def action_repeat(self, config: ToldTaskConfig) -> int:
        """Control steps per decision."""
        return config.trained.chains.action_repeat


def _first_device() -> Mesh:
    return make_mesh(MeshShape(), jax.devices()[:1])


def _read(path: str, scaling: Scaling, action_repeat: int) -> ToldDecisions:
    with TrajectoryStore.open(path) as store:
        return ToldDecisions.of_store(store, scaling, action_repeat)
