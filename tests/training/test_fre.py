"""Functional reward encodings, in data whose next state is the action: the rewarded action is known."""

from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import pytest

from agentic_ring.data.rewards.features import Features
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.fre import FREConfig, RelabelledBatches, act, encode, load_fre, train_fre
from agentic_ring.training.loop import MetricsLog, read_metrics

CONFIG = FREConfig(
    updates=350,
    encoding_updates=150,
    checkpoint_every=100,
    latent=8,
    hidden=32,
    functions=4,
    horizon=2,
    learning_rate=5e-3,
    discount=0.5,
)


def right(features):
    return features["x"]


def left(features):
    return 1 - features["x"]


def hops():
    """Episodes of uniform actions, each of which is the next state."""
    action = np.random.default_rng(0).uniform(-1, 1, (20, 50, 1)).astype(np.float32)
    return ToldDecisions(np.roll(action, 1, axis=1), action, Features({"x": action[..., 0]}), 1)


def mesh():
    return make_mesh(MeshShape(), jax.devices()[:1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("fre"), hops()
    with (
        closing(Checkpoints(folder / "checkpoints")) as checkpoints,
        closing(MetricsLog(folder / "metrics.jsonl", 0)) as metrics,
    ):
        params = train_fre(CONFIG, data, [right, left], mesh(), checkpoints, metrics)
    return params, folder


def latents(params, reward, count=20):
    pairs = RelabelledBatches(hops(), [reward], CONFIG).draw_pairs(np.random.default_rng(1), count)
    with jax.set_mesh(mesh()):
        return encode(CONFIG, params, *pairs), pairs


def test_pairs_tell_the_agent_which_actions_are_rewarded(trained):
    params, folder = trained
    state = np.random.default_rng(2).uniform(-1, 1, (20, 1)).astype(np.float32)
    with jax.set_mesh(mesh()):
        loaded = load_fre(folder / "checkpoints", CONFIG, 1, 1, mesh())
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    for reward, sign in ((right, 1), (left, -1)):
        actions = act(params["actor"], latents(params, reward)[0], state)
        assert np.mean(sign * actions) > 0.5
    losses = [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]
    assert len(losses) == CONFIG.updates / 50


def test_the_latent_predicts_rewards_and_does_not_depend_on_the_order_of_pairs(trained):
    params, _ = trained
    model = CONFIG.encoder(1).bind(params["encoding"])
    ends = np.array([[-1], [1]], np.float32)[None].repeat(20, axis=0)
    for reward, sign in ((right, 1), (left, -1)):
        latent, (observation, rewards) = latents(params, reward)
        with jax.set_mesh(mesh()):
            backwards = encode(CONFIG, params, observation[:, ::-1], rewards[:, ::-1])
        np.testing.assert_allclose(backwards, latent, atol=1e-5)
        np.testing.assert_allclose(sign * model.decode(latent, ends).mean(0), [-1.7, 1.7], atol=0.4)


def test_a_batch_relabels_states_and_the_next_ones_with_the_same_function():
    data = hops()
    batch = RelabelledBatches(data, [right], CONFIG).draw(np.random.default_rng(0))
    scale = data.action.std()
    np.testing.assert_allclose(batch["pair_reward"], batch["pair_observation"][..., 0] / scale, atol=0.1)
    assert batch["predicted_reward"].shape == (CONFIG.functions, CONFIG.predicted)
    # The action leads to the first of the two states whose rewards count, the second one is the next.
    earned = (batch["action"] + CONFIG.discount * batch["next_observation"])[..., 0] / scale
    np.testing.assert_allclose(batch["reward"], earned, atol=0.1)


def test_settings_that_cannot_be_are_named():
    with pytest.raises(ConfigError, match="the first 350 train the encoder"):
        replace(CONFIG, encoding_updates=350)
    with pytest.raises(ConfigError, match="discount is 1"):
        replace(CONFIG, discount=1)
    with pytest.raises(DataError, match="no reward function"):
        RelabelledBatches(hops(), [], CONFIG)
