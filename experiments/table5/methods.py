"""The methods of Table 5, in the registry ``METHODS``: how each is configured, trained and rolled out.

All use the same data of a task, the same environments and the same training seeds. The methods of
``domain_methods`` train once for all tasks of a domain, the others for each task.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.data.domains import Task, parse_task
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.transition_dataset import RandomBatches, best_episodes, read_transitions
from agentic_ring.errors import UnknownNameError
from agentic_ring.files.run_folder import Dataclass
from agentic_ring.inference.baseline_policies import ReactivePolicy, WindowPolicy
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.baselines import BehaviorCloningConfig, DecisionTransformerConfig, window_loss
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.rollouts.policies import in_context_policies
from agentic_ring.rollouts.trials import RandomPolicy, TrialPolicy
from agentic_ring.run import EvaluationConfig, RunConfig
from agentic_ring.training.loop import train
from agentic_ring.training.optimizer import TrainConfig
from agentic_ring.training.td3 import OfflineTD3Config, TD3State, act, train_td3
from agentic_ring.training.train_step import TrainState
from evals.compile.llama_step import CHUNK
from evals.compile.llama_step import Method as Attention
from experiments.common.launch import training_outputs
from experiments.exorl.pipeline import DataFacts, measure_data, resolve, train_on_store
from experiments.table5.domain_methods import Told, ZeroShot
from experiments.table5.presets import TablePreset

TRAJECTORIES = (4, 32, 128)
MeasurePolicies = Callable[[Sequence[TrialPolicy]], dict[str, float]]
"""Rolls out policies that are still trained, for the learning curve."""


@dataclass(frozen=True)
class WindowLearner:
    """Behaviour cloning or a Decision Transformer, on windows of the last decisions.

    ``best_share`` is the share of the steps in which a policy acted that is imitated, from the best episodes.
    """

    model: DecisionTransformerConfig | BehaviorCloningConfig
    best_share: float
    training: TrainConfig


@dataclass(frozen=True)
class BaselineConfig:
    """Everything that decides a baseline's result; without a learner it is the random policy of ``seed``."""

    task: str
    preset: str
    store: str
    data: DataFacts
    evaluation: EvaluationConfig
    learner: WindowLearner | OfflineTD3Config | None
    seed: int = 0


@dataclass(frozen=True)
class Baseline:
    """A method without earlier trajectories in context."""

    config_kind: ClassVar[type[Dataclass]] = BaselineConfig
    trajectories: ClassVar[int] = 1

    name: str
    """As on the command line."""
    title: str
    """Title of its column."""
    kind: Literal["random", "bc", "dt", "td3"]
    paper: str | None = None
    """Title of its column in the paper; None if it has none."""
    best_share: float = 1.0
    """See ``WindowLearner``; only for bc and dt."""
    bc_alpha: float | None = None
    """See ``TD3Config``; only for td3."""

    def resolve(self, preset: TablePreset, task: Task, store: Path, seed: int) -> BaselineConfig:
        """Everything that decides the result of a cell."""
        evaluation = EvaluationConfig(trials=preset.chains.trials)
        data = measure_data(preset.chains, task, store, evaluation.target_quantile)
        dims = task.domain.observation_dim, task.domain.action_dim
        match self.kind:
            case "random":
                learner = None
            case "td3":
                values = replace(preset.values.learner, bc_alpha=self.bc_alpha)
                learner = replace(preset.values, learner=values, seed=seed)
            case "bc":
                training = replace(preset.cloning, seed=seed)
                learner = WindowLearner(BehaviorCloningConfig(*dims), self.best_share, training)
            case "dt":
                training = replace(preset.decision, seed=seed)
                model = DecisionTransformerConfig(*dims, max_timestep=data.longest)
                learner = WindowLearner(model, self.best_share, training)
        return BaselineConfig(task.full_name, preset.chains.name, str(store), data, evaluation, learner, seed)

    def train(
        self, config: BaselineConfig, directory: Path, measure: MeasurePolicies
    ) -> Sequence[TrialPolicy]:
        """Trains the method, from its newest checkpoint if there is one; returns its policy."""
        evaluation, data, learner = config.evaluation, config.data, config.learner
        task = parse_task(config.task)
        if learner is None:
            seed = evaluation.first_seed + config.seed
            return [RandomPolicy(evaluation.environments, task.domain.action_dim, seed)]
        with TrajectoryStore.open(config.store) as store:
            episodes = np.arange(store.num_episodes)  # noise as well: values need no policy behind the data
            if isinstance(learner, WindowLearner):
                returns, share = store.returns(task.name), learner.best_share
                episodes = best_episodes(returns, store.lengths, store.learnable, share)
            dataset = read_transitions(store, task.name, data.action_repeat, data.scaling, episodes)
        mesh = make_mesh(MeshShape(), jax.devices()[:1])
        with training_outputs(directory, config) as outputs:
            if isinstance(learner, OfflineTD3Config):

                def reactive(state: TD3State) -> Sequence[TrialPolicy]:
                    def action(seen: np.ndarray) -> np.ndarray:
                        return np.asarray(act(state.actor, seen[None]))[0]

                    return [ReactivePolicy(action, data.scaling)]

                return reactive(train_td3(learner, dataset, mesh, *outputs, lambda s: measure(reactive(s))))
            model: Model[Any] = Model(learner.model)
            training, window = learner.training, learner.model.window
            extent = "last" if isinstance(learner.model, BehaviorCloningConfig) else "all"

            def windowed(state: TrainState) -> Sequence[TrialPolicy]:
                return [WindowPolicy(model, state.params, data.scaling, data.target, evaluation.environments)]

            rows = training.batch_size
            batches = RandomBatches(lambda rng: dataset.windows(rng, rows, window, extent), training.seed)
            learning = training, model, window_loss, batches, mesh, *outputs
            return windowed(train(*learning, measure=lambda state: measure(windowed(state))))

    def action_repeat(self, config: BaselineConfig) -> int:
        """Control steps per decision."""
        return config.data.action_repeat


