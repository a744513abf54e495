"""Which earlier trial an action attends to: the attention of a trained model, added up by trajectory.

An action is predicted at its step's state token (``models/agentic_transformer.py``). Of what that token
attends to, in each layer and head, a share lies on each trajectory of the chain; the shares add up to 1.
A share says where a head reads, not what it does with it: values and later layers decide that.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.attention.reference import reference_attention
from agentic_ring.data.hindsight_chains import completions, returns_to_go
from agentic_ring.data.scaling import Scaling
from agentic_ring.models.agentic_transformer import (
    STATE_TOKEN,
    TOKENS_PER_STEP,
    AgenticTransformerConfig,
    ChainSteps,
    token_positions,
)
from agentic_ring.models.model import Model, Params
from agentic_ring.models.transformer import Block
from evals.report_page.filmstrip import evenly_spaced
from evals.rollouts.evaluation_record import Rollout


@dataclass(frozen=True)
class TrialAttention:
    """Attention of chosen actions, by trajectory of the chain. Q actions, J trajectories.

    Attributes:
      shares: float32 [layers, heads, Q, J]; over J they add up to 1.
      even: float32 [Q, J], the shares if all tokens that may be attended to got the same.
      trajectory: int [Q], that of each action.
      timestep: int [Q], its decision within the trajectory.
    """

    shares: np.ndarray
    even: np.ndarray
    trajectory: np.ndarray
    timestep: np.ndarray


def rollout_chain(
    rollout: Rollout, target: float, scaling: Scaling, prompt: ChainSteps | None = None
) -> ChainSteps:
    """The trials as the model met them: [1, S] steps, behind the ``prompt`` [1, *] where there was one.

    Args:
      rollout: of one environment.
      target: return that every trial aimed at, unscaled.
      scaling: that of the training data.
      prompt: the stored trajectories before the first trial, without padding.
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
    """Runs the model over one chain, without a mesh, and adds up its attention by trajectory.

    Args:
      model, params: the trained model; ``params`` live on one device.
      steps: [1, S], in the chain's order and without padding.
      first_trajectory: actions of this trajectory and of later ones are looked at.
      actions: at most as many of each trajectory, evenly spaced.
    """
    trajectory = np.asarray(steps.trajectory[0])
    places = np.concatenate(
        [
            places[evenly_spaced(len(places), actions)]
            for index in range(first_trajectory, trajectory.max() + 1)
            for places in (np.flatnonzero(trajectory == index),)
        ]
    )
    of_token = np.repeat(trajectory, TOKENS_PER_STEP)
    tokens = TOKENS_PER_STEP * places + STATE_TOKEN
    shares = jax.jit(partial(_shares, model, int(trajectory.max()) + 1))(params, steps, tokens, of_token)
    visible = np.arange(len(of_token)) <= tokens[:, None]
    even = np.stack(
        [(visible & (of_token == index)).sum(axis=1) for index in range(trajectory.max() + 1)], axis=1
    )
    return TrialAttention(
        np.asarray(shares),
        (even / visible.sum(axis=1, keepdims=True)).astype(np.float32),
        trajectory[places],
        np.asarray(steps.timestep[0])[places],
    )


def _shares(
    model: Model, trajectories: int, params: Params, steps: ChainSteps, tokens: jax.Array, of_token: jax.Array
) -> jax.Array:
    """[layers, heads, Q, J]: the reference's attention, with each key's trajectory as its value.

    Args:
      model, params, steps: as above.
      trajectories: J.
      tokens: int [Q], the places of the state tokens.
      of_token: int [tokens], each one's trajectory.
    """
    bound = model.bind(params)
    positions, segment_ids = token_positions(jnp.asarray(steps.position))
    member = jax.nn.one_hot(of_token, trajectories, dtype=jnp.float32)  # [tokens, J]

    def layer(x: jax.Array, block: Block) -> tuple[jax.Array, jax.Array]:
        query, key = (h.astype(jnp.float32) for h in block.attention.project(x, positions)[:2])
        width = query.shape[-1]
        parts = []
        # A value is as wide as a head, so that many trajectories are added up at a time.
        for first in range(0, trajectories, width):
            part = member[:, first : first + width]
            value = jnp.zeros(key.shape, jnp.float32).at[..., : part.shape[1]].set(part[None, :, None])
            summed = reference_attention(
                query[:, tokens], key, value, positions=(positions[:, tokens], positions)
            )
            parts.append(summed[0, ..., : part.shape[1]])
        return block(x, positions, segment_ids, None), jnp.concatenate(parts, axis=-1).swapaxes(0, 1)

    return jax.lax.scan(layer, bound.tokens(steps), bound.transformer.blocks)[1]
