"""Chains of cue tasks: composition, loss, layouts, and that nothing but rewards tells the goals."""

import jax
import numpy as np
import pytest

from agentic_ring.data.chain_loader import ChainPipeline
from agentic_ring.data.families import FAMILIES
from agentic_ring.data.families.cue_chains import CueChainConfig, CueChains, measure_cue_scaling
from agentic_ring.data.families.leak_probe import probe_goals
from agentic_ring.errors import AgenticRingError
from agentic_ring.mesh import MeshShape, make_mesh
from tests.data.families.exploration import explored, ranked


def chains(
    trials: int, ring: int = 1, layout="contiguous", family: str = "point_mass", **changes
) -> CueChains:
    store = explored(family)
    config = CueChainConfig(family, trials, **changes)
    return CueChains(store, ranked(family), config, measure_cue_scaling(store), ring, layout)


def test_each_cue_has_ascending_poor_trials_and_then_leaders():
    made = chains(48)
    poor_counts, seen_cues = set(), set()
    for number in range(60):
        plan = made.plan(number)
        cues = np.unique(plan.cue)
        seen_cues.add(len(np.unique(plan.goal)))
        for cue in cues:
            own = plan.cue == cue
            assert len(np.unique(plan.goal[own])) == len(np.unique(plan.code[own], axis=0)) == 1
            leader, returns = plan.leader[own], plan.reward[own].sum(1)
            poor = int((~leader).sum())
            poor_counts.add(poor)
            assert poor <= min(6, own.sum() - 1)
            assert leader[poor:].all()
            assert (np.diff(returns[:poor]) >= 0).all()
            np.testing.assert_array_equal(np.flatnonzero(plan.first[own]), [poor])
            cells = made.ranked.leaders[plan.goal[own][0]]
            assert np.isin(plan.trial[own][leader], cells).all()
        assert len(np.unique(plan.code, axis=0)) == len(cues)
    assert poor_counts == set(range(7))
    assert len(seen_cues) > 5


def test_poor_trials_are_graded_decoys_and_random_in_the_declared_shares():
    store, ranking = explored("point_mass"), ranked("point_mass")
    made, kinds = chains(64), []
    for number in range(100):
        plan = made.plan(number)
        for trial, goal in zip(plan.trial[~plan.leader], plan.goal[~plan.leader], strict=True):
            others = np.delete(ranking.leaders, goal, axis=0)
            kinds.append((trial in ranking.graded[goal], trial in others))
    graded, decoys = np.mean(kinds, axis=0)
    # A graded or random trial may also be a leader for another goal, in a pool as small as this one.
    shared = np.isin(np.arange(store.num_trials), ranking.leaders).mean()
    assert abs(graded - 0.5) < 0.08
    assert 0.25 < decoys < 0.25 + 0.75 * shared + 0.08


def test_poor_trials_of_misleading_cues_are_those_of_another_goal_with_its_pay():
    plain, misleading = (chains(48, graded=1.0, decoys=0.0, misleading=share) for share in (0.0, 0.5))
    misled = []
    for number in range(40):
        plan, right = misleading.plan(number), plain.plan(number)
        np.testing.assert_array_equal(right.paid, right.goal)
        for field in ("goal", "cue", "code", "leader", "first"):
            np.testing.assert_array_equal(getattr(plan, field), getattr(right, field))
        np.testing.assert_array_equal(plan.trial[plan.leader], right.trial[plan.leader])
        np.testing.assert_array_equal(plan.paid[plan.leader], plan.goal[plan.leader])
        paid = misleading.store.rewards(plan.trial, misleading.ranked.goals[plan.paid])
        np.testing.assert_array_equal(plan.reward, paid)
        for trial, goal in zip(plan.trial[~plan.leader], plan.paid[~plan.leader], strict=True):
            assert trial in misleading.ranked.graded[goal]
        for cue in np.unique(plan.cue[~plan.leader]):
            own = ~plan.leader & (plan.cue == cue)
            (believed,) = np.unique(plan.paid[own])
            misled.append(believed != plan.goal[own][0])
    assert 0.4 < np.mean(misled) < 0.6


def test_fields_are_those_of_the_planned_trials():
    store, made = explored("point_mass"), chains(6, pay="sparse")
    plan = made.plan(3)
    fields = made.load(plan, slice(0, made.length))
    scaling = measure_cue_scaling(store)
    body = scaling.observation(np.pad(store.observations(plan.trial).reshape(48, 4), ((0, 0), (0, 6))))
    np.testing.assert_array_equal(fields["observation"][:, :4], body[:, :4])
    np.testing.assert_array_equal(fields["observation"][:, 4:8], plan.code.repeat(8, axis=0))
    assert not fields["observation"][:, 8:].any()
    np.testing.assert_array_equal(fields["action"], store.actions[plan.trial].reshape(48, 2))
    paid = store.rewards(plan.trial, made.ranked.goals[plan.goal], "sparse")
    np.testing.assert_array_equal(fields["reward"], paid.ravel().astype(np.float32))
    weight = np.where(plan.first, 4.0, plan.leader)
    np.testing.assert_array_equal(fields["weight"], weight.repeat(8))
    np.testing.assert_array_equal(fields["timestep"], np.tile(np.arange(8), 6))
    np.testing.assert_array_equal(fields["trajectory"], np.arange(6).repeat(8))
    assert (chains(6, loss="all").load(plan, slice(0, 48))["weight"] == 1).all()


