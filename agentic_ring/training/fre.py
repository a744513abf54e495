"""Functional reward encodings and implicit Q-learning on them: a zero-shot agent (FRE, arXiv 2402.17135).

First an encoder learns latents of reward functions (``models.reward_encoding``). Then it stays as it is. An
actor, a value and two critics that read its latent learn from stored transitions, relabelled with the same
functions, by implicit Q-learning (arXiv 2110.06169): an expectile of the critics is the value, which is their
target, and the actor imitates actions in proportion to exp(temperature x advantage). A new reward function
needs no training: a few states and their rewards give its latent.

As in kvfrans/fre, but for sizes and rates. Further differences: rewards are told in deviations
(``RewardScale``), returns are of n steps, the actor has no variance and minimises squared errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from agentic_ring.data.relabelled_states import RelabelledStates
from agentic_ring.data.rewards.tasks import RewardOfFeatures
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.data.transition_dataset import RandomBatches
from agentic_ring.errors import ConfigError, check_at_least_one, check_positive
from agentic_ring.models.layers import MlpParameters, act_on_latent, apply_mlp, init_mlp
from agentic_ring.models.model import Model, Params
from agentic_ring.models.reward_encoding import RewardEncodingConfig
from agentic_ring.training.checkpoint import Checkpoints, SavedCheckpoints
from agentic_ring.training.loop import MetricsLog, run_updates
from agentic_ring.training.optimizer import TrainConfig
from agentic_ring.training.train_step import TrainState, WholeState

Arrays = dict[str, jax.Array]
_MOST_WEIGHT = 100.0


@dataclass(frozen=True)
class FREConfig:
    """Hyperparameters and length of training; ``seed`` is that of weights and batches."""

    updates: int
    """Number of all updates."""
    encoding_updates: int
    """Number of those that come first and train encoder and decoder; the others train the agent."""
    checkpoint_every: int
    """Updates between two checkpoints."""
    latent: int = 128
    """Size L of the latent."""
    hidden: int = 256
    """Width of the two hidden layers of decoder, actor, value and critics."""
    functions: int = 32
    """Number K of reward functions of a batch."""
    pairs: int = 32
    """Number N of states whose rewards the encoder reads, for each function."""
    predicted: int = 32
    """Number of states whose rewards the decoder predicts, for each function."""
    transitions: int = 16
    """Number M of transitions that are relabelled with each function."""
    horizon: int = 5
    """Decisions of an n-step return."""
    learning_rate: float = 2e-3
    kl_weight: float = 0.01
    discount: float = 0.98
    """Discount per decision."""
    expectile: float = 0.8
    temperature: float = 3.0
    """Factor of the advantage in the exponent of an action's weight."""
    target_rate: float = 0.005
    """Share of the critics that their targets take over per update."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least_one(self, "encoding_updates", "checkpoint_every", "functions", "pairs", "predicted")
        check_at_least_one(self, "transitions", "horizon")
        check_positive(self, "learning_rate", "temperature", "target_rate")
        if self.updates <= self.encoding_updates:
            raise ConfigError(
                f"updates is {self.updates}, but the first {self.encoding_updates} train the encoder; the "
                "agent needs some as well"
            )
        if not (0 < self.discount < 1 and 0 < self.expectile < 1 and self.kl_weight >= 0):
            raise ConfigError(
                f"discount is {self.discount}, expectile {self.expectile} and kl_weight {self.kl_weight}; "
                "expected shares in (0, 1), and 0 or more"
            )

    def learning_rate_of(self, update: int) -> float:
        """The learning rate of an update, counted from 1: encoder and agent each have a cosine."""
        before, name = (
            (0, "encoding") if update <= self.encoding_updates else (self.encoding_updates, "agent")
        )
        rate: Any = self._schedule(name)(update - 1 - before)
        return float(rate)

    def optimizer(self, name: str) -> optax.GradientTransformation:
        """The optimiser of ``encoding`` or ``agent``, whose rate falls to a twentieth."""
        return optax.adam(self._schedule(name))

    def _schedule(self, name: str) -> optax.Schedule:
        later = self.updates - self.encoding_updates
        length = self.encoding_updates if name == "encoding" else later
        return optax.cosine_decay_schedule(self.learning_rate, length, 0.05)

    def encoder(self, observation_dim: int) -> Model[RewardEncodingConfig]:
        """The model of encoder and decoder."""
        return Model(RewardEncodingConfig(observation_dim, self.latent, self.hidden))


class RelabelledBatches:
    """Draws states and transitions from all over the data, with rewards of drawn functions, in deviations.

    The reward of a transition is the discounted sum of those of the next n states.
    """

    def __init__(self, data: ToldDecisions, rewards: Sequence[RewardOfFeatures], config: FREConfig):
        self._data, self._config, self._states = data, config, RelabelledStates(data, rewards)

    def draw(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Draws K functions, and for each of them pairs of state and reward, and transitions.

        Returns:
          pair_observation [K, N, O] and pair_reward [K, N], to encode; the same named predicted_..., to
          predict; observation and next_observation [K, M, O], action [K, M, A] and reward [K, M].
        """
        config, data, first = self._config, self._data, self._config.pairs
        functions = self._states.draw_functions(random, config.functions)
        observation, reward = self._states.pairs(random, functions, first + config.predicted)
        shape, (episodes, decisions) = (config.functions, config.transitions), data.action.shape[:2]
        episode = random.integers(episodes, size=shape)
        decision = random.integers(decisions - config.horizon, size=shape)
        ahead = np.arange(1, config.horizon + 1)
        later = decision[..., None] + ahead
        earned = self._states.rewards(functions, np.broadcast_to(episode[..., None], later.shape), later)
        return {
            "pair_observation": observation[:, :first],
            "pair_reward": reward[:, :first],
            "predicted_observation": observation[:, first:],
            "predicted_reward": reward[:, first:],
            "observation": data.observation[episode, decision],
            "next_observation": data.observation[episode, decision + config.horizon],
            "action": data.action[episode, decision],
            "reward": earned @ (config.discount ** (ahead - 1)).astype(np.float32),
        }


