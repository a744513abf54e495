"""Chains in which relabelled trajectories tell the task: what they hold, and which decisions are learned."""

from dataclasses import replace

import numpy as np
import pytest

from agentic_ring.data.goal_distances import GoalDistances
from agentic_ring.data.spans import span_fields
from agentic_ring.data.store import Scaling, TrajectoryStore
from agentic_ring.data.told_chains import ToldChainConfig, ToldChains, discounted_returns
from agentic_ring.data.told_decisions import ToldDecisions
from agentic_ring.errors import ConfigError, DataError
from tests.data.synthetic import DOMAIN, random_store

REPEAT = 8
CONFIG = ToldChainConfig(
    trajectories=3, spans=5, decisions=8, groups=2, action_repeat=REPEAT, untold=0, seed=4
)
SCALING = Scaling((0.0,) * DOMAIN.observation_dim, (1.0,) * DOMAIN.observation_dim, REPEAT, 1.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_store(tmp_path_factory.mktemp("store") / "s.h5", [1000] * 6, action_repeat=REPEAT)


@pytest.fixture(scope="module")
def data(path):
    with TrajectoryStore.open(path) as store:
        return ToldDecisions.of_store(store, SCALING, REPEAT)


def control(features):
    return (features["control"] + 1) / 2


def cart(features):
    return (features["cart_x"] > 0).astype(float)


def test_a_chain_holds_spans_of_trajectories_and_decisions_between_them(data):
    chains = ToldChains(data, [control, cart], CONFIG, ring=1)
    plan = replace(chains.plan(7), after=np.array([1, 3]))
    whole = chains.load(plan, slice(None))
    is_known = whole["trajectory"] >= 0
    assert [*whole["trajectory"]] == [*[0] * 5, *[-1] * 4, *[1] * 5, *[2] * 5, *[-1] * 4]
    assert [*whole["position"]] == [*range(23)]
    np.testing.assert_array_equal(whole["weight"], ~is_known)
    stored = data.observation[plan.episodes], data.action[plan.episodes], plan.rewards
    for name, values in span_fields(*stored, CONFIG.spans).items():
        np.testing.assert_array_equal(whole[name][is_known].ravel(), values.ravel(), err_msg=name)
    learned = {name: getattr(data, name)[tuple(plan.learned.T)] for name in ("observation", "action")}
    np.testing.assert_array_equal(whole["action"][~is_known], learned["action"])
    noise = whole["observation"][~is_known] - learned["observation"]
    assert 0.7 < noise.std() / CONFIG.noise < 1.3
    # A device of a ring reads its own part of the same chain.
    ringed = ToldChains(data, [control, cart], CONFIG, ring=2)
    again = replace(ringed.plan(7), after=plan.after)
    for columns in (slice(0, 12), slice(12, 24)):
        for name, values in ringed.load(again, columns).items():
            places = ringed.order[columns]
            expected = np.where(places < 23, places, 0)
            held = (places < 23).reshape(-1, *[1] * (values.ndim - 1))
            kept = np.where(held, whole[name][expected], -1 if name == "position" else 0)
            np.testing.assert_array_equal(values, kept, err_msg=name)


def test_rewards_are_means_over_the_control_steps_of_a_decision(data, path):
    with TrajectoryStore.open(path) as store:
        physics = store.episode(2).episode.physics[1:, 0].astype(np.float32)
    rewards = data.rewards(cart, np.array([2, 0]))
    np.testing.assert_allclose(rewards[0], (physics > 0).reshape(-1, REPEAT).mean(axis=1), rtol=1e-6)


def test_a_decision_observes_the_state_after_the_step_before_it(data, path):
    with TrajectoryStore.open(path) as store:
        physics = store.episode(2).episode.physics[::REPEAT, 0].astype(np.float32)
    decisions = np.array([[1, 2], [30, 124]])
    rewards = data.state_rewards(cart, np.full((2, 2), 2), decisions)
    np.testing.assert_array_equal(rewards, physics[decisions] > 0)


def test_rewards_alone_tell_which_function_was_drawn(data):
    """All else that known steps hold is the same under any two reward functions."""
    chains = (ToldChains(data, [reward], CONFIG, ring=1) for reward in (control, cart))
    one, other = (each.load(replace(each.plan(3), after=np.array([3, 3])), slice(None)) for each in chains)
    known = one["trajectory"] >= 0
    told = [name for name in one if not np.array_equal(one[name][known], other[name][known])]
    assert sorted(told) == ["reward", "span_reward"]
    # In deviations: functions that differ in scale and offset alone tell the same.
    scaled = ToldChains(data, [lambda features: 40 * cart(features) - 7], CONFIG, ring=1)
    for name, values in scaled.load(replace(scaled.plan(3), after=np.array([3, 3])), slice(None)).items():
        np.testing.assert_allclose(values, other[name], atol=1e-4, err_msg=name)


def test_some_chains_tell_nothing(data):
    config = replace(CONFIG, untold=0.5)
    plans = [ToldChains(data, [cart], config, ring=1).plan(number) for number in range(60)]
    zeroed = [plan for plan in plans if not plan.rewards.any()]
    right = [ToldChains(data, [cart], CONFIG, ring=1).plan(number).rewards for number in range(60)]
    same = [np.array_equal(plan.rewards, each) for plan, each in zip(plans, right, strict=True)]
    assert 0.1 < np.mean([plan in zeroed for plan in plans]) < 0.4
    assert 0.3 < np.mean(same) < 0.7
    for plan, each in zip(plans, right, strict=True):  # the others are shuffled
        if plan not in zeroed:
            np.testing.assert_array_equal(np.sort(plan.rewards, axis=None), np.sort(each, axis=None))


def test_the_first_chains_are_guided_to_the_goal(data):
    """Their trajectories meet it; those of later chains are drawn as without guides."""
    distances = GoalDistances(data.positions(("cart_x",)), [[2.75], [0.0]], 0.1)
    assert distances.meeting[0].tolist() == [0, 2]
    config = replace(CONFIG, goals=True, guided=40)
    guided, plain = (
        ToldChains(data, [cart, cart], each, ring=1, distances=distances)
        for each in (config, replace(config, guided=0))
    )
    found = {number: {*guided.plan(number).episodes.tolist()} for number in range(40)}
    drawn = [int(np.random.default_rng((CONFIG.seed, number)).integers(2)) for number in range(40)]
    met = [len(found[n] & {*distances.meeting[0].tolist()}) for n in range(40) if drawn[n] == 0]
    assert met[:2] == [2, 2]
    assert np.mean(met[:5]) > np.mean(met[-5:])
    assert all(len(each) == 3 for each in found.values()), "distinct ones"
    for number in range(40, 50):
        np.testing.assert_array_equal(guided.plan(number).episodes, plain.plan(number).episodes[:3])


def test_what_pays_under_the_drawn_reward_is_learned(data):
    """Under a reward for pushing to the right, decisions that push to the right; negated, to the left."""
    config = replace(CONFIG, decisions=200, discount=0.1)
    for reward, sign in ((control, 1), (lambda features: 1 - control(features), -1)):
        learned = ToldChains(data, [reward], config, ring=1).plan(0).learned
        assert (sign * data.action[tuple(learned.T)]).mean() > 0.5


def test_a_share_of_the_decisions_is_where_the_reward_is_done_well(data):
    """All decisions of an episode are rewarded alike, so that none is better than usual in its states."""

    def episodes(features):
        return np.repeat(features["cart_x"].reshape(-1, 1000)[:, :1] > 0.2, 1000, axis=1).ravel() * 1.0

    def well(share):
        config = replace(CONFIG, decisions=200, by_return=share)
        chains = ToldChains(data, [episodes], config, ring=1)
        done = data.rewards(episodes)[:, 0] > 0
        assert 0 < done.mean() < 1
        return done[chains.plan(0).learned[:, 0]].mean()

    assert well(0.9) > well(0.0)
    assert well(0.9) > 0.85


def test_a_share_of_the_chains_is_told_a_task(data):
    chains = ToldChains(data, [control, control, cart], replace(CONFIG, task_share=0.4), ring=1, tasks=1)

    def tells_the_task(number):
        plan = chains.plan(number)
        paid = data.rewards(cart, plan.episodes)
        return np.corrcoef(plan.rewards.ravel(), paid.ravel())[0, 1] > 0.999

    assert 0.25 < np.mean([tells_the_task(number) for number in range(100)]) < 0.55
    with pytest.raises(ConfigError, match="for 0 reward functions"):
        ToldChains(data, [cart], replace(CONFIG, task_share=0.4), ring=1, tasks=1)


def test_every_group_of_chains_may_see_none_or_all(data):
    chains = ToldChains(data, [control], CONFIG, ring=1)
    after = np.array([chains.plan(number).after for number in range(60)])
    assert {*after.ravel().tolist()} == {0, 1, 2, 3}
    assert (after[:, -1] == 3).all(), "one group of each chain has the whole context"
    np.testing.assert_array_equal(chains.plan(3).learned, chains.plan(3).learned)


def test_returns_go_on_after_the_end():
    rewards = np.array([[1.0, 0, 0, 0, 1]], np.float32)
    found = discounted_returns(rewards, 0.5)
    np.testing.assert_allclose(found[0], [0.5 + 0.03125 + 0.03125, 0.125, 0.25, 0.5, 1.0])


def test_settings_that_cannot_be_are_named(data, tmp_path):
    for changes, message in (
        ({"trajectories": 7}, "7 trajectories .* has 6 episodes"),
        ({"spans": 126}, "spans is 126"),
    ):
        with pytest.raises(ConfigError, match=message):
            ToldChains(data, [control], replace(CONFIG, **changes), ring=1)
    with pytest.raises(ConfigError, match="decisions 7"):
        replace(CONFIG, decisions=7)
    short = random_store(tmp_path / "short.h5", [1000, 80], action_repeat=REPEAT)
    with TrajectoryStore.open(short) as store, pytest.raises(DataError, match="episodes of 80 steps"):
        ToldDecisions.of_store(store, SCALING, REPEAT)
