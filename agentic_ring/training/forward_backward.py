"""Forward-backward representations: a zero-shot agent that trains without rewards (FB, arXiv 2209.14935).

A latent z on a sphere stands for a task, and an actor acts for it. Two maps factorise how often the actor
will be in a state: F(s, a, z) of the present and B(s') of that state. Their product is the density of future
states, discounted and relative to the data; it is learned by temporal differences, without rewards. A reward
function needs no training: z is the mean of r(s) B(s) over states of the data, and the actor has learned to
maximise the value F(s, a, z) . z.

As in facebookresearch/controllable_agent (``agent/fb_ddpg.py``), but for sizes and rates; further
differences: the target is the mean of both maps' measures (as in arXiv 2504.11054), since their minimum makes
it shrink, and rewards are told in deviations (``RewardScale``).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.data.transition_dataset import RandomBatches
from agentic_ring.errors import ConfigError, check_at_least_one, check_positive
from agentic_ring.models.layers import MlpParameters, act_on_latent, apply_mlp, init_mlp
from agentic_ring.models.model import Params
from agentic_ring.training.checkpoint import Checkpoints, SavedCheckpoints
from agentic_ring.training.loop import MetricsLog, run_updates
from agentic_ring.training.optimizer import TrainConfig
from agentic_ring.training.td3 import with_noise
from agentic_ring.training.train_step import TrainState, WholeState

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class ForwardBackwardConfig:
    """Hyperparameters and length of training; ``seed`` is that of weights and batches."""

    updates: int
    checkpoint_every: int
    """Updates between two checkpoints."""
    updates_per_call: int = 50
    """Updates per compiled call; the loss is checked after each call."""
    latent: int = 50
    """Size L of the latent."""
    hidden: int = 256
    """Width of the hidden layers of the maps and of the actor."""
    batch: int = 256
    """Transitions of an update."""
    pairs: int = 10_000
    """States whose rewards tell a task."""
    learning_rate: float = 3e-4
    discount: float = 0.98
    """Discount per decision."""
    target_rate: float = 0.01
    """Share of the maps that their targets take over per update."""
    noise: float = 0.2
    noise_clip: float = 0.3
    """Deviation and bound of the noise of the actions that are valued."""
    reached_share: float = 0.5
    """Share of the latents of training that are B of a state of the data; the others are uniform."""
    orthonormality: float = 1.0
    """Weight of the loss that keeps the dimensions of B apart."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least_one(self, "updates_per_call", "latent", "hidden", "batch", "pairs")
        check_positive(self, "learning_rate", "target_rate", "noise", "noise_clip")
        for name in ("updates", "checkpoint_every"):
            value = getattr(self, name)
            if value < 1 or value % self.updates_per_call:
                raise ConfigError(
                    f"{name} is {value}; expected a multiple of updates_per_call {self.updates_per_call}"
                )
        if not (0 < self.discount < 1 and 0 <= self.reached_share <= 1):
            raise ConfigError(
                f"discount is {self.discount} and reached_share {self.reached_share}; expected shares"
            )

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """That of the maps, and that of the actor."""
        return optax.adam(self.learning_rate)


def on_sphere(vectors: jax.Array) -> jax.Array:
    """Vectors [..., L] scaled to the length of latents, the square root of L."""
    return vectors * jnp.sqrt(vectors.shape[-1]) / (jnp.linalg.norm(vectors, axis=-1, keepdims=True) + 1e-8)


def forward(params: Params, observation: Any, latent: Any, action: Any) -> jax.Array:
    """Both maps F of a present [B, ...]: [2, B, L]; their products with a latent are values of its task."""

    def one(weights: Params) -> jax.Array:
        # Read apart, since beside the long latents little of the actions would pass the first LayerNorm.
        parts = [
            apply_mlp(weights[name], jnp.concatenate([observation, given], axis=-1))
            for name, given in (("latent", latent), ("action", action))
        ]
        return apply_mlp(weights["both"], jnp.concatenate(parts, axis=-1))

    return jax.vmap(one)(params["forward"])


