"""The Agentic Transformer (arXiv 2305.16554) on 4 tokens a step (arXiv 2310.01889, section 5.3).

A chain of trajectories reads

    R s a r  R s a r  ...  R s a r | R s a r  ...          | next trajectory
    ^ ^ ^ ^
    | | | reward, and whether the target was reached (the completion bit rides here)
    | | action
    | state: the action is predicted from this token
    return-to-go

Every token of a step carries the embedded timestep within its trajectory; rotary positions run over
the whole chain. Which trajectory of the chain it is, is not embedded: in ascending chains that index
alone says "later is better", and the model would rise over trials without learning from its context.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_ring.attention.cache import EMPTY_SLOT, KVCache
from agentic_ring.attention.ring.layout import Layout
from agentic_ring.errors import ConfigError
from agentic_ring.models.layers import Linear, embedding_table, gathered
from agentic_ring.models.transformer import Transformer, TransformerConfig

TOKENS_PER_STEP = 4
STATE_TOKEN = 1
"""Index of the state token within a step."""


@dataclass(frozen=True)
class AgenticTransformerConfig:
    """The stack and what it reads."""

    transformer: TransformerConfig
    observation_dim: int
    action_dim: int
    max_timestep: int
    """Steps of the longest trajectory; timesteps are embedded from a table of this many rows."""
    trajectory_index: int = 0
    """Embed the trajectory's index in the chain, up to this many; 0 leaves it out (an ablation)."""
    return_conditioning: bool = True
    """Read returns-to-go; without, their tokens say nothing and rewards alone tell how good a step was."""
    fused_reward: bool = False
    """Let the reward's token carry its step's state and action as well: what was done and what it paid for
    stand in one token, and need not be brought together by a layer first."""
    action_modes: int = 1
    """Actions that a step is offered, each with its odds; the likeliest is taken. With one alone, what is
    good in one task and what is good in another come out as their mean, which is good in neither."""

    def __post_init__(self) -> None:
        for name in ("observation_dim", "action_dim", "max_timestep", "action_modes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def build(self, key: jax.Array) -> "AgenticTransformer":
        """The model with fresh parameters."""
        return AgenticTransformer(key, self)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "return_to_go",
        "observation",
        "action",
        "reward",
        "completion",
        "timestep",
        "trajectory",
        "position",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class ChainSteps:
    """Steps of chains, in any order along S; ``position`` says where each one stands.

    Attributes:
      return_to_go: float32 [B, S], scaled.
      observation: float32 [B, S, O], normalised.
      action: float32 [B, S, A] in [-1, 1].
      reward: float32 [B, S], scaled.
      completion: float32 [B, S], 1 on the last step of a trajectory that reached the target.
      timestep: int32 [B, S] within the trajectory.
      trajectory: int32 [B, S], index of the trajectory within the chain.
      position: int32 [B, S], the step's place in the chain; negative for padding.
    """

    return_to_go: jax.Array
    observation: jax.Array
    action: jax.Array
    reward: jax.Array
    completion: jax.Array
    timestep: jax.Array
    trajectory: jax.Array
    position: jax.Array


class AgenticTransformer(nnx.Module):
    """Predicts each step's action from everything before it in the chain."""

    def __init__(self, key: jax.Array, config: AgenticTransformerConfig):
        keys = iter(jax.random.split(key, 8))
        width, rules = config.transformer.width, config.transformer.rules
        self.embed_return = Linear(next(keys), 1, width, rules, embed_axis=1)
        self.embed_observation = Linear(next(keys), config.observation_dim, width, rules, embed_axis=1)
        self.embed_action = Linear(next(keys), config.action_dim, width, rules, embed_axis=1)
        # Reward and completion share one token, so a step stays at 4.
        self.embed_reward = Linear(next(keys), 2, width, rules, embed_axis=1)
        self.embed_timestep = embedding_table(next(keys), config.max_timestep, width)
        self.embed_trajectory = (
            embedding_table(next(keys), config.trajectory_index, width) if config.trajectory_index else None
        )
        self.transformer = Transformer(next(keys), config.transformer)
        outputs = config.action_modes * config.action_dim
        self.action_head = Linear(next(keys), width, outputs, rules, embed_axis=0)
        self.odds_head = (
            Linear(jax.random.fold_in(key, 1), width, config.action_modes, rules, embed_axis=0)
            if config.action_modes > 1
            else None
        )
        self.config = config

    def __call__(self, steps: ChainSteps, layout: Layout | None = None) -> jax.Array:
        """Actions float32 [B, S, A] in [-1, 1], each predicted at its own step's state token.

        Args:
          steps: [B, S] of whole chains.
          layout: the order in which the ring holds them, padding last, where there is one: faster than
            None, any order that ``position`` tells.
        """
        return likeliest(*self.modes(steps, layout))

    def modes(self, steps: ChainSteps, layout: Layout | None = None) -> tuple[jax.Array, jax.Array]:
        """Actions float32 [B, S, K, A] in [-1, 1] and the logarithms of their odds [B, S, K]; see above."""
        positions, segment_ids = token_positions(steps.position)
        if layout is not None:
            segment_ids = None  # padding comes after all steps that could attend to it
        encoded = self.transformer(self.tokens(steps), positions, segment_ids, layout)
        batch, tokens, width = encoded.shape
        encoded = encoded.reshape(batch, tokens // TOKENS_PER_STEP, TOKENS_PER_STEP, width)
        return self._head(encoded[:, :, STATE_TOKEN])

    def prefill(self, steps: ChainSteps, cache: KVCache) -> KVCache:
        """Stores whole steps in an empty cache."""
        positions, segment_ids = token_positions(steps.position)
        return self.transformer.prefill(self.tokens(steps), positions, segment_ids, cache)[1]

    def prefill_chunk(self, steps: ChainSteps, cache: KVCache) -> KVCache:
        """Stores the next whole steps after all that the cache holds.

        The tokens of the steps [B, S] are a multiple of the ring; the last ones may be padding.
        """
        positions, _ = token_positions(steps.position)
        return self.transformer.prefill_chunk(self.tokens(steps), positions, cache)[1]

    def act(
        self, previous: ChainSteps, current: ChainSteps, cache: KVCache, prefix: KVCache | None = None
    ) -> tuple[jax.Array, KVCache]:
        """One environment step: 4 new tokens in, one action out.

        The action and reward of a step are known only after it, so a call holds the last two tokens
        of the previous step and the first two of the current one.

        Args:
          previous: [B, 1] steps, of which action, reward, completion and, with ``fused_reward``, the
            observation are read; at the very first step of a chain its ``position`` is negative and its
            tokens are not stored.
          current: [B, 1] steps, of which return-to-go and observation are read.
          cache: all earlier tokens, or those after the prefix.
          prefix: a cache of batch 1 with the tokens that all rows begin with.

        Returns:
          Actions float32 [B, A], and the cache with the new tokens.
        """
        tokens = jnp.concatenate([self.tokens(previous)[:, 2:], self.tokens(current)[:, :2]], axis=1)
        positions = jnp.concatenate(
            [token_positions(previous.position)[0][:, 2:], token_positions(current.position)[0][:, :2]],
            axis=1,
        )
        encoded, cache = self.transformer.extend(tokens, positions, cache, prefix)
        return likeliest(*self._head(encoded[:, -1])), cache

    def tokens(self, steps: ChainSteps) -> jax.Array:
        """Embeds steps [B, S] as tokens [B, 4 S, D]."""
        dtype = jnp.dtype(self.config.transformer.dtype)
        returns = (
            steps.return_to_go if self.config.return_conditioning else jnp.zeros_like(steps.return_to_go)
        )
        scalars = jnp.stack([steps.reward, steps.completion], axis=-1)
        seen = self.embed_observation(steps.observation.astype(dtype))
        done = self.embed_action(steps.action.astype(dtype))
        paid = self.embed_reward(scalars.astype(dtype))
        if self.config.fused_reward:
            paid = paid + seen + done
        tokens = jnp.stack([self.embed_return(returns[..., None].astype(dtype)), seen, done, paid], axis=2)
        rules = self.config.transformer.rules
        place = gathered(self.embed_timestep, rules, dtype)[steps.timestep]
        if self.embed_trajectory is not None:
            place = place + gathered(self.embed_trajectory, rules, dtype)[steps.trajectory]
        tokens = tokens + place[:, :, None]
        batch, length = steps.position.shape
        return tokens.reshape(batch, TOKENS_PER_STEP * length, -1)

    def _head(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of encoded [..., D]: actions [..., K, A] and the logarithms of their odds [..., K]."""
        normed = self.transformer.norm(encoded)
        actions = jnp.tanh(self.action_head(normed).astype(jnp.float32))
        actions = actions.reshape(*encoded.shape[:-1], self.config.action_modes, self.config.action_dim)
        if self.odds_head is None:
            return actions, jnp.zeros(actions.shape[:-1])
        return actions, jax.nn.log_softmax(self.odds_head(normed).astype(jnp.float32))


def likeliest(actions: jax.Array, log_odds: jax.Array) -> jax.Array:
    """The action [..., A] with the best of the odds [..., K] among actions [..., K, A]."""
    best = jnp.argmax(log_odds, axis=-1)[..., None, None]
    return jnp.take_along_axis(actions, best, axis=-2)[..., 0, :]


def token_positions(step_position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions and segment ids, int32 [B, 4 S], of the tokens of steps at ``step_position`` [B, S].

    Padding (a negative step position) gets ``EMPTY_SLOT`` and segment -1.
    """
    tokens = TOKENS_PER_STEP * step_position[..., None] + jnp.arange(TOKENS_PER_STEP, dtype=jnp.int32)
    tokens = jnp.where(step_position[..., None] < 0, EMPTY_SLOT, tokens)
    tokens = tokens.reshape(step_position.shape[0], -1)
    return tokens, jnp.where(tokens < 0, -1, 0)