@partial(jax.jit, static_argnums=0)
def encode(config: FREConfig, params: Params, observation: Any, reward: Any) -> jax.Array:
    """Latents [K, L] of pairs, as ``RewardEncoding.encode`` takes them: the means of their distributions."""
    model = config.encoder(observation.shape[-1])
    return model.bind(params["encoding"]).encode(observation, reward).mean


def train_fre(
    config: FREConfig,
    data: ToldDecisions,
    rewards: Sequence[RewardOfFeatures],
    mesh: Mesh,
    checkpoints: Checkpoints,
    metrics: MetricsLog,
) -> Params:
    """Trains encoder and agent, as ``run_updates`` does.

    Returns:
      Weights of ``encoding``, ``actor``, ``value``, ``critics`` and ``target_critics``.
    """
    batches = RelabelledBatches(data, rewards, config)
    dims = data.observation.shape[-1], data.action.shape[-1]
    length = TrainConfig(
        config.updates, config.functions, checkpoint_every=config.checkpoint_every, log_every=50
    )
    whole = WholeState(lambda: _fresh_state(config, *dims), mesh)
    with jax.set_mesh(mesh):
        state = run_updates(
            length,
            jax.jit(lambda state, batch: _update(config, state, batch)),
            whole.fresh,
            whole.abstract,
            RandomBatches(batches.draw, config.seed),
            checkpoints,
            metrics,
            learning_rate=config.learning_rate_of,
            tokens=lambda batch: batch["reward"].size,
        )
    return state.params


def load_fre(folder: Path, config: FREConfig, observation_dim: int, action_dim: int, mesh: Mesh) -> Params:
    """Loads the weights of the newest checkpoint in a folder of ``train_fre``; raises as ``restore`` does."""
    saved = SavedCheckpoints(folder)
    whole = WholeState(lambda: _fresh_state(config, observation_dim, action_dim), mesh)
    state, _ = saved.restore(saved.last_step or 0, whole.abstract())
    return state.params


