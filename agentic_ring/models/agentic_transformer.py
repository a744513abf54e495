"""The Agentic Transformer (arXiv 2305.16554) with 4 tokens per step (arXiv 2310.01889, section 5.3).

A chain of trajectories is the token sequence

    R s a r  R s a r  ...  R s a r | R s a r  ...          | next trajectory
    ^ ^ ^ ^
    | | | reward, and the completion bit: whether the target was reached
    | | action
    | state: the action is predicted from this token
    return-to-go

With ``paired_tokens`` a step has 2 tokens: its state, and its outcome, which carries the state, the action,
the reward and the completion bit together. There is less to attend to, and no layer is needed to combine an
action with its reward. There are no returns-to-go then: only rewards tell how good a step was.

With ``single_tokens`` a step is one token, and stored trajectories tell the task. There are two kinds:

    k k k k d d d k k k k d d ...       k: a known step    d: a decision

    * a known step stands for a span of consecutive decisions of a trajectory: it carries the observation, the
      action and the reward at one of them, the mean reward of all, and the number of the span;
    * a decision carries its observation only, and its action is predicted from it. It attends to the known
      steps before it and to itself, and no other step attends to it.

So decisions may stand anywhere in the chain: those after k trajectories have a context of k trajectories.

The embedding of the timestep within the trajectory is added to all tokens of a step; rotary positions run
over the whole chain. The index of the trajectory in the chain is not embedded: in ascending chains the index
itself tells "later is better", and returns would rise over trials without learning from context.

The completion bit tells the trials after it that the target was reached. It is trained by chains in which
leaders follow leaders (``data/hindsight_chains.py``). Its weights start at 0 because chains of one trajectory
do not train them: there only the last token may carry the bit, and no action follows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from agentic_ring.attention.cache import EMPTY_SLOT, KVCache
from agentic_ring.attention.ring.layout import Layout
from agentic_ring.errors import ArgumentError, ConfigError, check_at_least_one
from agentic_ring.models.layers import Linear, ResidualDropout, embedding_table, gather_param
from agentic_ring.models.transformer import Transformer
from agentic_ring.models.transformer_config import TransformerConfig

COMPONENT_DEVIATION = 0.3
"""Standard deviation of each mixture component of the action."""
TOKENS_PER_STEP = 4
"""Tokens of a step that are not paired."""
COMPLETION_ROW = 1
"""Row of the completion bit in the input weights of the reward token [2, D]."""


@dataclass(frozen=True)
class AgenticTransformerConfig:
    """Sizes of the model and its inputs."""

    transformer: TransformerConfig
    observation_dim: int
    action_dim: int
    max_timestep: int
    """Number of steps of the longest trajectory, and of rows in the table of timestep embeddings. With single
    tokens its steps are spans."""
    trajectory_index: int = 0
    """Number of trajectory indices to embed; 0 embeds none. An ablation."""
    paired_tokens: bool = False
    """Whether a step has 2 tokens, state and outcome, and no return-to-go."""
    single_tokens: bool = False
    """Whether a step has 1 token, and is a known step or a decision."""
    action_modes: int = 1
    """Number of mixture components of the action head; one of them is executed, by default the one with the
    highest log probability. One component would average the good actions of several tasks into one that is
    good in none."""
    dropout: float = 0.0
    """Share of the entries of each residual branch that is dropped in training."""

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; expected a share in [0, 1)")
        check_at_least_one(self, "observation_dim", "action_dim", "max_timestep", "action_modes")
        if self.trajectory_index != 0:
            check_at_least_one(self, "trajectory_index")
        excluded = [name for name in ("paired_tokens", "trajectory_index") if getattr(self, name)]
        if self.single_tokens and excluded:
            raise ConfigError(
                f"single_tokens and {excluded[0]} are both set, but a step of one token is no pair, and the "
                "index of its trajectory is not embedded; leave one of them out"
            )

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of a step."""
        if self.single_tokens:
            return 1
        return 2 if self.paired_tokens else TOKENS_PER_STEP

    @property
    def state_token(self) -> int:
        """Index of the state token within the tokens of a step."""
        return 0 if self.paired_tokens or self.single_tokens else 1

    def build(self, key: jax.Array) -> "AgenticTransformer":
        """Returns the model with fresh parameters."""
        return AgenticTransformer(key, self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainSteps:
    """Steps of chains, in any order along S; ``position`` is the place of each step in its chain."""

    return_to_go: jax.Array
    """float32 [B, S], scaled."""
    observation: jax.Array
    """float32 [B, S, O], normalised."""
    action: jax.Array
    """float32 [B, S, A] in [-1, 1]."""
    reward: jax.Array
    """float32 [B, S], scaled."""
    completion: jax.Array
    """float32 [B, S], 1 on the last step of a trajectory that reached the target."""
    timestep: jax.Array
    """int32 [B, S] within the trajectory."""
    trajectory: jax.Array
    """int32 [B, S], index of the trajectory within the chain; with single tokens negative for decisions."""
    position: jax.Array
    """int32 [B, S], index of the step within the chain; negative for padding."""
    span_reward: jax.Array | None = None
    """float32 [B, S], scaled: the mean reward of the decisions that a known step stands for. Only with single
    tokens."""

    def rows(self, rows: slice) -> "ChainSteps":
        """The steps of some of the chains."""
        return jax.tree.map(lambda x: x[rows], self)

    @classmethod
    def joined(cls, parts: "Sequence[ChainSteps]") -> "ChainSteps":
        """The steps of several parts [B, S] of the same chains as one, along S; in host memory."""
        return jax.tree.map(lambda *fields: np.concatenate(fields, axis=1), *parts)


@partial(jax.tree_util.register_dataclass, data_fields=["steps", "weight", "seed"], meta_fields=["layout"])
@dataclass(frozen=True)
class ChainBatch:
    """A batch for training: steps of several chains, and the loss weight of each step's action."""

    steps: ChainSteps
    """See ``ChainSteps``, [B, S]."""
    weight: jax.Array
    """float32 [B, S], 0 for steps without loss."""
    seed: jax.Array
    """uint32 [B, S], the seed of each step's chain, for dropout."""
    layout: Layout
    """Order of the steps over the ring."""


class AgenticTransformer(nnx.Module):
    """Predicts the action of each step from all earlier tokens of the chain."""

    def __init__(self, key: jax.Array, config: AgenticTransformerConfig):
        keys = iter(jax.random.split(key, 8))
        width, rules = config.transformer.width, config.transformer.rules
        # Reward and completion, or the mean reward of a span, share one token.
        sizes = 1, config.observation_dim, config.action_dim, 2
        self.embed_return, self.embed_observation, self.embed_action, self.embed_reward = (
            Linear(next(keys), size, width, rules, embed_axis=1) for size in sizes
        )
        if config.tokens_per_step < TOKENS_PER_STEP:
            self.embed_return = None
        if not config.single_tokens:
            self.embed_reward.kernel[...] = self.embed_reward.kernel[...].at[COMPLETION_ROW].set(0.0)
        self.embed_timestep = embedding_table(next(keys), config.max_timestep, width)
        indices, modes = config.trajectory_index, config.action_modes
        self.embed_trajectory = embedding_table(next(keys), indices, width) if indices else None
        self.transformer = Transformer(next(keys), config.transformer)
        self.action_head = Linear(next(keys), width, modes * config.action_dim, rules, embed_axis=0)
        mixture_key = jax.random.fold_in(key, 1)
        self.mixture_head = Linear(mixture_key, width, modes, rules, embed_axis=0) if modes > 1 else None
        self.config = config

    def __call__(self, steps: ChainSteps, layout: Layout | None = None) -> jax.Array:
        """Returns actions float32 [B, S, A] in [-1, 1] for whole chains, predicted at the state tokens.

        ``layout`` is the order of the steps over the ring, padding last; faster than None, which allows any
        order and reads it from ``position``.
        """
        return most_likely_action(*self.action_mixture(steps, layout))

    def action_mixture(
        self, steps: ChainSteps, layout: Layout | None = None, seeds: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Components: actions float32 [B, S, K, A] in [-1, 1] and their log probabilities [B, S, K].

        ``seeds``, uint32 [B, S], are those of each chain for dropout; None drops nothing.
        """
        positions, segment_ids = self.positions(steps)
        if layout is not None:
            segment_ids = None  # padding comes last, so no step attends to it
        per_step, dropout = self.config.tokens_per_step, None
        if seeds is not None and self.config.dropout > 0:
            dropout = ResidualDropout(jnp.repeat(seeds, per_step, axis=1), positions, self.config.dropout)
        hidden = None
        if self.config.single_tokens:
            never = jnp.full_like(positions, jnp.iinfo(jnp.int32).max)
            hidden = jnp.stack([jnp.where(steps.trajectory < 0, positions + 1, never), never], axis=-1)
        encoded = self.transformer(self.tokens(steps), positions, segment_ids, layout, dropout, hidden)
        encoded = encoded.reshape(len(encoded), -1, per_step, encoded.shape[-1])
        return self._head(encoded[:, :, self.config.state_token])

    def prefill(self, steps: ChainSteps, cache: KVCache) -> KVCache:
        """Encodes whole steps and stores them in an empty cache."""
        positions, segment_ids = self.positions(steps)
        return self.transformer.prefill(self.tokens(steps), positions, segment_ids, cache)[1]

    def prefill_chunk(self, steps: ChainSteps, cache: KVCache, prefix: KVCache | None = None) -> KVCache:
        """Encodes whole steps after those in the caches and stores them in ``cache``.

        The number of tokens of the steps [B, S] is a multiple of the ring; the last ones may be padding.
        ``prefix`` is as in ``act``.
        """
        positions, _ = self.positions(steps)
        return self.transformer.prefill_chunk(self.tokens(steps), positions, cache, prefix)[1]

    def decide(
        self, steps: ChainSteps, cache: KVCache, prefix: KVCache | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the mixture of one decision [B, 1] of each row after the known steps in the caches.

        Nothing is stored: no other step attends to a decision. ``prefix`` as in ``act``.
        """
        tokens, (positions, _) = self.tokens(steps), self.positions(steps)
        return self._head(self.transformer.encode_after(tokens, positions, cache, prefix)[:, -1])

    def act(
        self, previous: ChainSteps, current: ChainSteps, cache: KVCache, prefix: KVCache | None = None
    ) -> tuple[tuple[jax.Array, jax.Array], KVCache]:
        """Encodes the tokens since the last call up to a state; returns its mixture, and the cache.

        The action and reward of a step are known only after it, so a call takes the tokens of the steps
        before, without those of the first one up to its state, and those of the current one up to its state.

        Args:
          previous: [B, H] steps, H = 1 where every step has a call. At the first step of a chain their
            ``position`` is negative and nothing is stored.
          current: [B, 1] steps; return-to-go and observation are used.
          cache: all earlier tokens, or those after the prefix.
          prefix: a cache with the first tokens; of batch 1 if they are common to all rows.
        """
        known = self.config.state_token + 1
        tokens, positions = (
            jnp.concatenate([before[:, known:], now[:, :known]], axis=1)
            for before, now in (
                (self.tokens(previous), self.tokens(current)),
                (self.positions(previous)[0], self.positions(current)[0]),
            )
        )
        encoded, cache = self.transformer.extend(tokens, positions, cache, prefix)
        return self._head(encoded[:, -1]), cache

    def tokens(self, steps: ChainSteps) -> jax.Array:
        """Embeds steps [B, S] as tokens [B, S x tokens per step, D].

        Raises:
          ArgumentError: single tokens without ``span_reward``.
        """
        dtype, single = jnp.dtype(self.config.transformer.dtype), self.config.single_tokens
        second = steps.span_reward if single else steps.completion
        if second is None:
            raise ArgumentError(
                "the steps have no span_reward, which a model of single_tokens reads; take a data loader and "
                "a policy for such models (agentic_ring.inference.told_policy)"
            )
        scalars = jnp.stack([steps.reward, second], axis=-1)
        observed = self.embed_observation(steps.observation.astype(dtype))
        acted = self.embed_action(steps.action.astype(dtype))
        rewarded = self.embed_reward(scalars.astype(dtype))
        rules = self.config.transformer.rules
        place = gather_param(self.embed_timestep, rules, dtype)[steps.timestep]
        if single:
            return observed + jnp.where(steps.trajectory[..., None] < 0, 0, acted + rewarded + place)
        if self.embed_return is None:
            parts = [observed, observed + acted + rewarded]
        else:
            returns = self.embed_return(steps.return_to_go[..., None].astype(dtype))
            parts = [returns, observed, acted, rewarded]
        tokens = jnp.stack(parts, axis=2)
        if self.embed_trajectory is not None:
            place = place + gather_param(self.embed_trajectory, rules, dtype)[steps.trajectory]
        return (tokens + place[:, :, None]).reshape(len(tokens), -1, tokens.shape[-1])

    def positions(self, steps: ChainSteps) -> tuple[jax.Array, jax.Array]:
        """Positions and segment ids, int32 [B, S x tokens per step], of the tokens of steps [B, S].

        Padding (a negative step position) gets ``EMPTY_SLOT`` and segment -1.
        """
        per_step = self.config.tokens_per_step
        tokens = per_step * steps.position[..., None] + jnp.arange(per_step, dtype=jnp.int32)
        tokens = jnp.where(steps.position[..., None] < 0, EMPTY_SLOT, tokens)
        tokens = tokens.reshape(steps.position.shape[0], -1)
        return tokens, jnp.where(tokens < 0, -1, 0)

    def _head(self, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Components from encoded [..., D]: actions [..., K, A] and log probabilities [..., K]."""
        normed = self.transformer.norm(encoded)
        actions = jnp.tanh(self.action_head(normed).astype(jnp.float32))
        actions = actions.reshape(*encoded.shape[:-1], self.config.action_modes, self.config.action_dim)
        if self.mixture_head is None:
            return actions, jnp.zeros(actions.shape[:-1])
        return actions, jax.nn.log_softmax(self.mixture_head(normed).astype(jnp.float32))


def most_likely_action(actions: jax.Array, log_probs: jax.Array) -> jax.Array:
    """Selects from actions [..., K, A] the one with the highest of the ``log_probs`` [..., K]: [..., A]."""
    best = jnp.argmax(log_probs, axis=-1)[..., None, None]
    return jnp.take_along_axis(actions, best, axis=-2)[..., 0, :]


def action_loss(model: AgenticTransformer, batch: ChainBatch) -> jax.Array:
    """Weighted sum of squared action errors, each averaged over the A action dimensions.

    With several mixture components it is -2 s^2 / A times the log likelihood of a mixture of Gaussians with
    standard deviation s. This equals the squared error for one component, and is close to the error of the
    best component if that one has most of the probability.
    """
    actions, log_probs = model.action_mixture(batch.steps, batch.layout, batch.seed)
    errors = jnp.mean(jnp.square(actions - batch.steps.action[:, :, None]), axis=-1)
    scale = 2 * COMPONENT_DEVIATION**2 / actions.shape[-1]
    return -scale * jnp.sum(batch.weight * jax.nn.logsumexp(log_probs - errors / scale, axis=-1))
