"""Zero-shot agents, in data whose next state is the action: the rewarded action is known."""

from contextlib import closing
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.data.relabelled_states import RelabelledStates
from agentic_ring.data.rewards.features import Features
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.layers import act_on_latent
from agentic_ring.training import forward_backward, fre
from agentic_ring.training.checkpoint import Checkpoints
from agentic_ring.training.forward_backward import ForwardBackwardConfig
from agentic_ring.training.fre import FREConfig, RelabelledBatches
from agentic_ring.training.loop import MetricsLog, read_metrics

FRE = FREConfig(
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
FB = ForwardBackwardConfig(
    updates=500, checkpoint_every=200, latent=4, hidden=32, batch=64, learning_rate=5e-3, discount=0.5
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


def trained_in(folder, train, *settings):
    with (
        closing(Checkpoints(folder / "checkpoints")) as checkpoints,
        closing(MetricsLog(folder / "metrics.jsonl", 0)) as metrics,
    ):
        return train(*settings, mesh(), checkpoints, metrics), folder


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    return trained_in(tmp_path_factory.mktemp("fre"), fre.train_fre, FRE, hops(), [right, left])


@pytest.fixture(scope="module")
def represented(tmp_path_factory):
    train = forward_backward.train_forward_backward
    return trained_in(tmp_path_factory.mktemp("fb"), train, FB, hops())


def pairs_of(reward, count, environments=20):
    states, random = RelabelledStates(hops(), [reward]), np.random.default_rng(1)
    return states.pairs(random, states.draw_functions(random, environments), count)


def check_that_a_reward_leads_to_its_actions(infer, actor):
    state = np.random.default_rng(2).uniform(-1, 1, (20, 1)).astype(np.float32)
    for reward, sign in ((right, 1), (left, -1)):
        with jax.set_mesh(mesh()):
            latent = infer(*pairs_of(reward, FRE.pairs))
        assert np.mean(sign * act_on_latent(actor, latent, state)) > 0.5


def test_states_and_their_rewards_tell_fre_which_actions_are_rewarded(encoded):
    params, folder = encoded
    with jax.set_mesh(mesh()):
        loaded = fre.load_fre(folder / "checkpoints", FRE, 1, 1, mesh())
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    check_that_a_reward_leads_to_its_actions(lambda *pairs: fre.encode(FRE, params, *pairs), params["actor"])
    losses = [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]
    assert len(losses) == FRE.updates / 50


def test_they_tell_fb_and_its_value_grows_with_the_reward_of_an_action(represented):
    params, folder = represented
    with jax.set_mesh(mesh()):
        loaded = forward_backward.load_forward_backward(folder / "checkpoints", FB, 1, 1, mesh())
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    check_that_a_reward_leads_to_its_actions(
        lambda *pairs: forward_backward.infer(params, *pairs), params["actor"]
    )
    latent = forward_backward.infer(params, *pairs_of(right, 1000, environments=1))
    action = np.linspace(-1, 1, 21, dtype=np.float32)[:, None]
    ahead = forward_backward.forward(params, np.zeros_like(action), jnp.repeat(latent, 21, axis=0), action)
    # The rewarded state is the next one, and what the actor earns later does not depend on the action.
    assert np.corrcoef((ahead @ latent[0]).mean(axis=0), action[:, 0])[0, 1] > 0.95


def test_the_latent_of_fre_predicts_rewards_and_does_not_depend_on_the_order_of_pairs(encoded):
    params, _ = encoded
    model = FRE.encoder(1).bind(params["encoding"])
    ends = np.array([[-1], [1]], np.float32)[None].repeat(20, axis=0)
    for reward, sign in ((right, 1), (left, -1)):
        observation, rewards = pairs_of(reward, FRE.pairs)
        with jax.set_mesh(mesh()):
            latent = fre.encode(FRE, params, observation, rewards)
            backwards = fre.encode(FRE, params, observation[:, ::-1], rewards[:, ::-1])
        np.testing.assert_allclose(backwards, latent, atol=1e-5)
        np.testing.assert_allclose(sign * model.decode(latent, ends).mean(0), [-1.7, 1.7], atol=0.4)


def test_a_batch_relabels_states_and_the_next_ones_with_the_same_function():
    data = hops()
    batch = RelabelledBatches(data, [right], FRE).draw(np.random.default_rng(0))
    scale = data.action.std()
    np.testing.assert_allclose(batch["pair_reward"], batch["pair_observation"][..., 0] / scale, atol=0.1)
    assert batch["predicted_reward"].shape == (FRE.functions, FRE.predicted)
    # The action leads to the first of the two states whose rewards count, the second one is the next.
    earned = (batch["action"] + FRE.discount * batch["next_observation"])[..., 0] / scale
    np.testing.assert_allclose(batch["reward"], earned, atol=0.1)


def test_settings_that_cannot_be_are_named():
    with pytest.raises(ConfigError, match="the first 350 train the encoder"):
        replace(FRE, encoding_updates=350)
    with pytest.raises(ConfigError, match="discount is 1"):
        replace(FRE, discount=1)
    with pytest.raises(ConfigError, match="updates is 70; expected a multiple of updates_per_call 50"):
        replace(FB, updates=70)
    with pytest.raises(ConfigError, match="reached_share 2; expected shares"):
        replace(FB, reached_share=2)
    with pytest.raises(DataError, match="no reward function"):
        RelabelledStates(hops(), [])
