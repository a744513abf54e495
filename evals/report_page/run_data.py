"""Data of one run for a report: results, losses, attention of the checkpoint, and a filmstrip.

Only ``results.json`` is required. For every other part that is absent, ``missing`` gives the reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from agentic_ring.data.domains import parse_task
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.errors import AgenticRingError, DataError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Model
from agentic_ring.policies.policy import load_params
from agentic_ring.results.results_file import Results, read_results
from agentic_ring.rollouts.policies import read_prompt
from agentic_ring.rollouts.returns import FILE_NAME, EvaluationRecord, read_record
from agentic_ring.run import RunConfig, load_config
from agentic_ring.training.loop import read_metrics
from evals.report_page.attention_over_trials import TrialAttention, attention_over_trials, rollout_chain
from evals.report_page.filmstrip import Frame, Strip, data_uri, evenly_spaced, render

FRAMES = 8
MAX_ATTENTION_TOKENS = 2**17
"""Encoding longer chains again would take too long on one device."""

Part = TypeVar("Part")


@dataclass(frozen=True)
class ReportedRun:
    """All data of a run that the report shows.

    Attributes:
      name: name of the run on the page.
      results: content of ``results.json``.
      metrics: logged steps that have a loss.
      record: content of ``evaluation.npz``.
      attention: attention of the last checkpoint over the recorded trials.
      prompt_trajectories: number of stored trajectories before the first trial.
      film: first and last trial of the recorded environment.
      missing: reason for each absent part: ``loss``, ``record``, ``attention``, ``film``.
    """

    name: str
    results: Results
    metrics: Sequence[dict[str, Any]]
    record: EvaluationRecord | None
    attention: TrialAttention | None
    prompt_trajectories: int
    film: Sequence[Strip]
    missing: dict[str, str]


def read_run(directory: Path, name: str) -> ReportedRun:
    """Reads and computes everything that the report shows of the run in a folder.

    Raises:
      DataError: the folder is not that of a run, or one of its files is damaged.
    """
    if not (directory / "results.json").is_file():
        raise DataError(
            f"{directory} holds no results.json; give the folder of a finished run, such as runs/NAME"
        )
    results = read_results(directory / "results.json")
    missing: dict[str, str] = {}

    def part(name: str, make: Callable[[], Part]) -> Part | None:
        try:
            return make()
        except AgenticRingError as error:
            missing[name] = str(error)
            return None

    path = directory / "metrics.jsonl"
    metrics = [row for row in (read_metrics(path) if path.exists() else []) if "loss" in row]
    if not metrics:
        missing["loss"] = f"{path} contains no losses" if path.exists() else f"{path} does not exist"
    record = read_record(directory)
    if record is None:
        missing["record"] = (
            f"{directory / FILE_NAME} does not exist. experiments/exorl_at_ring.py writes it during "
            "evaluation; the same command repeats the evaluation without training. Runs of Table 5 do not "
            "have it"
        )
        attention, film, prompt = None, None, 0
    else:
        config = load_config(directory)
        prompt = config.evaluation.prompt_trajectories
        attention = part("attention", lambda: run_attention(directory, config, record))
        film = part("film", lambda: filmstrip(config, record))
    return ReportedRun(name, results, metrics, record, attention, prompt, film or (), missing)


def run_attention(directory: Path, config: RunConfig, record: EvaluationRecord) -> TrialAttention:
    """Attention of the run's last checkpoint over the recorded trials, computed on one device.

    Raises:
      CheckpointError: there is no checkpoint, or it cannot be read.
      DataError: the chain is too long for one device, or the store of its prompt does not exist.
    """
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    prompt = None
    if config.evaluation.prompt_trajectories:
        with TrajectoryStore.open(config.store) as store:
            prompt = read_prompt(store, config, ring=1)
    steps = rollout_chain(record.rollout, config.target, config.scaling, prompt)
    tokens = config.model.tokens_per_step * steps.position.shape[1]
    if tokens > MAX_ATTENTION_TOKENS:
        raise DataError(f"the chain has {tokens:,} tokens; a report encodes at most {MAX_ATTENTION_TOKENS:,}")
    params, _ = load_params(directory, config, mesh)
    return attention_over_trials(
        Model(config.model), params, steps, first_trajectory=config.evaluation.prompt_trajectories
    )


def filmstrip(config: RunConfig, record: EvaluationRecord) -> list[Strip]:
    """Frames of the first and the last trial, or of the only one.

    Raises:
      RenderingError: this machine cannot render.
    """
    task = parse_task(config.task)
    rollout = record.rollout
    trials, rows, _ = rollout.physics.shape
    places = evenly_spaced(rows, FRAMES)
    shown = sorted({0, trials - 1})
    drawn = render(task, np.concatenate([rollout.physics[trial, places] for trial in shown]))
    decision_seconds = config.chains.action_repeat * task.domain.control_timestep_seconds
    strips = []
    for trial, frames in zip(shown, np.split(drawn, len(shown)), strict=True):
        earned = np.concatenate([[0.0], np.cumsum(rollout.reward[trial], dtype=np.float64)])
        strips.append(
            Strip(
                trial + 1,
                [
                    Frame(data_uri(frame), float(place * decision_seconds), float(earned[place]))
                    for place, frame in zip(places, frames, strict=True)
                ],
            )
        )
    return strips
