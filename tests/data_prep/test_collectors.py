"""Explorers, replay, and learners: what they draw, learn and record."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from agentic_ring.models.layers import apply_mlp
from agentic_ring.training.td3 import TD3Config, update
from data_prep.explorers import NoiseExplorer, PopulationExplorer, ReplayBuffer
from data_prep.learners import (
    APT,
    DIAYN,
    RND,
    IntrinsicRewardLearner,
    JoinedLearners,
    TD3Learner,
    on_own_devices,
    particle_reward,
)


@given(
    complete=st.integers(0, 3), running=st.integers(1, 3), steps=st.integers(0, 5), horizon=st.integers(1, 4)
)
@settings(max_examples=40)
def test_replay_draws_every_transition_and_no_other(complete, running, steps, horizon):
    """Each observation is its own name (episode, step), so a drawn transition can be looked up."""
    decisions, discount, episodes = 6, 0.5, complete + running
    replay = ReplayBuffer(episodes, decisions, observation_dim=2, action_dim=1, rewards=2)
    generator = np.random.default_rng(0)
    action = generator.normal(size=(episodes, decisions, 1)).astype(np.float32)
    reward = generator.normal(size=(episodes, decisions, 2)).astype(np.float32)
    names = np.stack(np.meshgrid(range(episodes), range(decisions + 1), indexing="ij"), -1)
    for episode in range(complete):
        replay.add_episode(names[episode], action[episode], reward[episode])
    live = slice(complete, episodes)
    replay.begin_round(names[live, 0])
    for step in range(steps):
        replay.add(action[live, step], reward[live, step], names[live, step + 1])

    lengths = [decisions] * complete + [steps] * running
    known = {(number, step) for number, length in enumerate(lengths) for step in range(length - horizon + 1)}
    assert replay.size(horizon) == len(known)
    if not known:
        return
    drawn = replay.sample(generator, (40, 50), horizon, discount)
    episode, step = drawn["observation"].reshape(-1, 2).astype(int).T
    assert set(zip(episode.tolist(), step.tolist(), strict=True)) == known
    following = drawn["next_observation"].reshape(-1, 2)
    np.testing.assert_array_equal(following, np.stack([episode, step + horizon], -1))
    np.testing.assert_array_equal(drawn["action"].reshape(-1, 1), action[episode, step])
    summed = sum(discount**k * reward[episode, step + k] for k in range(horizon))
    np.testing.assert_allclose(drawn["reward"].reshape(-1, 2), summed, rtol=1e-5, atol=1e-6)


def test_a_member_draws_its_share_from_its_own_episodes():
    """Two members of two episodes each in every round, the second of which has begun; names as above."""
    replay = ReplayBuffer(8, decisions=6, observation_dim=2, action_dim=1, rewards=1)
    names = np.stack(np.meshgrid(range(8), range(7), indexing="ij"), -1)
    for live, steps in ((slice(0, 4), 6), (slice(4, 8), 3)):
        replay.begin_round(names[live, 0])
        for step in range(steps):
            replay.add(np.zeros((4, 1)), np.zeros((4, 1)), names[live, step + 1])

    def drawn(own_share):
        draws = replay.sample(np.random.default_rng(0), (500, 2, 20), 1, 1.0, own_share)["observation"]
        return draws.swapaxes(0, 1).reshape(2, -1, 2).astype(int)

    for member, draws in enumerate(drawn(1.0)):
        own = {
            (4 * each + 2 * member + k, step)
            for each in (0, 1)
            for k in (0, 1)
            for step in range(6 - 3 * each)
        }
        assert set(map(tuple, draws.tolist())) == own
    owner = drawn(0.5)[..., 0] % 4 // 2
    np.testing.assert_allclose((owner == np.arange(2)[:, None]).mean(1), 0.75, atol=0.02)


# One configuration and one number of members, so that most tests share one compiled update.
CONFIG = TD3Config(hidden=32, batch=64, horizon=1, discount=0.5, target_rate=0.05)
SEEDS = [0, 1, 2]


def batches_of(learner, generator):
    """Decisions with the reward ``-(action - goal) ** 2`` of two goals, -0.5 and 0.3, and a reward of 1."""
    shape = learner.batch_shape(40)
    observation = generator.normal(size=(*shape, 3))
    action = generator.uniform(-1, 1, (*shape, 1))
    reward = np.concatenate([-((action - np.array([-0.5, 0.3])) ** 2), np.ones((*shape, 1))], -1)
    arrays = {"observation": observation, "action": action, "reward": reward, "next_observation": observation}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


@pytest.fixture(scope="module")
def trained():
    learner, generator = TD3Learner(CONFIG, 3, 1, SEEDS, reward_columns=[1, 0, 2]), np.random.default_rng(0)
    for _ in range(40):
        learner.update(batches_of(learner, generator))
    return learner


@pytest.mark.slow
def test_each_td3_member_learns_from_the_reward_of_its_own_task(trained):
    generator = np.random.default_rng(1)
    action = trained.act(trained.state, generator.normal(size=(3, 50, 3)).astype(np.float32))
    np.testing.assert_allclose(action.mean((1, 2))[:2], [0.3, -0.5], atol=0.1)
    # A reward of 1 at every decision is worth 1 / (1 - discount) under any policy.
    inputs = jnp.array(generator.uniform(-1, 1, (20, 4)), jnp.float32)
    values = jax.vmap(jax.vmap(apply_mlp, (0, None)), (0, None))(trained.state.critics, inputs)
    np.testing.assert_allclose(values[2], 2.0, rtol=0.05)


@pytest.mark.slow
def test_members_are_updated_on_devices_of_their_own_without_communication(trained):
    batches = batches_of(trained, np.random.default_rng(0))
    own = on_own_devices(batches | {"reward": batches["reward"][..., 0]}, axis=2)
    program = update.lower(CONFIG, trained.state, own).compile().as_text()
    assert not any(word in program for word in ("all-reduce", "all-gather", "all-to-all", "collective"))
    assert all(len(leaf.sharding.device_set) == 3 for leaf in jax.tree.leaves(trained.state))


@pytest.mark.slow
def test_joined_populations_learn_as_they_do_alone():
    def populations() -> list[TD3Learner]:
        wide = TD3Learner(CONFIG, 3, 1, SEEDS[2:], [2])
        return [TD3Learner(replace(CONFIG, hidden=8), 3, 1, SEEDS[:2], [1, 0]), wide]

    joined, alone, again = JoinedLearners(*populations()), populations(), JoinedLearners(*populations())
    batches = batches_of(joined, np.random.default_rng(0))
    joined.update(batches)
    for members, learner in zip((slice(2), slice(2, None)), alone, strict=True):
        learner.update({name: each[:, :, members] for name, each in batches.items()})
    again.restore(jax.device_get(joined.state))
    seen = np.random.default_rng(1).normal(size=(3, 4, 3)).astype(np.float32)
    for other in ([each.state for each in alone], again.state):
        jax.tree.map(np.testing.assert_array_equal, joined.state, other)
    first, last = alone
    each = [first.act(first.state, seen[:2]), last.act(last.state, seen[2:])]
    np.testing.assert_array_equal(joined.act(joined.state, seen), np.concatenate(each))


@pytest.mark.parametrize(
    "curiosity",
    [
        pytest.param(RND(hidden=32), id="rnd"),
        pytest.param(APT(), id="icm_apt", marks=pytest.mark.slow),  # trains an ICM as well
    ],
)
def test_an_intrinsic_reward_comes_to_prefer_unseen_states(curiosity):
    """Most actions lead to one place, some to ever new ones: the policy comes to prefer the latter."""
    learner, generator = IntrinsicRewardLearner(curiosity, CONFIG, 3, 1, SEEDS), np.random.default_rng(0)
    learner.begin_round(generator.normal(size=(1000, 3)).astype(np.float32))
    for _ in range(10):
        batches = batches_of(learner, generator)
        elsewhere = 2 * generator.normal(size=batches["observation"].shape)
        following = np.where(batches["action"] > 0.3, elsewhere, 0).astype(np.float32)
        learner.update(batches | {"next_observation": following})
    action = learner.act(learner.state, generator.normal(size=(3, 50, 3)).astype(np.float32))
    assert (action.mean((1, 2)) > 0.3).all()


@pytest.mark.parametrize("neighbours", [3, 12])
def test_particle_reward_is_that_of_every_distance_measured(neighbours):
    particles = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    distances = np.linalg.norm(particles[:, None] - particles, axis=-1)
    nearest = np.sort(distances, axis=1)[:, 1 : neighbours + 1]  # the first is the particle itself
    expected = np.log1p((nearest / nearest.mean()).mean(1))
    np.testing.assert_allclose(particle_reward(jnp.array(particles), neighbours), expected, rtol=1e-4)


def test_diayn_rewards_a_skill_that_can_be_told():
    diayn, skill = DIAYN(skills=3, hidden=8), np.arange(20) % 3
    observation = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)

    @jax.jit
    def computed(key):
        parameters = diayn.init(key, 4, 1)
        batch = {"next_observation": observation, "skill": np.eye(3)[skill]}
        return apply_mlp(parameters, observation), diayn.loss_and_reward(parameters, batch)

    logits, (loss, reward) = computed(jax.random.key(0))
    odds = scipy.special.softmax(logits, axis=-1)[np.arange(20), skill]
    np.testing.assert_allclose(reward, np.log(3 * odds), rtol=1e-4)  # a guess is worth 0
    np.testing.assert_allclose(loss, -np.log(odds).mean(), rtol=1e-4)


@pytest.mark.slow
def test_diayn_comes_to_act_so_that_its_skill_can_be_told():
    """The action is what can be seen next: two skills end at actions far apart."""
    # Smaller batches leave the distance of the actions to chance: it then differs with the compiler.
    config = TD3Config(hidden=32, batch=256, horizon=1, discount=0.0)
    diayn, one_hot = DIAYN(skills=2, hidden=32), np.eye(2, dtype=np.float32)
    learner = IntrinsicRewardLearner(diayn, config, 1 + 2, 1, seeds=[0, 1], skills=2)
    generator = np.random.default_rng(0)
    learner.begin_round(np.zeros((10, 3), np.float32))
    for _ in range(25):
        shape = learner.batch_shape(40)
        skill = one_hot[generator.integers(2, size=shape)]
        observation = np.concatenate([np.zeros((*shape, 1), np.float32), skill], -1)
        action = np.stack(
            [learner.act(learner.state, step) for step in observation.reshape(-1, *shape[2:], 3)]
        )
        action = np.clip(action + generator.normal(0, 0.3, action.shape), -1, 1).reshape(*shape, 1)
        learner.update(
            {
                "observation": observation,
                "action": action.astype(np.float32),
                "next_observation": np.concatenate([action, skill], -1).astype(np.float32),
                "reward": np.zeros((*shape, 0), np.float32),
            }
        )
    asked = np.concatenate([np.zeros((2, 1), np.float32), one_hot], -1)
    actions = learner.act(learner.state, np.stack([asked, asked]))
    assert (np.abs(actions[:, 0] - actions[:, 1]) > 0.5).all()
    followed = {"next_observation": learner._normalise(actions), "skill": np.stack([one_hot, one_hot])}
    _, reward = jax.vmap(diayn.loss_and_reward)(learner.state.parameters, followed)
    assert (reward > np.log(2) / 2).all()  # a guess is worth 0, certainty log 2


class CountingLearner:
    """A learner whose state counts its updates, and whose actions are that count in thousandths."""

    config, state = TD3Config(horizon=1, discount=1.0), 0

    def batch_shape(self, updates):
        return (updates, 1)

    def begin_round(self, observation):
        pass

    def act(self, state, observation):
        return np.full((*observation.shape[:2], 1), state / 1000)

    def update(self, batches):
        self.state += 1


def test_explorers_act_with_the_policy_before_the_update_that_runs():
    """Each episode's skill stands behind its observations and in its label."""
    replay = ReplayBuffer(12, decisions=6, observation_dim=3 + 4, action_dim=1, rewards=0)
    explorer = PopulationExplorer(
        CountingLearner(), replay, [{}, {}], 2, 1, 4, max_noise=0, first_learn_size=1
    )
    generator = np.random.default_rng(5)
    observation = generator.normal(size=(3, 7, 4, 3)).astype(np.float32)
    rounds, skills = [], []
    for first, *following in observation:
        explorer.begin_round(generator, first)
        actions = []
        for seen in following:
            actions.append(explorer.act(seen))
            explorer.learn()
            explorer.observe(actions[-1], np.zeros((4, 0)), seen)
        rounds.append(np.round(1000 * np.array(actions)[:, :, 0]).astype(int))
        skills += [label["skill"] for label in explorer.labels()]
    # The first round explores. Later ones start an update after every second action.
    for round_, expected in zip(rounds[1:], ([0, 0, 0, 0, 1, 1], [3, 3, 3, 3, 4, 4]), strict=True):
        np.testing.assert_array_equal(round_, np.repeat(expected, 4).reshape(6, 4))
    assert len(set(skills)) > 1
    seen = replay.observations().reshape(12, 7, 7)
    np.testing.assert_array_equal(seen[..., :3], observation.swapaxes(1, 2).reshape(12, 7, 3))
    np.testing.assert_array_equal(seen[..., 3:], np.eye(4)[skills][:, None].repeat(7, 1))


@pytest.mark.parametrize("kind", ["random", "ou"])
def test_noise_lies_in_the_action_range_and_follows_its_seed(kind):
    def actions(seed):
        explorer = NoiseExplorer(kind, environments=20, action_dim=2)
        explorer.begin_round(np.random.default_rng(seed), np.zeros((20, 3)))
        return np.stack([explorer.act(np.zeros((20, 3))) for _ in range(200)])

    first = actions(0)
    assert np.abs(first).max() <= 1
    np.testing.assert_array_equal(first, actions(0))
    assert not np.array_equal(first, actions(1))
    correlation = np.corrcoef(first[:-1].ravel(), first[1:].ravel())[0, 1]
    assert correlation > 0.4 if kind == "ou" else abs(correlation) < 0.05
