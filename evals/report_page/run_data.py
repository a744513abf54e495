"""Data of one run for a report: results, losses, attention of the checkpoint, and a filmstrip.

Only ``results.json`` is required. For every other part that is absent, ``missing`` gives the reason.

An action is predicted at its step's state token (``models/agentic_transformer.py``). In each layer and head
that token's attention weights are summed over each trajectory of the chain; the sums add up to 1. A sum
shows where a head reads, not what it does with it: values and later layers decide that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention.reference import reference_attention
from agentic_ring.data.domains import parse_task
from agentic_ring.data.hindsight_chains import completions, returns_to_go
from agentic_ring.data.store import Scaling, TrajectoryStore
from agentic_ring.errors import AgenticRingError, DataError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig, ChainSteps
from agentic_ring.models.model import Model, Params
from agentic_ring.models.transformer import Block
from agentic_ring.policies.policy import load_params
from agentic_ring.results.results_file import Results, read_results
from agentic_ring.rollouts.policies import read_prompt
from agentic_ring.rollouts.returns import FILE_NAME, EvaluationRecord, Rollout, read_record
from agentic_ring.run import RunConfig, ToldRunConfig, load_any_config
from agentic_ring.training.loop import read_metrics
from evals.report_page.filmstrip import Frame, Strip, data_uri, evenly_spaced, render

FRAMES = 8
MAX_ACTIONS = 64
"""Of each trial, evenly spaced, whose attention is shown."""
MAX_ATTENTION_TOKENS = 2**17
"""Encoding longer chains again would take too long on one device."""

Part = TypeVar("Part")


@dataclass(frozen=True)
class TrialAttention:
    """Attention of selected actions to each trajectory of the chain. Q actions, J trajectories."""

    shares: np.ndarray
    """float32 [layers, heads, Q, J], the attention to each trajectory; the sum over J is 1."""
    even: np.ndarray
    """float32 [Q, J], the shares under uniform attention to all visible tokens."""
    trajectory: np.ndarray
    """Int [Q], trajectory of each action."""
    timestep: np.ndarray
    """Int [Q], its decision within the trajectory."""


@dataclass(frozen=True)
class ReportedRun:
    """All data of a run that the report shows."""

    name: str
    results: Results
    metrics: Sequence[dict[str, Any]]
    """Logged steps that have a loss."""
    record: EvaluationRecord | None
    attention: TrialAttention | None
    """Attention of the last checkpoint over the recorded trials."""
    prompt_trajectories: int
    """Number of stored trajectories before the first trial."""
    film: Sequence[Strip]
    """First and last trial of the recorded environment."""
    missing: dict[str, str]
    """Reason for each absent part: ``loss``, ``record``, ``attention``, ``film``."""


def read_run(directory: Path, name: str) -> ReportedRun:
    """Reads and computes everything that the report shows of the run in a folder."""
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
        return ReportedRun(name, results, metrics, None, None, 0, (), missing)
    config = load_any_config(directory)
    prompt = config.evaluation.prompt_trajectories if isinstance(config, RunConfig) else 0
    attention = part("attention", lambda: run_attention(directory, config, record))
    film = part("film", lambda: filmstrip(config, record.rollout))
    return ReportedRun(name, results, metrics, record, attention, prompt, film or (), missing)


def run_attention(
    directory: Path, config: RunConfig | ToldRunConfig, record: EvaluationRecord
) -> TrialAttention:
    """Attention of the run's last checkpoint over the recorded trials, computed on one device."""
    if isinstance(config, ToldRunConfig):
        raise DataError(
            "a trajectory of this run is a few known steps, and its decisions see stored trajectories, which "
            "are not recorded; attention is shown for runs of --conditioning return"
        )
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    prompt, first_trajectory = None, config.evaluation.prompt_trajectories
    if first_trajectory:
        with TrajectoryStore.open(config.store) as store:
            prompt = read_prompt(store, config, ring=1)
    steps = rollout_chain(record.rollout, config.target, config.scaling, prompt)
    tokens = config.model.tokens_per_step * steps.position.shape[1]
    if tokens > MAX_ATTENTION_TOKENS:
        raise DataError(f"the chain has {tokens:,} tokens; a report encodes at most {MAX_ATTENTION_TOKENS:,}")
    params, _ = load_params(directory, config, mesh)
    return attention_over_trials(Model(config.model), params, steps, first_trajectory)


