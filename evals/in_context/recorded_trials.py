"""Recorded trials of a trained model in a few tasks: physics, rewards, and attention by cue and by pay."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from agentic_ring.data.families import Family
from agentic_ring.data.families.environments import CueEnvironments, make_cue_environments
from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.npz_files import read_npz
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.inference.sampling import Sampling
from agentic_ring.models.agentic_transformer import ChainSteps
from agentic_ring.rollouts.policies import RolloutPlan, TrialWindowPolicy, as_prompt
from agentic_ring.rollouts.trials import Cohort, run_shown_trials
from agentic_ring.terminal.progress import progress
from evals.in_context.rollouts import CueRolloutConfig, TrainedArm
from evals.in_context.verdict import BLOCK
from evals.report_page.attention_over_trials import attention_over_trials

FILE_NAME = "recorded_trials.npz"
TASKS = 8
"""Largest number of tasks that are recorded."""
_TOKENS = 2**16
"""Largest number of tokens of all chains whose attention is computed; one chain is always affordable."""
GROUPS = (
    "same cue, paid well",
    "same cue, paid little",
    "other cue, paid well",
    "other cue, paid little",
    "current trial",
)
"""Groups of the trials in context. A trial is paid well if its return is above the median of the context."""
_CURRENT = GROUPS.index("current trial")
_MOST_BYTES = 1 << 28


@dataclass(frozen=True, eq=False)
class RecordedTrials:
    """T trials of D decisions in each of E tasks.

    Attributes:
      physics: float32 [E, T, D + 1, P], the states at the beginning and after each decision.
      reward: float32 [E, T, D].
      cue: int64 [E, T], the cue of each trial.
      goal: float64 [E, T, G], the goal of that cue.
      attention: float32 [E, layers, heads, 5], the shares of attention of the actions of the last 16 trials
        that lie on the ``GROUPS``; their sum is 1.
      even: float32 [E, 5], the same shares under uniform attention.
    """

    physics: np.ndarray
    reward: np.ndarray
    cue: np.ndarray
    goal: np.ndarray
    attention: np.ndarray
    even: np.ndarray


class _Recorder:
    """Acts as a policy with a window of whole trials does, and keeps states, rewards and steps."""

    def __init__(self, policy: InContextPolicy, window: int, environments: CueEnvironments):
        self._policy = policy
        self._window = TrialWindowPolicy(policy, window)
        self._environments = environments
        self.physics: list[list[np.ndarray]] = []
        self.reward: list[list[np.ndarray]] = []
        self.steps: list[list[ChainSteps]] = []

    def begin_trial(self) -> None:
        """Keeps the initial states."""
        self._window.begin_trial()
        self.physics.append([self._environments.physics_states()])
        self.reward.append([])
        self.steps.append([])

    def act(self, observation: np.ndarray) -> ArrayLike:
        """Actions float32 [E, A] for observations float32 [E, O]."""
        return self._window.act(observation)

    def receive(self, reward: np.ndarray, last: bool) -> None:
        """Keeps the states after the decision and its rewards float32 [E]."""
        self._window.receive(reward, last)
        self.physics[-1].append(self._environments.physics_states())
        self.reward[-1].append(reward)
        self.steps[-1].append(self._policy.last_step)


def record_trials(arm: TrainedArm, config: CueRolloutConfig, family: Family) -> RecordedTrials:
    """Rolls a model out online in the first tasks of a rollout, and records them.

    Attention is that over a chain of the last n trials, where n is the number of trials in context. For a
    model that was trained on as many trials as are rolled out, every action saw exactly this chain.

    Args:
      arm: the model.
      config: tasks and trials.
      family: the family of the tasks.
    """
    window = min(arm.trials, config.trials)
    affordable = max(1, _TOKENS // (window * family.decisions * arm.model.config.tokens_per_step))
    tasks = replace(config, tasks=min(config.tasks, TASKS, affordable)).draw_tasks(family)
    environments = make_cue_environments(family, tasks, config.pay, arm.told)
    policy = arm.policy(
        RolloutPlan.choose(arm.mesh, len(tasks), 0).mesh,
        len(tasks),
        family.decisions * window,
        Sampling(config.temperature, seed=config.first_seed),
    )
    recorder = _Recorder(policy, window, environments)
    run_shown_trials("recording", [Cohort(recorder, environments)], config.trials, family.decisions)
    cue = np.array([[task.cue(trial) for trial in range(config.trials)] for task in tasks])
    reward = np.array(recorder.reward).transpose(2, 0, 1)
    chains = as_prompt(recorder.steps[-window:])
    assert chains is not None
    shares = []
    with progress("attention to the trials, tasks", len(tasks)) as advance:
        for row, (cues, rewards) in enumerate(zip(cue[:, -window:], reward[:, -window:], strict=True)):
            chain = chains.rows(slice(row, row + 1))
            shares.append(_attention_by_group(arm, chain, cues, rewards.sum(axis=-1)))
            advance(row + 1)
    attention, even = (np.stack(each) for each in zip(*shares, strict=True))
    return RecordedTrials(
        np.array(recorder.physics).transpose(2, 0, 1, 3),
        reward,
        cue,
        np.stack([task.goals[cues] for task, cues in zip(tasks, cue, strict=True)]),
        attention,
        even,
    )


def trial_groups(cue: np.ndarray, returns: np.ndarray) -> np.ndarray:
    """Index in ``GROUPS`` of each trial of a context as seen from each trial.

    Args:
      cue: int [T], cue of each trial.
      returns: float [T], return of each trial.

    Returns:
      int [T, T]: entry [i, j] is the group of trial j for an action of trial i.
    """
    little = returns <= np.median(returns)
    groups = 2 * (cue[:, None] != cue[None]) + little[None]
    np.fill_diagonal(groups, _CURRENT)
    return groups


def _attention_by_group(
    arm: TrainedArm, chain: ChainSteps, cue: np.ndarray, returns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean shares [layers, heads, 5] and uniform shares [5] of the actions of the last 16 trials."""
    params: Any = jax.device_get(arm.params)
    found = attention_over_trials(arm.model, params, chain, max(0, len(cue) - BLOCK))
    member = np.eye(len(GROUPS), dtype=np.float32)[trial_groups(cue, returns)[found.trajectory]]
    actions = len(found.trajectory)
    return (
        np.einsum("lhqj,qjg->lhg", found.shares, member) / actions,
        np.einsum("qj,qjg->g", found.even, member) / actions,
    )


