"""Returns of policies in dm_control: rollouts of all trials, the figures of them, and their record.

``evaluation.npz`` holds data and first rollout of an evaluation, so that a report needs no new rollout:

    data_returns     float64 [N]            of the training trajectories
    data_algorithms  string [N]             algorithm that collected each of them
    observation      float32 [K, T, O]      of the first environment, in K trials of T decisions
    action           float32 [K, T, A]
    reward           float32 [K, T]         of each decision
    physics          float64 [K, T + 1, P]  MuJoCo's state before each decision and after the last

An action is repeated for ``action_repeat`` control steps: that is one decision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from gymnasium.vector import SyncVectorEnv
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from agentic_ring.data.domains import Task, parse_task
from agentic_ring.data.gymnasium_environments import shared_environments
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.trajectories import Episode
from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.npz_files import read_npz
from agentic_ring.models.model import Model, Params
from agentic_ring.results.intervals import Interval, mean_interval
from agentic_ring.results.results_file import Figure
from agentic_ring.rollouts.policies import in_context_policies, without_context
from agentic_ring.rollouts.trials import Cohort, PolicyWrapper, RandomPolicy, TrialPolicy, run_trials
from agentic_ring.run import EvaluationConfig, RunConfig

CONTEXT_MARGIN = 0.05
"""The context helps if the lower bound of its gain exceeds this share of the target."""
DATA_QUANTILES = {"p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9, "best": 1.0}
FILE_NAME = "evaluation.npz"
_MOST_BYTES = 1 << 30
"""Limit for all arrays; 128 trials of 1000 decisions of the largest domain take a tenth of it."""


@dataclass(frozen=True)
class Rollout:
    """The trials of one environment; the module's docstring has the shapes."""

    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    physics: np.ndarray

    @classmethod
    def of_episodes(cls, episodes: Sequence[Episode], action_repeat: int) -> Self:
        """The decisions of whole episodes, one trial each."""
        first = np.arange(0, len(episodes[0]), action_repeat)
        return cls(
            np.stack([each.observation[first] for each in episodes]),
            np.stack([each.action[first + 1] for each in episodes]),
            np.stack([np.add.reduceat(each.reward[1:, 0], first) for each in episodes]),
            np.stack([each.physics[[*first, -1]] for each in episodes]),
        )


@dataclass(frozen=True)
class EvaluationRecord:
    """The content of an ``evaluation.npz``."""

    data_returns: np.ndarray
    data_algorithms: np.ndarray
    rollout: Rollout


@dataclass(frozen=True)
class ReturnReport:
    """Undiscounted returns of the model, and those that they are compared with."""

    trials: np.ndarray
    """float64 [E, trials], each with all earlier ones in context."""
    no_context: np.ndarray
    """float64 [E, trials] of the same trials, each with an empty context."""
    random_policy: np.ndarray
    """float64 [E, trials] of uniform random actions in the same environments."""
    data: np.ndarray
    """float64 [episodes] of the training data."""
    target: float
    """Return that every trial was conditioned on."""
    rollout: Rollout
    """That of the first environment."""

    def figures(self, paper: float | None = None) -> list[Figure]:
        """All returns as figures; ``paper`` is the paper's value of the last and of the best trial."""
        quantiles = {name: float(np.quantile(self.data, at)) for name, at in DATA_QUANTILES.items()}
        random_policy = mean_interval(self.random_policy.mean(axis=1), "environments")
        return [
            Figure.from_interval("return/random_policy", random_policy, "return"),
            *(
                Figure(f"return/data_{name}", x, "return", n=len(self.data), over="trajectories")
                for name, x in quantiles.items()
            ),
            Figure("return/target", self.target, "return"),
            *trial_figures(self.trials, paper),
            *_numbered("return/control/no_context/trial_", self.no_context),
            Figure.from_interval("return/context_gain", self.context_gain, "return"),
        ]

    @property
    def context_gain(self) -> Interval:
        """Return that the context adds to the trials after the first, paired by environment."""
        gain = self.trials - self.no_context
        return mean_interval(gain[:, min(1, gain.shape[1] - 1) :].mean(axis=1), "environments")

    def verdict(self) -> str:
        """One sentence that says whether the context helps."""
        gain, margin = self.context_gain, CONTEXT_MARGIN * self.target
        low = gain.value if gain.low is None else gain.low
        return (
            f"context: trials after the first return {gain:.1f} more with the earlier trials "
            f"in context than without; it {'helps' if low > margin else 'is not shown to help'} (required: "
            f"more than {margin:.1f}, which is {CONTEXT_MARGIN:.0%} of the target)"
        )


def trial_intervals(returns: np.ndarray) -> list[Interval]:
    """Mean over the environments, with its interval, of each trial of returns [E, trials]."""
    return [mean_interval(trial, "environments") for trial in returns.T]


def _numbered(prefix: str, returns: np.ndarray) -> list[Figure]:
    trials = enumerate(trial_intervals(returns), start=1)
    return [Figure.from_interval(f"{prefix}{number}", trial, "return") for number, trial in trials]


def trial_figures(returns: np.ndarray, paper: float | None = None) -> list[Figure]:
    """Figures of returns [E, trials]: each trial, the last one, and the mean of each environment's best."""
    last, best = trial_intervals(np.stack([returns[:, -1], returns.max(axis=1)], axis=1))
    return [
        *_numbered("return/trial_", returns),
        Figure.from_interval("return/last_trial", last, "return", paper),
        Figure.from_interval("return/best_of_trials", best, "return", paper),
    ]