def filmstrip(config: RunConfig | ToldRunConfig, rollout: Rollout) -> list[Strip]:
    """Frames of the first and the last trial, or of the only one."""
    task = parse_task(config.task)
    trials, rows, _ = rollout.physics.shape
    places = evenly_spaced(rows, FRAMES)
    shown = sorted({0, trials - 1})
    drawn = render(task, np.concatenate([rollout.physics[trial, places] for trial in shown]))
    seconds = places * config.chains.action_repeat * task.domain.control_timestep_seconds
    strips = []
    for trial, frames in zip(shown, np.split(drawn, len(shown)), strict=True):
        earned = np.concatenate([[0.0], np.cumsum(rollout.reward[trial], dtype=np.float64)])[places]
        parts = zip(map(data_uri, frames), seconds.tolist(), earned.tolist(), strict=True)
        strips.append(Strip(trial + 1, [Frame(*part) for part in parts]))
    return strips


def rollout_chain(
    rollout: Rollout, target: float, scaling: Scaling, prompt: ChainSteps | None = None
) -> ChainSteps:
    """The chain that the model acted on: steps [1, S] of the trials, after the prompt if there was one.

    ``target`` is the unscaled return that every trial was conditioned on, and ``prompt`` holds the steps
    [1, *] of the stored trajectories before the first trial, without padding.
    """
    trials, decisions = rollout.reward.shape
    first_trajectory = 0 if prompt is None else int(np.max(prompt.trajectory)) + 1
    first_position = 0 if prompt is None else int(np.max(prompt.position)) + 1
    rewards = rollout.reward.astype(np.float64)
    steps: dict[str, Any] = {
        "return_to_go": np.stack([returns_to_go(row, target) for row in rewards]) / scaling.return_scale,
        "observation": scaling.observation(rollout.observation),
        "action": rollout.action,
        "reward": rewards / scaling.reward_scale,
        "completion": np.stack([completions(row, target) for row in rewards]),
        "timestep": np.tile(np.arange(decisions, dtype=np.int32), (trials, 1)),
        "trajectory": first_trajectory + np.repeat(np.arange(trials, dtype=np.int32), decisions),
        "position": first_position + np.arange(trials * decisions, dtype=np.int32),
    }
    for name, array in steps.items():
        dtype = np.int32 if array.dtype == np.int32 else np.float32
        steps[name] = array.reshape(1, trials * decisions, *array.shape[2:]).astype(dtype)
    chain = ChainSteps(**steps)
    return chain if prompt is None else ChainSteps.joined([prompt, chain])


def attention_over_trials(
    model: Model[AgenticTransformerConfig], params: Params, steps: ChainSteps, first_trajectory: int
) -> TrialAttention:
    """Runs the model over one chain without a mesh, and sums its attention by trajectory.

    Args:
      params: on one device.
      steps: [1, S], in the chain's order and without padding.
      first_trajectory: first trajectory whose actions are analysed; later ones follow.
    """
    trajectory = np.asarray(steps.trajectory[0])
    count = int(trajectory.max()) + 1
    of_trials = [np.flatnonzero(trajectory == index) for index in range(first_trajectory, count)]
    places = np.concatenate([places[evenly_spaced(len(places), MAX_ACTIONS)] for places in of_trials])
    member = np.eye(count, dtype=np.float32)[np.repeat(trajectory, model.config.tokens_per_step)]
    tokens = model.config.tokens_per_step * places + model.config.state_token
    shares = _shares(model, params, steps, tokens, member)
    even = (np.cumsum(member, axis=0)[tokens] / (tokens[:, None] + 1)).astype(np.float32)
    return TrialAttention(np.asarray(shares), even, trajectory[places], np.asarray(steps.timestep[0])[places])


@partial(jax.jit, static_argnums=0)
def _shares(
    model: Model, params: Params, steps: ChainSteps, tokens: jax.Array, member: jax.Array
) -> jax.Array:
    """Shares [layers, heads, Q, J] of state tokens [Q]: reference attention to the values ``member``.

    ``member`` [tokens, J] has the trajectory of each token as a one-hot vector.
    """
    bound = model.bind(params)
    positions, segment_ids = bound.positions(steps)

    def layer(x: jax.Array, block: Block) -> tuple[jax.Array, jax.Array]:
        query, key = (h.astype(jnp.float32) for h in block.attention.project(x, positions)[:2])
        width = query.shape[-1]
        parts = []
        # A value is as wide as a head, so each pass sums over that many trajectories.
        for first in range(0, member.shape[1], width):
            part = member[:, first : first + width]
            value = jnp.zeros(key.shape, jnp.float32).at[..., : part.shape[1]].set(part[None, :, None])
            summed = reference_attention(
                query[:, tokens], key, value, positions=(positions[:, tokens], positions)
            )
            parts.append(summed[0, ..., : part.shape[1]])
        return block(x, positions, segment_ids, None), jnp.concatenate(parts, axis=-1).swapaxes(0, 1)

    return jax.lax.scan(layer, bound.tokens(steps), bound.transformer.blocks)[1]