@jax.jit
def infer(params: Params, observation: Any, reward: Any) -> jax.Array:
    """Latents [K, L] of the tasks in which states [K, N, O] have these rewards [K, N], in deviations."""
    backward: Any = params["backward"]
    return on_sphere(jnp.einsum("kn,knl->kl", reward, _backward(backward, observation)))


def train_forward_backward(
    config: ForwardBackwardConfig,
    data: ToldDecisions,
    mesh: Mesh,
    checkpoints: Checkpoints,
    metrics: MetricsLog,
) -> Params:
    """Trains both maps and the actor, as ``run_updates`` does.

    Returns:
      Weights of ``forward`` (two maps), ``backward`` and ``actor``, and the ``targets`` of the maps.
    """
    dims = data.observation.shape[-1], data.action.shape[-1]
    shape, (episodes, decisions) = (config.updates_per_call, config.batch), data.action.shape[:2]

    def draw(random: np.random.Generator) -> dict[str, np.ndarray]:
        episode, decision = random.integers(episodes, size=shape), random.integers(decisions - 1, size=shape)
        return {
            "observation": data.observation[episode, decision],
            "action": data.action[episode, decision],
            "next_observation": data.observation[episode, decision + 1],
        }

    @jax.jit
    def improve(state: TrainState, batches: Arrays) -> tuple[TrainState, Arrays]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), state.step), shape[0])
        learned = state.params, state.optimizer
        learned, losses = jax.lax.scan(partial(_update, config), learned, (batches, keys))
        return TrainState(state.step + 1, *learned), {"loss": losses.mean()}

    calls, every = (n // config.updates_per_call for n in (config.updates, config.checkpoint_every))
    whole = WholeState(lambda: _fresh_state(config, *dims), mesh)
    with jax.set_mesh(mesh):
        state = run_updates(
            TrainConfig(calls, config.batch, checkpoint_every=every),
            improve,
            whole.fresh,
            whole.abstract,
            RandomBatches(draw, config.seed),
            checkpoints,
            metrics,
            learning_rate=lambda _: config.learning_rate,
            tokens=lambda batch: batch["action"][..., 0].size,
        )
    return state.params


def load_forward_backward(
    folder: Path, config: ForwardBackwardConfig, observation_dim: int, action_dim: int, mesh: Mesh
) -> Params:
    """Loads the weights of the newest checkpoint in a folder of training; raises as ``restore`` does."""
    saved = SavedCheckpoints(folder)
    whole = WholeState(lambda: _fresh_state(config, observation_dim, action_dim), mesh)
    state, _ = saved.restore(saved.last_step or 0, whole.abstract())
    return state.params


def _fresh_state(config: ForwardBackwardConfig, observation_dim: int, action_dim: int) -> TrainState:
    forward_key, backward_key, actor_key = jax.random.split(jax.random.key(config.seed), 3)
    width, read = config.hidden, observation_dim + config.latent

    def forward_map(key: jax.Array) -> Params:
        sizes = {
            "latent": (read, width, width // 2),
            "action": (observation_dim + action_dim, width, width // 2),
            "both": (width, width, config.latent),
        }
        keys = jax.random.split(key, len(sizes))
        return {name: init_mlp(each, sizes[name]) for name, each in zip(sizes, keys, strict=True)}

    maps = {
        "forward": jax.vmap(forward_map)(jax.random.split(forward_key, 2)),
        "backward": init_mlp(backward_key, (observation_dim, width, width, config.latent)),
    }
    actor = init_mlp(actor_key, (read, width, width, action_dim))
    moments = {"maps": config.optimizer.init(maps), "actor": config.optimizer.init(actor)}
    return TrainState(jnp.zeros((), jnp.int32), {**maps, "actor": actor, "targets": maps}, moments)


def _update(
    config: ForwardBackwardConfig, learned: tuple[Params, Any], given: tuple[Arrays, jax.Array]
) -> tuple[tuple[Params, Any], jax.Array]:
    """One update of the maps, then of the actor; returns the loss of the maps."""
    (params, moments), (batch, key) = learned, given
    latent_key, target_key, actor_key = jax.random.split(key, 3)
    noisy = partial(with_noise, deviation=config.noise, bound=config.noise_clip)
    trained: Any = {name: params[name] for name in ("forward", "backward")}
    targets, actor = params["targets"], params["actor"]
    latent = draw_latents(config, params["backward"], batch["next_observation"], latent_key)
    next_action = noisy(act_on_latent(actor, latent, batch["next_observation"]), target_key)

    loss_of = partial(maps_loss, config, batch, latent, targets, next_action)
    loss, gradient = jax.value_and_grad(loss_of)(trained)
    updates, of_maps = config.optimizer.update(gradient, moments["maps"])
    maps: Any = optax.apply_updates(trained, updates)

    def negative_value(actor: MlpParameters) -> jax.Array:
        action = noisy(act_on_latent(actor, latent, batch["observation"]), actor_key)
        ahead = forward(maps, batch["observation"], latent, action)
        return -(ahead * latent).sum(axis=-1).min(axis=0).mean()

    updates, of_actor = config.optimizer.update(jax.grad(negative_value)(actor), moments["actor"])
    targets = optax.incremental_update(maps, targets, config.target_rate)
    params = {**maps, "actor": optax.apply_updates(actor, updates), "targets": targets}
    return (params, {"maps": of_maps, "actor": of_actor}), loss


def draw_latents(
    config: ForwardBackwardConfig, backward: MlpParameters, reached: jax.Array, key: jax.Array
) -> jax.Array:
    """Latents [B, L] to train on: uniform ones, and B of a share of the states [B, O], in another order."""
    uniform_key, order_key, share_key = jax.random.split(key, 3)
    uniform = on_sphere(jax.random.normal(uniform_key, (len(reached), config.latent)))
    of_states = _backward(backward, jax.random.permutation(order_key, reached))
    chosen = jax.random.bernoulli(share_key, config.reached_share, (len(reached), 1))
    return jax.lax.stop_gradient(jnp.where(chosen, of_states, uniform))


def maps_loss(
    config: ForwardBackwardConfig,
    batch: Arrays,
    latent: jax.Array,
    targets: Params,
    next_action: jax.Array,
    maps: Params,
) -> jax.Array:
    """Squared temporal differences of the measure of all pairs of transitions, and B's orthonormality.

    The measure of a pair is F of the one's present times B of the other's next state. Each transition comes
    to its own next state, which is the term linear in the measure.
    """
    observation, reached = batch["observation"], batch["next_observation"]
    ahead = forward(maps, observation, latent, batch["action"])
    backward = _backward(maps["backward"], reached)
    later = forward(targets, reached, latent, next_action)
    target = (later @ _backward(targets["backward"], reached).T).mean(axis=0)
    measure, size = ahead @ backward.T, len(observation)

    def over_pairs(squares: jax.Array) -> jax.Array:
        """Mean over pairs of different transitions of [..., B, B]."""
        return jnp.where(jnp.eye(size, dtype=bool), 0, squares).sum(axis=(-2, -1)) / (size * (size - 1))

    differences = over_pairs(jnp.square(measure - config.discount * target)).sum() / 2
    own = jnp.diagonal(measure, axis1=-2, axis2=-1).mean(axis=-1).sum()
    # All B have the same length, so that only products of different ones are left to keep small.
    return differences - own + config.orthonormality * over_pairs(jnp.square(backward @ backward.T))


def _backward(backward: Any, observation: jax.Array) -> jax.Array:
    """B: [..., O] -> [..., L]."""
    return on_sphere(apply_mlp(backward, observation))