@dataclass(frozen=True)
class Agentic:
    """The Agentic Transformer; the four attention methods differ in memory, not in what they compute."""

    config_kind: ClassVar[type[Dataclass]] = RunConfig
    attention: Attention
    """See ``evals.compile.llama_step``."""
    trajectories: int
    """Trajectories of a chain, including the current one."""
    paper: str | None = None
    """As in ``Baseline``."""

    @property
    def name(self) -> str:
        """Such as at_ring_4."""
        return f"at_{self.attention}_{self.trajectories}"

    @property
    def title(self) -> str:
        """Such as AT ring, 4."""
        return f"AT {self.attention.replace('_', ' ')}, {self.trajectories}"

    def transformer(self, config: TransformerConfig, devices: int) -> TransformerConfig:
        """The transformer with this attention method on ``devices`` devices."""
        chunked = self.attention in ("blockwise", "ring")
        return replace(
            config,
            ffn_chunk=(config.ffn_chunk or CHUNK) if chunked else None,
            attention_strategy="ring" if self.attention == "ring" and devices > 1 else "auto",
            attention_kernel="vanilla" if self.attention == "vanilla" else "auto",
        )

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """A ring of all devices; for other attention methods one chain per device."""
        return make_mesh(MeshShape() if self.attention == "ring" else MeshShape(fsdp=len(devices)), devices)

    def devices(self) -> Sequence[Any]:
        """The local devices; only a ring uses several simulated ones, as they share a CPU."""
        devices = jax.devices()
        return devices if self.attention == "ring" or devices[0].platform != "cpu" else devices[:1]

    def resolve(self, preset: TablePreset, task: Task, store: Path, seed: int) -> RunConfig:
        """Everything that decides the result of a cell."""
        devices = self.devices()
        chains = preset.chains.with_trajectories(self.trajectories)
        chains = replace(chains, transformer=self.transformer(chains.transformer, len(devices)))
        return resolve(chains, task, store, self.mesh(devices), "leaders", seed)

    def train(self, config: RunConfig, directory: Path, measure: MeasurePolicies) -> Sequence[TrialPolicy]:
        """Trains the method likewise; returns policies that share the environments evenly."""
        model, mesh = Model(config.model), self.mesh(self.devices())

        def policies(state: TrainState) -> Sequence[TrialPolicy]:
            return in_context_policies(config, model, state.params, mesh)

        trained = train_on_store(config, model, mesh, directory, measure=lambda s: measure(policies(s)))
        return policies(trained)

    def action_repeat(self, config: RunConfig) -> int:
        """Control steps per decision."""
        return config.chains.action_repeat


DomainMethod = ZeroShot | Told
Method = Baseline | Agentic | DomainMethod

_PAPER = {
    ("memory_efficient", 32): "AT+ME (32 trajectories)",
    ("blockwise", 32): "AT+BPT (32)",
    ("blockwise", 128): "AT+BPT (128)",
    ("ring", 128): "AT+RA (128)",
}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Baseline("random", "random", "random"),
        Baseline("bc", "BC", "bc"),
        Baseline("bc3", "BC-3%", "bc", best_share=0.03),
        Baseline("bc10", "BC-10%", "bc", paper="BC-10%", best_share=0.1),
        Baseline("dt", "DT", "dt", paper="DT"),
        Baseline("td3", "TD3", "td3"),
        Baseline("td3_bc", "TD3+BC", "td3", bc_alpha=2.5),
        *(
            Agentic(attention, count, _PAPER.get((attention, count)))
            for count in TRAJECTORIES
            for attention in get_args(Attention)
        ),
        ZeroShot("fre", "FRE"),
        ZeroShot("fb", "FB"),
        Told(32),
        Told(128),
    )
}
DOMAIN_MODELS = {method.model: method for method in METHODS.values() if isinstance(method, DomainMethod)}
"""A method of each model that is trained once for a domain, by the model's name."""
AGENTIC = {name: method for name, method in METHODS.items() if isinstance(method, Agentic)}


def method_named(name: str) -> Method:
    """The method of this name; an UnknownNameError if there is none."""
    if name not in METHODS:
        raise UnknownNameError("method", name, tuple(METHODS))
    return METHODS[name]
