"""TD3 (arXiv 1802.09477) for a population of P agents that one compiled call updates.

Agents differ in seed and in the task whose reward they receive. All weights have a leading axis P, and a
call scans over many updates.

``train_td3`` learns offline from stored transitions, with TD3 or TD3+BC, as ExoRL does (denisyarats/exorl:
``agent/td3.py``, ``agent/td3_bc.py``), but for a target actor, only the first critic in the actor's gradient,
as in the TD3 paper, and normalisation of every hidden layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from agentic_ring.data.transition_dataset import RandomBatches, TransitionDataset
from agentic_ring.errors import ConfigError, check_at_least_one, check_positive, set_fields
from agentic_ring.models.layers import MlpParameters, apply_mlp, init_mlp
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.loop import MetricsLog, run_updates
from agentic_ring.training.optimizer import TrainConfig
from agentic_ring.training.train_step import TrainState, WholeState


@dataclass(frozen=True)
class TD3Config:
    """Hyperparameters; the noise is that of URLB (std .2, clip .3), the rest is chosen for cheap updates.

    Small batches learn as much per update as large ones here, and the time is proportional to updates.
    """

    hidden: int = 256
    batch: int = 64
    learning_rate: float = 1e-3
    horizon: int = 3
    """Decisions of an n-step return."""
    discount: float = 0.98
    """Discount per decision."""
    target_rate: float = 0.01
    target_noise: float = 0.2
    target_noise_clip: float = 0.3
    policy_delay: int = 2
    """Critic updates per actor update."""
    bc_alpha: float | None = None
    """Alpha of TD3+BC (arXiv 2106.06860): the actor also imitates the data, and values are weighted by alpha
    over their mean absolute value; None is TD3."""

    def __post_init__(self) -> None:
        check_at_least_one(self, "hidden", "batch", "horizon", "policy_delay")
        check_positive(self, *set_fields(self, "bc_alpha"))


class TD3State(NamedTuple):
    """Everything that an update changes."""

    actor: MlpParameters
    critics: MlpParameters  # leading axis 2
    target_critics: MlpParameters
    target_actor: MlpParameters
    actor_optimizer: optax.OptState
    critic_optimizer: optax.OptState
    key: jax.Array  # key data, which unlike a key can be saved in a checkpoint


def init_population(config: TD3Config, observation_dim: int, action_dim: int, seeds: jax.Array) -> TD3State:
    """Creates one independent agent for each of ``seeds`` [P]."""
    hidden, optimizer = (config.hidden, config.hidden), optax.adam(config.learning_rate)

    def member(seed: jax.Array) -> TD3State:
        actor_key, critic_key, key = jax.random.split(jax.random.key(seed), 3)
        actor = init_mlp(actor_key, (observation_dim, *hidden, action_dim))
        sizes = (observation_dim + action_dim, *hidden, 1)
        critics = jax.vmap(lambda k: init_mlp(k, sizes))(jax.random.split(critic_key, 2))
        optimizers = (optimizer.init(actor), optimizer.init(critics))
        return TD3State(actor, critics, critics, actor, *optimizers, jax.random.key_data(key))

    return jax.vmap(member)(seeds)


def with_noise(action: jax.Array, key: jax.Array, deviation: float, bound: float) -> jax.Array:
    """Actions in [-1, 1] with normal noise of this deviation, itself within plus and minus ``bound``."""
    noise = jnp.clip(deviation * jax.random.normal(key, action.shape), -bound, bound)
    return jnp.clip(action + noise, -1, 1)


@jax.jit
def act(actor: MlpParameters, observation: jax.Array) -> jax.Array:
    """Deterministic actions: observation [P, M, O] -> [P, M, A]."""
    return jnp.tanh(jax.vmap(apply_mlp)(actor, observation))


@partial(jax.jit, static_argnums=0)
def update(config: TD3Config, state: TD3State, batches: dict[str, jax.Array]) -> TD3State:
    """Runs U rounds of ``policy_delay`` critic updates and one actor update for every agent.

    ``batches``: observation, next_observation [U, delay, P, B, O], action [..., A], reward [U, delay, P, B].
    """

    def body(state: TD3State, batch: dict[str, jax.Array]) -> tuple[TD3State, None]:
        return jax.vmap(partial(_update_member, config), in_axes=(0, 1))(state, batch), None

    return jax.lax.scan(body, state, batches)[0]


@partial(jax.jit, static_argnums=0)
def temporal_difference(config: TD3Config, state: TD3State, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean squared error of the critics against their targets, [P], on a batch [P, B, ...]."""

    def member(state: TD3State, batch: dict[str, jax.Array]) -> jax.Array:
        target = _critic_target(config, state, batch, jax.random.wrap_key_data(state.key))
        return jnp.mean((_critics(state.critics, batch["observation"], batch["action"]) - target) ** 2)

    return jax.vmap(member)(state, batch)


def _update_member(config: TD3Config, state: TD3State, batch: dict[str, jax.Array]) -> TD3State:
    for step in range(config.policy_delay):
        state = _update_critics(config, state, {name: array[step] for name, array in batch.items()})
    return _update_actor(config, state, batch["observation"][-1], batch["action"][-1])


