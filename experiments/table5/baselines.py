"""Configuration and training of the baselines of Table 5."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.tasks import parse_task
from agentic_ring.data.transition_dataset import (
    RandomBatches,
    TransitionDataset,
    best_episodes,
    read_transitions,
)
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.baselines import BehaviorCloningConfig, DecisionTransformerConfig
from agentic_ring.models.model import Model, Params
from agentic_ring.run import EvaluationConfig
from agentic_ring.training.loop import Measure, train
from agentic_ring.training.losses import window_loss
from agentic_ring.training.td3 import OfflineTD3Config, TD3State, train_td3
from agentic_ring.training.train_config import TrainConfig
from experiments.common.training_outputs import training_outputs
from experiments.exorl.pipeline import DataFacts


@dataclass(frozen=True)
class WindowLearner:
    """Behaviour cloning or a Decision Transformer, on windows of the last decisions.

    Attributes:
      best_share: share of the steps in which a policy acted that is imitated, taken from the best episodes.
      training: length and settings of the training.
    """

    model: DecisionTransformerConfig | BehaviorCloningConfig
    best_share: float
    training: TrainConfig


@dataclass(frozen=True)
class BaselineConfig:
    """Everything that decides a baseline's result.

    Attributes:
      learner: the learner that is trained; None is the random policy.
      seed: seed of the random policy; a learner has its own.
    """

    task: str
    preset: str
    store: str
    data: DataFacts
    evaluation: EvaluationConfig
    learner: WindowLearner | OfflineTD3Config | None
    seed: int = 0


def train_windows(
    config: BaselineConfig, learner: WindowLearner, model: Model, directory: Path, measure: Measure
) -> Params:
    """Trains behaviour cloning or a Decision Transformer, from its newest checkpoint if there is one."""
    task = parse_task(config.task).name
    with TrajectoryStore.open(config.store) as store:
        chosen = best_episodes(store.returns(task), store.lengths, store.learnable, learner.best_share)
        data = _transitions(store, config, chosen)
    extent = "last" if isinstance(learner.model, BehaviorCloningConfig) else "all"
    training = learner.training
    batches = RandomBatches(
        lambda generator: data.windows(generator, training.batch_size, learner.model.window, extent),
        training.seed,
    )
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    with training_outputs(directory, config) as outputs:
        return train(training, model, window_loss, batches, mesh, *outputs, measure=measure).params


def train_values(
    config: BaselineConfig,
    learner: OfflineTD3Config,
    directory: Path,
    measure: Callable[[TD3State], dict[str, float]],
) -> TD3State:
    """Trains TD3 or TD3+BC on all episodes, noise included: values need no policy behind the data."""
    with TrajectoryStore.open(config.store) as store:
        data = _transitions(store, config, np.arange(store.num_episodes))
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    with training_outputs(directory, config) as outputs:
        return train_td3(learner, data, mesh, *outputs, measure)


def _transitions(store: TrajectoryStore, config: BaselineConfig, episodes: np.ndarray) -> TransitionDataset:
    task = parse_task(config.task).name
    return read_transitions(store, task, config.data.action_repeat, config.data.scaling, episodes)