def evaluate_returns(
    config: RunConfig, model: Model, params: Params, mesh: Mesh, data: np.ndarray | None = None
) -> ReturnReport:
    """Rolls out the model, with and without context, and the random policy, in the same environments.

    ``data`` are the returns of the training trajectories; None reads them from the store.
    """
    task = parse_task(config.task)
    evaluation, action_repeat = config.evaluation, config.chains.action_repeat
    if data is None:
        with TrajectoryStore.open(config.store) as store:
            data = store.returns(task.name)
    random_policy = RandomPolicy(evaluation.environments, task.domain.action_dim, evaluation.first_seed)
    policies = in_context_policies(config, model, params, mesh)
    random_returns, _ = roll_out([random_policy], "random policy", task, action_repeat, evaluation)
    returns, rollout = roll_out(policies, "agentic transformer", task, action_repeat, evaluation)
    control, _ = roll_out(without_context(policies), "same without context", task, action_repeat, evaluation)
    return ReturnReport(returns, control, random_returns, data, config.target, rollout)


def roll_out(
    policies: Sequence[TrialPolicy], name: str, task: Task, action_repeat: int, evaluation: EvaluationConfig
) -> tuple[np.ndarray, Rollout]:
    """Rolls out policies in the environments that every method is evaluated in.

    Args:
      policies: each acts in an equal share of the environments, as a cohort.
      name: label of the progress bar.

    Returns:
      Undiscounted returns float64 [E, trials], and the rollout of the first environment.
    """
    decisions = task.domain.decisions(action_repeat)
    environments = shared_environments(
        task, evaluation.first_seed, evaluation.environments, len(policies), action_repeat
    )
    recorded = RecordingPolicy(policies[0], environments[0])
    cohorts = list(map(Cohort, [recorded, *policies[1:]], environments))
    try:
        returns = run_trials(f"rolling out the {name}", cohorts, evaluation.trials, decisions)
    finally:
        for each in environments:
            each.close()
    return returns, recorded.rollout()


class RecordingPolicy(PolicyWrapper[TrialPolicy]):
    """Acts as ``policy`` does in ``environments`` of ``make_environments``, and records the first one."""

    def __init__(self, policy: TrialPolicy, environments: SyncVectorEnv):
        super().__init__(policy)
        self._environments = environments
        self._trials = 0
        self._record: dict[str, list[np.ndarray]] = {name: [] for name in Rollout.__dataclass_fields__}
        self._action: ArrayLike

    def act(self, observation: np.ndarray) -> ArrayLike:
        self._record["observation"].append(observation[0].copy())
        self._record["physics"].append(self._environments.call("physics_state")[0])
        self._action = super().act(observation)
        return self._action

    def receive(self, reward: np.ndarray, last: bool) -> None:
        self._record["action"].append(np.asarray(self._action)[0].copy())
        self._record["reward"].append(reward[0])
        if last:
            self._trials += 1
            self._record["physics"].append(self._environments.call("physics_state")[0])
        super().receive(reward, last)

    def rollout(self) -> Rollout:
        """All trials so far; each must have ended."""
        joined = {name: np.array(values) for name, values in self._record.items()}
        return Rollout(**{name: x.reshape(self._trials, -1, *x.shape[1:]) for name, x in joined.items()})


def write_record(directory: Path, record: EvaluationRecord) -> None:
    """Writes the run's ``evaluation.npz`` atomically."""
    arrays = vars(record) | vars(record.rollout)
    del arrays["rollout"]
    with replacing(directory / FILE_NAME) as beside, beside.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_record(directory: Path) -> EvaluationRecord | None:
    """Reads the run's ``evaluation.npz``; None if the run has none.

    Raises:
      DataError: it is damaged, or its arrays have other names, dtypes or shapes, or values that are not
      finite.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return None
    try:
        arrays = read_npz(path, _MOST_BYTES)
        _check(arrays)
    except DataError as error:
        raise DataError(
            f"{path} cannot be read: {error}; run the experiment again, which repeats the evaluation"
        ) from error
    return EvaluationRecord(arrays.pop("data_returns"), arrays.pop("data_algorithms"), Rollout(**arrays))


# Kind of dtype and shape of each array; a letter stands for a free size.
_FORMAT = {
    "data_returns": ("f", "N"),
    "data_algorithms": ("U", "N"),
    "observation": ("f", "KTO"),
    "action": ("f", "KTA"),
    "reward": ("f", "KT"),
    "physics": ("f", "KSP"),
}


def _check(arrays: dict[str, np.ndarray]) -> None:
    if set(arrays) != set(_FORMAT):
        raise DataError(f"it holds {', '.join(sorted(arrays)) or 'nothing'}; expected {', '.join(_FORMAT)}")
    sizes: dict[str, int] = {}
    for name, (kind, shape) in _FORMAT.items():
        array = arrays[name]
        fits = array.dtype.kind == kind and array.ndim == len(shape) and array.size > 0
        if not fits or any(
            sizes.setdefault(letter, n) != n for letter, n in zip(shape, array.shape, strict=True)
        ):
            raise DataError(
                f"{name} is {array.dtype} {list(array.shape)}; expected kind {kind!r} and shape "
                f"[{', '.join(shape)}], where {sizes}"
            )
        if kind == "f" and not np.isfinite(array).all():
            raise DataError(f"{name} holds values that are not finite")
    if sizes["S"] != sizes["T"] + 1:
        raise DataError(f"physics has {sizes['S']} rows per trial; expected {sizes['T'] + 1}")
