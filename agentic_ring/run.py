"""The configuration of a run, and the contents of its folder.

runs/NAME/config.json      everything that decides the result, written before training starts
          metrics.jsonl    one row per logged step
          checkpoints/     the newest and the best one
          stages.json      seconds spent in each stage, over all sessions
          results.json     the figures; the plots are beside it
          evaluation.npz   the trials of one environment and the returns of the data, for the report
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentic_ring.data.chain_loader import ChainConfig
from agentic_ring.data.domains import parse_task
from agentic_ring.data.store import TARGET_QUANTILE, Scaling
from agentic_ring.data.told_chains import ToldChainConfig
from agentic_ring.errors import ConfigError, DataError, check_at_least_one
from agentic_ring.files.run_folder import read_config
from agentic_ring.mesh import MeshShape
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.training.optimizer import TrainConfig


@dataclass(frozen=True)
class EvaluationConfig:
    """How a trained model is rolled out."""

    trials: int
    """Number of rollouts in a row, each with all earlier ones in context."""
    prompt_trajectories: int = 0
    """Number of stored trajectories in context before the first trial, in ascending return."""
    environments: int = 16
    """Number of parallel environments, each with its own seed; the intervals are over them."""
    first_seed: int = 10_000
    """Seed of the first environment; it and the trial's number determine the initial states."""
    target_quantile: float = TARGET_QUANTILE
    """Every trial aims at this quantile of the training returns, see ``target_return``."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "trials", "environments")
        for name in ("prompt_trajectories", "first_seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if not 0 <= self.target_quantile <= 1:
            raise ConfigError(f"target_quantile is {self.target_quantile}; expected a share in [0, 1]")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's result."""

    task: str
    """Full name, such as ``walker_run``."""
    preset: str
    store: str
    """Path of the trajectory store."""
    mesh: MeshShape
    chains: ChainConfig
    scaling: Scaling
    model: AgenticTransformerConfig
    training: TrainConfig
    evaluation: EvaluationConfig
    target: float
    """Return that the trials aim at: ``target_quantile`` of the training returns."""
    start: str | None = None
    """Folder of the finished run, or of the policy, whose weights training begins with; None draws them."""

    @property
    def decisions(self) -> int:
        """Number of decisions per trial."""
        return parse_task(self.task).domain.decisions(self.chains.action_repeat)


@dataclass(frozen=True)
class ToldEvaluation:
    """How a model that relabelled trajectories tell the task is rolled out."""

    contexts: tuple[int, ...] = (0, 4, 16, 32, 128)
    """Numbers of stored trajectories in context, ascending from 0. Trials follow the last; before it they are
    single ones."""
    trials: int = 4
    """Number of trials in a row, with nothing stored in context and after the largest context."""
    environments: int = 16
    """Number of parallel environments, each with its own seed and stored trajectories; the intervals are over
    them."""
    first_seed: int = 10_000
    """Seed of the first environment; it and the trial's number determine the initial states."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "trials", "environments")
        ascending = all(a < b for a, b in pairwise(self.contexts))
        if len(self.contexts) < 2 or self.contexts[0] != 0 or not ascending:
            raise ConfigError(f"contexts are {self.contexts}; expected 0 and larger numbers, ascending")
        if self.first_seed < 0:
            raise ConfigError(f"first_seed is {self.first_seed}; it must be at least 0")


@dataclass(frozen=True)
class ToldRunConfig:
    """Everything that decides the result of a run in which relabelled trajectories tell the task."""

    task: str
    """Full name of the task that it is evaluated on; see ``task_share`` of the chains."""
    preset: str
    store: str
    """Path of the trajectory store."""
    mesh: MeshShape
    chains: ToldChainConfig
    rewards: int
    """Number of reward functions that are drawn for training, before those like a task are left out."""
    scaling: Scaling
    model: AgenticTransformerConfig
    training: TrainConfig
    clone_chains: ToldChainConfig
    """Chains of the model that is compared with, which is trained on the evaluated task alone."""
    clone_training: TrainConfig
    evaluation: ToldEvaluation
    held_back: int = 0
    """Number of trajectories, the last of the store, that are not trained on: contexts of the evaluation are
    drawn from them. With 0 all are trained on, and contexts are drawn from all."""


def load_any_config(directory: Path) -> RunConfig | ToldRunConfig:
    """Reads ``config.json``; a DataError if there is none, or it is not the configuration of a run."""
    fields = read_config(directory, dict[str, Any])
    return read_config(directory, ToldRunConfig if "clone_chains" in fields else RunConfig)


def load_config(directory: Path) -> RunConfig:
    """Does as ``load_any_config``; a DataError too if trajectories tell the task in this run."""
    config = load_any_config(directory)
    if isinstance(config, ToldRunConfig):
        raise _other_kind(directory, "context", "return")
    return config


def load_told_config(directory: Path) -> ToldRunConfig:
    """Does as ``load_any_config``; a DataError too if a target return says what to do in this run."""
    config = load_any_config(directory)
    if isinstance(config, RunConfig):
        raise _other_kind(directory, "return", "context")
    return config


def _other_kind(directory: Path, found: str, expected: str) -> DataError:
    return DataError(
        f"{directory} holds a run of --conditioning {found}, but one of --conditioning {expected} is needed; "
        "give another folder. agentic_ring.load_policy, evals/dmc_returns.py and evals/report.py take both"
    )
