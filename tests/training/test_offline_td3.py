"""TD3 and TD3+BC on transitions whose best policy is known."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.data.transition_dataset import TransitionDataset
from agentic_ring.errors import ConfigError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.loop import MetricsLog, read_metrics
from agentic_ring.training.td3 import (
    OfflineTD3Config,
    TD3Config,
    act,
    init_population,
    temporal_difference,
    train_td3,
)

BEST = 0.3
LEARNER = TD3Config(hidden=32, batch=64, learning_rate=3e-3, horizon=1, discount=0.0)
CONFIG = OfflineTD3Config(LEARNER, updates=400, updates_per_call=50, checkpoint_every=200)


def bandit() -> TransitionDataset:
    """Episodes of one decision: uniform actions with a higher reward closer to ``BEST``."""
    generator = np.random.default_rng(0)
    rows = np.arange(0, 4000, 2)
    observation = generator.normal(size=(4000, 2)).astype(np.float32)
    action = generator.uniform(-1, 1, (4000, 1)).astype(np.float32)
    reward = -np.square(action[:, 0] - BEST)
    return TransitionDataset(observation, action, reward, reward, np.zeros(4000, np.int32), rows)


def policy_of(config, data, folder):
    mesh = make_mesh(MeshShape(ring=1), jax.devices()[:1])
    with (
        closing(Checkpoints(folder / "checkpoints")) as checkpoints,
        closing(MetricsLog(folder / "metrics.jsonl", 0)) as metrics,
    ):
        return train_td3(config, data, mesh, checkpoints, metrics)


def actions(state):
    observation = np.random.default_rng(1).normal(size=(1, 100, 2)).astype(np.float32)
    return np.asarray(act(state.actor, observation))


def test_td3_finds_the_best_action_even_if_stopped_and_imitation_restrains_it(tmp_path):
    data = bandit()
    best = actions(policy_of(CONFIG, data, tmp_path / "td3"))
    np.testing.assert_allclose(best.mean(), BEST, atol=0.1)
    # A stopped run ends as if it had not stopped.
    for updates in (200, 400):
        policy = policy_of(replace(CONFIG, updates=updates), data, tmp_path / "stopped")
    np.testing.assert_array_equal(actions(policy), best)
    # With a small alpha values count little, and the policy stays near the mean of the data.
    # With a larger one they win, small as they are: each is divided by their mean size.
    for alpha, expected in ((0.01, 0.0), (0.1, BEST)):
        config = replace(CONFIG, learner=replace(LEARNER, bc_alpha=alpha))
        held = actions(policy_of(config, data, tmp_path / f"td3_bc_{alpha}"))
        np.testing.assert_allclose(held.mean(), expected, atol=0.1)
    losses = [row["loss"] for row in read_metrics(tmp_path / "td3" / "metrics.jsonl")]
    assert len(losses) == 8
    assert losses[-1] < 0.2 * losses[0]


def test_a_value_counts_as_many_decisions_later_as_the_horizon_has():
    """Critics that value everything at 2, and transitions over 3 decisions that pay 1."""
    config = replace(LEARNER, discount=0.5, horizon=3)
    shapes = jax.eval_shape(partial(init_population, config, 2, 1), jnp.array([0]))
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    for critics in (state.critics, state.target_critics):
        critics[-1]["bias"] += 2
    batch = {"observation": jnp.ones((1, 4, 2)), "action": jnp.ones((1, 4, 1)), "reward": jnp.ones((1, 4))}
    error = temporal_difference(config, state, batch | {"next_observation": batch["observation"]})
    np.testing.assert_allclose(error, (1 + 0.5**3 * 2 - 2) ** 2, rtol=1e-6)


def test_settings_that_do_not_fit_are_named():
    for change, message in (
        ({"learner": replace(LEARNER, horizon=3)}, "horizon is 3"),
        ({"updates_per_call": 0}, "updates_per_call 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(CONFIG, **change)
