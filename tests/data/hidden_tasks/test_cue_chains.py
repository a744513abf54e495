from dataclasses import replace

import jax
import numpy as np
import pytest

from agentic_ring.data.chain_loader import ChainPipeline
from agentic_ring.data.hidden_tasks.cue_chains import CueChainConfig, CueChains, measure_cue_scaling
from agentic_ring.errors import AgenticRingError
from agentic_ring.mesh import MeshShape, make_mesh
from tests.data.hidden_tasks.exploration import explored, ranked


def chains(
    trials: int, ring: int = 1, layout="contiguous", family: str = "point_mass", **changes
) -> CueChains:
    store = explored(family)
    config = CueChainConfig(family, trials, **changes)
    return CueChains(store, ranked(family), config, measure_cue_scaling(store), ring, layout)


def test_each_cue_has_ascending_poor_trials_and_then_demonstrations():
    made = chains(48)
    poor_counts, seen_cues = set(), set()
    for number in range(60):
        plan = made.plan(number)
        cues = np.unique(plan.cue)
        seen_cues.add(len(cues))
        for cue in cues:
            own = plan.cue == cue
            assert len(np.unique(plan.goal[own])) == len(np.unique(plan.code[own], axis=0)) == 1
            demonstration, returns = plan.demonstration[own], plan.reward[own].sum(1)
            poor = int((~demonstration).sum())
            poor_counts.add(poor)
            assert poor <= min(6, own.sum() - 1)
            assert demonstration[poor:].all()
            assert (np.diff(returns[:poor]) >= 0).all()
            np.testing.assert_array_equal(np.flatnonzero(plan.first[own]), [poor])
            cells = made.ranked.demonstrations[plan.goal[own][0]]
            assert np.isin(plan.trial[own][demonstration], cells).all()
        assert len(np.unique(plan.code, axis=0)) == len(cues)
    assert (chains(48, seed=1).plan(number).trial != plan.trial).any()
    assert poor_counts == set(range(7))
    assert len(seen_cues) > 5


def test_poor_trials_are_graded_distractors_and_random_in_the_declared_shares():
    store, ranking = explored("point_mass"), ranked("point_mass")
    made, kinds = chains(64), []
    for number in range(100):
        plan = made.plan(number)
        poor = ~plan.demonstration
        for trial, goal in zip(plan.trial[poor], plan.goal[poor], strict=True):
            others = np.delete(ranking.demonstrations, goal, axis=0)
            kinds.append((trial in ranking.graded[goal], trial in others))
    graded, distractors = np.mean(kinds, axis=0)
    # In a pool as small as this one, a graded or random trial may also be a demonstration for another goal.
    shared = np.isin(np.arange(store.num_trials), ranking.demonstrations).mean()
    assert abs(graded - 0.5) < 0.08
    assert 0.25 < distractors < 0.25 + 0.75 * shared + 0.08


def test_poor_trials_of_misleading_cues_are_those_of_another_goal_with_its_rewards():
    plain, misleading = (chains(48, graded=1.0, distractors=0.0, misleading=share) for share in (0.0, 0.5))
    misled = []
    for number in range(40):
        plan, right = misleading.plan(number), plain.plan(number)
        demonstration = plan.demonstration
        np.testing.assert_array_equal(right.rewarded_goal, right.goal)
        for field in ("goal", "cue", "code", "demonstration", "first"):
            np.testing.assert_array_equal(getattr(plan, field), getattr(right, field))
        for field in ("trial", "rewarded_goal"):
            np.testing.assert_array_equal(*(getattr(each, field)[demonstration] for each in (plan, right)))
        rewards = misleading.store.rewards(plan.trial, misleading.ranked.goals[plan.rewarded_goal])
        np.testing.assert_array_equal(plan.reward, rewards)
        for trial, goal in zip(plan.trial[~demonstration], plan.rewarded_goal[~demonstration], strict=True):
            assert trial in misleading.ranked.graded[goal]
        for cue in np.unique(plan.cue[~demonstration]):
            own = ~demonstration & (plan.cue == cue)
            (believed,) = np.unique(plan.rewarded_goal[own])
            misled.append(believed != plan.goal[own][0])
    assert 0.4 < np.mean(misled) < 0.6


def test_fields_are_those_of_the_planned_trials():
    store, made = explored("point_mass"), chains(6, reward_kind="sparse")
    plan = made.plan(3)
    fields = made.load(plan, slice(0, made.length))
    scaling = measure_cue_scaling(store)
    body = scaling.observation(np.pad(store.observations(plan.trial).reshape(48, 4), ((0, 0), (0, 6))))
    np.testing.assert_array_equal(fields["observation"][:, :4], body[:, :4])
    np.testing.assert_array_equal(fields["observation"][:, 4:8], plan.code.repeat(8, axis=0))
    assert not fields["observation"][:, 8:].any()
    np.testing.assert_array_equal(fields["action"], store.actions[plan.trial].reshape(48, 2))
    rewards = store.rewards(plan.trial, made.ranked.goals[plan.goal], "sparse")
    np.testing.assert_array_equal(fields["reward"], rewards.ravel().astype(np.float32))
    weight = np.where(plan.first, 4.0, plan.demonstration)
    np.testing.assert_array_equal(fields["weight"], weight.repeat(8))
    np.testing.assert_array_equal(fields["timestep"], np.tile(np.arange(8), 6))
    np.testing.assert_array_equal(fields["trajectory"], np.arange(6).repeat(8))