def _fresh_state(config: FREConfig, observation_dim: int, action_dim: int) -> TrainState:
    encoding_key, actor_key, value_key, critic_key = jax.random.split(jax.random.key(config.seed), 4)
    read, hidden = observation_dim + config.latent, (config.hidden, config.hidden)
    sizes = (read + action_dim, *hidden, 1)
    critics = jax.vmap(lambda key: init_mlp(key, sizes))(jax.random.split(critic_key, 2))
    encoding = config.encoder(observation_dim).init_params(encoding_key)
    agent = {
        "actor": init_mlp(actor_key, (read, *hidden, action_dim)),
        "value": init_mlp(value_key, (read, *hidden, 1)),
        "critics": critics,
    }
    params = {"encoding": encoding, **agent, "target_critics": critics}
    trained = {"encoding": encoding, "agent": agent}
    optimizers = {name: config.optimizer(name).init(weights) for name, weights in trained.items()}
    return TrainState(jnp.zeros((), jnp.int32), params, optimizers)


def _update(config: FREConfig, state: TrainState, batch: Arrays) -> tuple[TrainState, Arrays]:
    """One update, of the encoder or of the agent; its metric is the loss of what it trains."""

    def improve(name: str, trained: Params, loss: Any) -> tuple[jax.Array, Any, Params]:
        value, gradient = jax.value_and_grad(loss)(trained)
        updates, moments = config.optimizer(name).update(gradient, state.optimizer[name])
        return value, optax.apply_updates(trained, updates), state.optimizer | {name: moments}

    def encoding() -> tuple[jax.Array, Params, Params]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        loss = partial(encoding_loss, config, batch, key)
        value, trained, optimizers = improve("encoding", state.params["encoding"], loss)
        return value, state.params | {"encoding": trained}, optimizers

    def agent() -> tuple[jax.Array, Params, Params]:
        latent = encode(config, state.params, batch["pair_observation"], batch["pair_reward"])
        targets: Any = state.params["target_critics"]
        loss = partial(agent_loss, config, batch, latent, targets)
        trained = {name: state.params[name] for name in ("actor", "value", "critics")}
        value, trained, optimizers = improve("agent", trained, loss)
        targets = optax.incremental_update(trained["critics"], targets, config.target_rate)
        return value, state.params | trained | {"target_critics": targets}, optimizers

    loss, params, optimizers = jax.lax.cond(state.step < config.encoding_updates, encoding, agent)
    return TrainState(state.step + 1, params, optimizers), {"loss": loss}


def encoding_loss(config: FREConfig, batch: Arrays, key: jax.Array, encoding: Params) -> jax.Array:
    """Mean squared error of rewards that the decoder predicts from drawn latents, and their divergence."""
    model = config.encoder(batch["pair_observation"].shape[-1]).bind(encoding)
    latent = model.encode(batch["pair_observation"], batch["pair_reward"])
    predicted = model.decode(latent.draw(key), batch["predicted_observation"])
    error = jnp.square(predicted - batch["predicted_reward"]).mean()
    return error + config.kl_weight * latent.divergence


def agent_loss(
    config: FREConfig, batch: Arrays, latent: jax.Array, target_critics: MlpParameters, agent: Params
) -> jax.Array:
    """Sum of the losses of value, critics and actor on transitions, for latents [K, L]."""
    latent, fixed = jnp.repeat(latent[:, None], batch["reward"].shape[1], axis=1), jax.lax.stop_gradient

    def value(observation: jax.Array) -> jax.Array:
        return apply_mlp(agent["value"], jnp.concatenate([observation, latent], -1))[..., 0]

    def qualities(critics: MlpParameters) -> jax.Array:
        read = jnp.concatenate([batch["observation"], latent, batch["action"]], -1)
        return jax.vmap(apply_mlp, in_axes=(0, None))(critics, read)[..., 0]

    advantage = qualities(target_critics).min(axis=0) - value(batch["observation"])
    asymmetry = jnp.where(advantage > 0, config.expectile, 1 - config.expectile)
    target = batch["reward"] + config.discount**config.horizon * fixed(value(batch["next_observation"]))
    weight = fixed(jnp.minimum(jnp.exp(config.temperature * advantage), _MOST_WEIGHT))
    action = act_on_latent(agent["actor"], latent, batch["observation"])
    errors = jnp.square(action - batch["action"]).mean(axis=-1)
    critics = jnp.square(qualities(agent["critics"]) - target).mean(axis=(1, 2)).sum()
    return (asymmetry * advantage**2).mean() + critics + (weight * errors).mean()