def _critics(critics: MlpParameters, observation: jax.Array, action: jax.Array) -> jax.Array:
    return jax.vmap(apply_mlp, in_axes=(0, None))(critics, jnp.concatenate([observation, action], -1))[..., 0]


def _critic_target(
    config: TD3Config, state: TD3State, batch: dict[str, jax.Array], noise_key: jax.Array
) -> jax.Array:
    next_action = jnp.tanh(apply_mlp(state.target_actor, batch["next_observation"]))
    next_action = with_noise(next_action, noise_key, config.target_noise, config.target_noise_clip)
    next_value = _critics(state.target_critics, batch["next_observation"], next_action).min(0)
    return batch["reward"] + config.discount**config.horizon * next_value


def _update_critics(config: TD3Config, state: TD3State, batch: dict[str, jax.Array]) -> TD3State:
    key, noise_key = jax.random.split(jax.random.wrap_key_data(state.key))
    target = _critic_target(config, state, batch, noise_key)

    def loss(critics: MlpParameters) -> jax.Array:
        return jnp.mean((_critics(critics, batch["observation"], batch["action"]) - target) ** 2, -1).sum()

    gradient = jax.grad(loss)(state.critics)
    updates, optimizer = optax.adam(config.learning_rate).update(gradient, state.critic_optimizer)
    critics: Any = optax.apply_updates(state.critics, updates)
    targets = optax.incremental_update(critics, state.target_critics, config.target_rate)
    return state._replace(
        critics=critics, target_critics=targets, critic_optimizer=optimizer, key=jax.random.key_data(key)
    )


def _update_actor(config: TD3Config, state: TD3State, observation: jax.Array, action: jax.Array) -> TD3State:
    critic = jax.tree.map(lambda both: both[0], state.critics)

    def loss(actor: MlpParameters) -> jax.Array:
        chosen = jnp.tanh(apply_mlp(actor, observation))
        value = apply_mlp(critic, jnp.concatenate([observation, chosen], -1))[..., 0]
        if config.bc_alpha is None:
            return -value.mean()
        size = jax.lax.stop_gradient(jnp.abs(value).mean())
        return -config.bc_alpha * value.mean() / size + jnp.mean((chosen - action) ** 2)

    gradient = jax.grad(loss)(state.actor)
    updates, optimizer = optax.adam(config.learning_rate).update(gradient, state.actor_optimizer)
    actor: Any = optax.apply_updates(state.actor, updates)
    # The target actor is updated once per ``policy_delay`` updates, by all of their steps at once.
    rate = 1 - (1 - config.target_rate) ** config.policy_delay
    target = optax.incremental_update(actor, state.target_actor, rate)
    return state._replace(actor=actor, target_actor=target, actor_optimizer=optimizer)


@dataclass(frozen=True)
class OfflineTD3Config:
    """Hyperparameters and length of training; ``seed`` is that of weights, batches and target noise."""

    learner: TD3Config
    """``horizon`` is 1, since stored transitions are sampled one by one."""
    updates: int
    """Number of actor updates; critics have ``learner.policy_delay`` times as many."""
    updates_per_call: int = 50
    """Actor updates per compiled call; the loss is checked after each call."""
    checkpoint_every: int = 1000
    """Actor updates between two checkpoints."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.learner.horizon != 1:
            raise ConfigError(
                f"horizon is {self.learner.horizon}; stored transitions have one decision, so use 1"
            )
        for name in ("updates", "checkpoint_every"):
            value = getattr(self, name)
            if self.updates_per_call < 1 or value < 1 or value % self.updates_per_call:
                raise ConfigError(
                    f"{name} is {value}; expected a multiple of updates_per_call {self.updates_per_call}"
                )


def train_td3(
    config: OfflineTD3Config,
    data: TransitionDataset,
    mesh: Mesh,
    checkpoints: Checkpoints,
    metrics: MetricsLog,
    measure: Callable[[TD3State], dict[str, float]] | None = None,
) -> TD3State:
    """Trains one agent, as ``run_updates`` does; its arrays have a leading axis 1. ``measure`` gets it."""
    learner = config.learner
    shape = (config.updates_per_call, learner.policy_delay, 1, learner.batch)
    dims = data.observation.shape[1], data.action.shape[1]
    calls, every = (n // config.updates_per_call for n in (config.updates, config.checkpoint_every))
    loop = TrainConfig(calls, learner.batch, checkpoint_every=every)

    def fresh() -> TrainState:
        state = init_population(learner, *dims, jnp.array([config.seed]))
        return TrainState(jnp.zeros((), jnp.int32), state._asdict(), ())

    def improve(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        learned = update(learner, TD3State(**state.params), batch)
        last = {name: array[-1, -1] for name, array in batch.items()}
        loss = temporal_difference(learner, learned, last)[0]
        return TrainState(state.step + 1, learned._asdict(), ()), {"loss": loss}

    whole = WholeState(fresh, mesh)
    with jax.set_mesh(mesh):
        state = run_updates(
            loop,
            improve,
            whole.fresh,
            whole.abstract,
            RandomBatches(lambda generator: data.transitions(generator, shape), config.seed),
            checkpoints,
            metrics,
            learning_rate=lambda _: learner.learning_rate,
            tokens=lambda batch: batch["reward"].size,
            measure=measure and (lambda state: measure(TD3State(**state.params))),
        )
    return TD3State(**state.params)