def test_a_step_may_span_the_decisions_of_an_explored_action():
    fine, coarse = (chains(6, family="point_mass-32", action_repeat=repeat) for repeat in (1, 4))
    plan = coarse.plan(3)
    assert (coarse.length, fine.length) == (48, 192)
    steps, decisions = (made.load(plan, slice(0, made.length)) for made in (coarse, fine))
    for name in ("observation", "weight", "timestep", "trajectory"):
        np.testing.assert_array_equal(steps[name], decisions[name][::4])
    for part in range(4):  # one action for all of them
        np.testing.assert_array_equal(steps["action"], decisions["action"][part::4])
    assert not np.delete(decisions["weight"], np.s_[::4]).any()  # loss only where an action is chosen
    assert steps["weight"].any()
    rewards = decisions["reward"].reshape(48, 4)
    assert (rewards[:, 0] != rewards[:, 3]).any()
    np.testing.assert_allclose(steps["reward"], rewards.mean(axis=1), rtol=1e-6)


def test_the_oracle_observes_the_goal_and_nothing_else_changes():
    blind, oracle = chains(1), chains(1, shows_goal=True)
    plan = oracle.plan(5)
    np.testing.assert_array_equal(plan.trial, blind.plan(5).trial)
    assert plan.demonstration.all()
    hidden, shown = (made.load(plan, slice(0, 8))["observation"] for made in (blind, oracle))
    np.testing.assert_array_equal(hidden[:, :8], shown[:, :8])
    goal = (oracle.ranked.goals[plan.goal[0]] / oracle.store.family.goal_scale).astype(np.float32)
    np.testing.assert_array_equal(shown[:, 8:], np.broadcast_to(goal, (8, 2)))


def test_coins_reward_the_trials_that_are_drawn_without_them():
    dense, coins = (list(map(chains(32, reward_kind=kind).plan, range(40))) for kind in ("dense", "coin"))
    odds, rewards = (np.stack([plan.reward for plan in plans]) for plans in (dense, coins))
    np.testing.assert_array_equal(dense[7].trial, coins[7].trial)
    assert set(np.unique(rewards)) == {0.0, 1.0}
    assert abs(rewards.mean() - odds.mean()) < 0.01
    assert (rewards[odds == 0] == 0).all()
    assert (rewards[odds == 1] == 1).all()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_batches_hold_the_same_chains_on_any_ring(layout):
    loader, whole = chains(5, 8, layout), chains(5)
    pipeline = ChainPipeline(loader, loader.plan, 2, make_mesh(MeshShape(ring=8), jax.devices()[:8]))
    next(pipeline)
    batch = next(pipeline)
    for row in range(2):
        expected = whole.load(whole.plan(2 + row), slice(0, 40))
        position = np.asarray(batch.steps.position[row])
        held = position >= 0
        assert sorted(position[held]) == list(range(40))
        fields = {"weight": batch.weight} | vars(batch.steps)
        for name in ("weight", "observation", "action", "reward", "timestep", "trajectory"):
            field = np.asarray(fields[name][row])
            np.testing.assert_array_equal(field[held], expected[name][position[held]])
            assert not field[~held].any()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cues": (4, 17)}, "cues is 17"),
        ({"cues": ()}, r"cues is \(\)"),
        ({"trials": 0}, "trials is 0"),
        ({"trials": 2001}, "2001 trials"),
        ({"action_repeat": 2}, "action_repeat is 2"),
        ({"reward_kind": "gold"}, "gold"),
        ({"graded": 0.8, "distractors": 0.3}, "graded is 0.8"),
        ({"misleading": 1.1}, "misleading is 1.1"),
        ({"poor": -1}, "poor is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"first_demonstration_weight": 0.0}, "first_demonstration_weight is 0.0"),
    ],
)
def test_bad_settings_are_named(changes, named: str):
    with pytest.raises(AgenticRingError, match=named):
        chains(**{"trials": 4} | changes)


def test_a_store_of_another_family_and_a_small_pool_are_refused():
    store, pool = explored("point_mass"), ranked("point_mass")
    small = replace(pool, goals=pool.goals[:15])
    for family, goals, named in (("reacher", pool, "chains of reacher"), ("point_mass", small, "15 goals")):
        with pytest.raises(AgenticRingError, match=named):
            CueChains(store, goals, CueChainConfig(family, 4), measure_cue_scaling(store), ring=1)