def write_recorded_trials(path: Path, recorded: RecordedTrials) -> None:
    """Writes recorded trials, atomically."""
    with replacing(path) as beside, beside.open("wb") as file:
        np.savez(file, **vars(recorded))


def read_recorded_trials(path: Path) -> RecordedTrials:
    """Reads what ``write_recorded_trials`` wrote.

    Raises:
      DataError: the file is missing or damaged.
    """
    remedy = "delete results.json beside it and run the same command again: it records them without training"
    try:
        arrays = read_npz(path, _MOST_BYTES)
    except DataError as error:
        raise DataError(f"{path}: {error}; {remedy}") from error
    expected = list(RecordedTrials.__dataclass_fields__)
    if sorted(arrays) != sorted(expected):
        raise DataError(f"{path} holds {sorted(arrays)}; expected {sorted(expected)}; {remedy}")
    recorded = RecordedTrials(**arrays)
    tasks, trials, decisions = recorded.reward.shape if recorded.reward.ndim == 3 else (0, 0, 0)
    shapes = {
        "physics": (tasks, trials, decisions + 1, *recorded.physics.shape[3:4]),
        "cue": (tasks, trials),
        "goal": (tasks, trials, *recorded.goal.shape[2:3]),
        "attention": (tasks, *recorded.attention.shape[1:3], len(GROUPS)),
        "even": (tasks, len(GROUPS)),
    }
    wrong = [name for name, shape in shapes.items() if arrays[name].shape != shape]
    if not recorded.reward.size or wrong:
        found = {name: list(array.shape) for name, array in arrays.items()}
        raise DataError(f"{path} has arrays of shapes that do not go together: {found}; {remedy}")
    return recorded
