"""Attention of a trained model's actions to each trajectory of the chain.

An action is predicted at its step's state token (``models/agentic_transformer.py``). In each layer and head
that token's attention weights are summed over each trajectory of the chain; the sums add up to 1. A sum
shows where a head reads, not what it does with it: values and later layers decide that.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention.reference import reference_attention
from agentic_ring.data.hindsight_chains import completions, returns_to_go
from agentic_ring.data.store import Scaling
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig, ChainSteps
from agentic_ring.models.model import Model, Params
from agentic_ring.models.transformer import Block
from agentic_ring.rollouts.returns import Rollout
from evals.report_page.filmstrip import evenly_spaced


@dataclass(frozen=True)
class TrialAttention:
    """Attention of selected actions to each trajectory of the chain. Q actions, J trajectories.

    Attributes:
      shares: float32 [layers, heads, Q, J], the attention to each trajectory; the sum over J is 1.
      even: float32 [Q, J], the shares under uniform attention to all visible tokens.
      trajectory: int [Q], trajectory of each action.
      timestep: int [Q], its decision within the trajectory.
    """

    shares: np.ndarray
    even: np.ndarray
    trajectory: np.ndarray
    timestep: np.ndarray


def rollout_chain(
    rollout: Rollout, target: float, scaling: Scaling, prompt: ChainSteps | None = None
) -> ChainSteps:
    """The chain that the model acted on: steps [1, S] of the trials, after the prompt if there was one.

    Args:
      rollout: the trials of one environment.
      target: return that every trial was conditioned on, unscaled.
      scaling: scaling of the training data.
      prompt: steps [1, *] of the stored trajectories before the first trial, without padding.
    """
    trials, decisions = rollout.reward.shape
    first_trajectory = 0 if prompt is None else int(np.max(prompt.trajectory)) + 1
    first_position = 0 if prompt is None else int(np.max(prompt.position)) + 1
    rewards = rollout.reward.astype(np.float64)
    fields = {
        "return_to_go": np.stack([returns_to_go(row, target) for row in rewards]) / scaling.return_scale,
        "observation": scaling.observation(rollout.observation),
        "action": rollout.action,
        "reward": rewards / scaling.reward_scale,
        "completion": np.stack([completions(row, target) for row in rewards]),
        "timestep": np.tile(np.arange(decisions), (trials, 1)),
        "trajectory": np.repeat(first_trajectory + np.arange(trials), decisions).reshape(trials, decisions),
        "position": first_position + np.arange(trials * decisions).reshape(trials, decisions),
    }
    steps = {}
    for name, array in fields.items():
        dtype = np.int32 if name in ("timestep", "trajectory", "position") else np.float32
        joined = array.reshape(1, trials * decisions, *array.shape[2:]).astype(dtype)
        before = None if prompt is None else np.asarray(getattr(prompt, name))
        steps[name] = joined if before is None else np.concatenate([before, joined], axis=1)
    return ChainSteps(**steps)


def attention_over_trials(
    model: Model[AgenticTransformerConfig],
    params: Params,
    steps: ChainSteps,
    first_trajectory: int = 0,
    actions: int = 64,
) -> TrialAttention:
    """Runs the model over one chain without a mesh, and sums its attention by trajectory.

    Args:
      model, params: the trained model; ``params`` are on one device.
      steps: [1, S], in the chain's order and without padding.
      first_trajectory: first trajectory whose actions are analysed; later ones follow.
      actions: maximum number of actions of each trajectory; they are evenly spaced.
    """
    trajectory = np.asarray(steps.trajectory[0])
    places = np.concatenate(
        [
            places[evenly_spaced(len(places), actions)]
            for index in range(first_trajectory, trajectory.max() + 1)
            for places in (np.flatnonzero(trajectory == index),)
        ]
    )
    config = model.config
    token_trajectory = np.repeat(trajectory, config.tokens_per_step)
    tokens = config.tokens_per_step * places + config.state_token
    shares = _shares(model, int(trajectory.max()) + 1, params, steps, tokens, token_trajectory)
    visible = np.arange(len(token_trajectory)) <= tokens[:, None]
    even = np.stack(
        [(visible & (token_trajectory == index)).sum(axis=1) for index in range(trajectory.max() + 1)], axis=1
    )
    return TrialAttention(
        np.asarray(shares),
        (even / visible.sum(axis=1, keepdims=True)).astype(np.float32),
        trajectory[places],
        np.asarray(steps.timestep[0])[places],
    )


@partial(jax.jit, static_argnums=(0, 1))
def _shares(
    model: Model,
    trajectories: int,
    params: Params,
    steps: ChainSteps,
    tokens: jax.Array,
    token_trajectory: jax.Array,
) -> jax.Array:
    """Shares [layers, heads, Q, J]: reference attention whose values are one-hot trajectories.

    Args:
      model, params, steps: as in ``attention_over_trials``.
      trajectories: J.
      tokens: int [Q], indices of the state tokens.
      token_trajectory: int [tokens], trajectory of each token.
    """
    bound = model.bind(params)
    positions, segment_ids = bound.positions(steps)
    member = jax.nn.one_hot(token_trajectory, trajectories, dtype=jnp.float32)  # [tokens, J]

    def layer(x: jax.Array, block: Block) -> tuple[jax.Array, jax.Array]:
        query, key = (h.astype(jnp.float32) for h in block.attention.project(x, positions)[:2])
        width = query.shape[-1]
        parts = []
        # A value is as wide as a head, so each pass sums over that many trajectories.
        for first in range(0, trajectories, width):
            part = member[:, first : first + width]
            value = jnp.zeros(key.shape, jnp.float32).at[..., : part.shape[1]].set(part[None, :, None])
            summed = reference_attention(
                query[:, tokens], key, value, positions=(positions[:, tokens], positions)
            )
            parts.append(summed[0, ..., : part.shape[1]])
        return block(x, positions, segment_ids, None), jnp.concatenate(parts, axis=-1).swapaxes(0, 1)

    return jax.lax.scan(layer, bound.tokens(steps), bound.transformer.blocks)[1]