def test_a_step_may_span_the_decisions_of_an_explored_action():
    fine, coarse = (chains(6, family="point_mass-32", action_repeat=repeat) for repeat in (1, 4))
    plan = coarse.plan(3)
    assert (coarse.length, fine.length) == (48, 192)
    steps, decisions = (made.load(plan, slice(0, made.length)) for made in (coarse, fine))
    for name in ("observation", "weight", "timestep", "trajectory"):
        np.testing.assert_array_equal(steps[name], decisions[name][::4])
    for part in range(4):  # one action for all of them
        np.testing.assert_array_equal(steps["action"], decisions["action"][part::4])
    paid = decisions["reward"].reshape(48, 4)
    assert (paid[:, 0] != paid[:, 3]).any()
    np.testing.assert_allclose(steps["reward"], paid.mean(axis=1), rtol=1e-6)


def test_only_places_where_an_action_is_chosen_bear_loss():
    made = chains(6, family="point_mass-32", loss="all")
    fields = made.load(made.plan(3), slice(0, made.length))
    np.testing.assert_array_equal(np.flatnonzero(fields["weight"]), np.arange(0, made.length, 4))
    actions = fields["action"].reshape(-1, 4, 2)
    np.testing.assert_array_equal(actions, np.broadcast_to(actions[:, :1], actions.shape))


def test_the_oracle_is_told_the_goal_and_nothing_else_changes():
    blind, told = chains(1), chains(1, told=True)
    plan = told.plan(5)
    np.testing.assert_array_equal(plan.trial, blind.plan(5).trial)
    assert plan.leader.all()
    hidden, shown = (made.load(plan, slice(0, 8))["observation"] for made in (blind, told))
    np.testing.assert_array_equal(hidden[:, :8], shown[:, :8])
    goal = (told.ranked.goals[plan.goal[0]] / told.store.family.goal_scale).astype(np.float32)
    np.testing.assert_array_equal(shown[:, 8:], np.broadcast_to(goal, (8, 2)))


def test_coins_pay_the_trials_that_are_drawn_without_them():
    dense, coins = (list(map(chains(32, pay=pay).plan, range(40))) for pay in ("dense", "coin"))
    odds, paid = (np.stack([plan.reward for plan in plans]) for plans in (dense, coins))
    np.testing.assert_array_equal(dense[7].trial, coins[7].trial)
    assert set(np.unique(paid)) == {0.0, 1.0}
    assert abs(paid.mean() - odds.mean()) < 0.01
    assert (paid[odds == 0] == 0).all()
    assert (paid[odds == 1] == 1).all()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_batches_hold_the_same_chains_on_any_ring(layout):
    made = {ring: chains(5, ring, layout) for ring in (1, 8)}
    for ring, loader in made.items():
        mesh = make_mesh(MeshShape(ring=ring), jax.devices()[:ring])
        pipeline = ChainPipeline(loader, loader.plan, 2, mesh)
        next(pipeline)
        batch = next(pipeline)
        for row in range(2):
            whole = made[1].load(made[1].plan(2 + row), slice(0, made[1].length))
            position = np.asarray(batch.steps.position[row])
            assert len(position) == loader.length
            places = np.where(position < 0, np.argmin(whole["position"]), position)
            assert sorted(position[position >= 0]) == list(range(40))
            weight = np.asarray(batch.weight[row])
            np.testing.assert_array_equal(weight, np.where(position < 0, 0, whole["weight"][places]))
            for name in ("observation", "action", "reward", "timestep", "trajectory"):
                field = np.asarray(getattr(batch.steps, name)[row])
                held = position >= 0
                np.testing.assert_array_equal(field[held], whole[name][position[held]])
                assert not field[~held].any()


def test_plans_are_functions_of_seed_and_number():
    one, same, other = chains(9), chains(9), chains(9, seed=1)
    for name in ("trial", "goal", "cue", "code", "reward"):
        np.testing.assert_array_equal(getattr(one.plan(4), name), getattr(same.plan(4), name))
    assert any((one.plan(4).trial != changed.trial).any() for changed in (other.plan(4), one.plan(5)))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_but_rewards_tells_the_goals_behind_random_trials(family: str):
    made = chains(128, family=family, graded=0.0, decoys=0.0, cues=(16,))
    probe = probe_goals(made, 250)
    assert probe.contexts > 2000
    assert probe.without_rewards < 0.02
    assert probe.with_rewards > 0.15


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chains(4, cues=(4, 17)), "cues is 17.*1 to 16"),
        (lambda: chains(4, cues=()), "cues is empty"),
        (lambda: chains(0), "trials is 0"),
        (lambda: chains(4, action_repeat=0), "action_repeat is 0"),
        (lambda: chains(4, action_repeat=2), "held for 1 decisions; use a divisor of 1"),
        (lambda: chains(2001), "2001 trials.*only 2000.*shorter chains"),
        (lambda: chains(4, pay="gold"), "unknown pay 'gold'"),
        (lambda: chains(4, loss="none"), "unknown loss 'none'"),
        (lambda: chains(4, graded=0.8, decoys=0.3), "graded is 0.8 and decoys is 0.3"),
        (lambda: chains(4, misleading=1.1), "misleading is 1.1; as a share of the cues it must be 0 to 1"),
        (lambda: chains(4, poor=-1), "poor is -1"),
        (lambda: chains(4, first_leader_weight=0.0), "first_leader_weight is 0.0"),
        (lambda: probe_goals(chains(1), 4), "probe more chains"),
    ],
)
def test_bad_input_is_named(call, message: str):
    with pytest.raises(AgenticRingError, match=message):
        call()


def test_a_store_of_another_family_is_refused():
    store = explored("point_mass")
    config = CueChainConfig("reacher", 4)
    with pytest.raises(AgenticRingError, match=r"holds trials of point_mass.*--family reacher"):
        CueChains(store, ranked("point_mass"), config, measure_cue_scaling(store), 1)
