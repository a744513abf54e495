import numpy as np
import pytest

from agentic_ring.data.hidden_tasks.bodies import FAMILIES, PointMass, family_named
from agentic_ring.data.hidden_tasks.cue_task import draw_cue_task
from agentic_ring.data.hidden_tasks.environments import CueEnvironments
from agentic_ring.data.hidden_tasks.family import CODES, Family
from agentic_ring.errors import AgenticRingError, ArgumentError

POINT_MASS = family_named("point_mass")
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@families
def test_goals_are_of_the_region_asked_for(family: Family):
    random, unseen = np.random.default_rng(0), set(family.held_out)
    for region, expected in (("seen", set(range(family.regions)) - unseen), ("unseen", unseen)):
        goals = family.draw_goals(random, 500, region)
        assert goals.shape == (500, family.goal_dim)
        assert set(family.region(goals).tolist()) == expected


def test_tasks_have_their_own_goals_and_show_every_cue():
    task, other = (draw_cue_task(POINT_MASS, CODES, seed) for seed in (3, 4))
    assert (task.goals != other.goals).any()
    assert len(np.unique(task.codes, axis=0)) == CODES
    assert set(task.codes.flat) == {-1, 1}
    assert {task.cue(trial) for trial in range(200)} == set(range(CODES))
    assert (task.start(7) != task.start(8)).any()


@families
def test_environments_repeat_a_trial_exactly_whatever_came_before(family: Family):
    tasks, same = ([draw_cue_task(family, 4, seed) for seed in range(2)] for _ in range(2))
    actions = np.random.default_rng(0).uniform(-1, 1, (family.decisions, 2, family.action_dim))

    def trial(environments, number: int):
        first, _ = environments.reset(options={"trial": number})
        steps = [environments.step(action) for action in actions]
        assert [bool(step[3].all()) for step in steps] == [False] * (family.decisions - 1) + [True]
        return np.stack([first, *(step[0] for step in steps)]), np.stack([step[1] for step in steps])

    environments = CueEnvironments(tasks)
    observed, rewards = trial(environments, 5)
    trial(environments, 6)
    for again in (environments, CueEnvironments(same)):
        np.testing.assert_equal(trial(again, 5), (observed, rewards))
    assert observed.shape[2] == family.observation_dim
    assert not observed[..., -family.goal_dim :].any()
    with pytest.raises(ArgumentError, match="reset"):
        environments.step(actions[0])


def test_the_reward_is_1_at_the_spot_and_0_from_12_cm_on():
    goals = np.zeros((4, 2))
    path = np.zeros((4, 4, 4), np.float32)
    path[:, 1:, 0] = np.array([0.0, 0.019, 0.07, 0.121])[:, None]
    np.testing.assert_allclose(POINT_MASS.rewards(path, goals, "dense")[:, 0], [1, 1, 0.5, 0], atol=1e-6)
    np.testing.assert_array_equal(POINT_MASS.rewards(path, goals, "sparse")[:, 0], [1, 1, 0, 0])


def test_a_coin_is_1_as_often_as_the_dense_reward_says():
    task = draw_cue_task(POINT_MASS, 1, 0)
    coins = np.array([[task.coin(trial, decision) for decision in range(8)] for trial in range(250)])
    assert len(np.unique(coins)) == coins.size
    shares = [0.1, 0.5, 0.9]
    np.testing.assert_allclose([(coins < odds).mean() for odds in shares], shares, atol=0.03)
    dense, coin = (CueEnvironments([task], kind) for kind in ("dense", "coin"))
    for trial in range(5):
        dense.reset(options={"trial": trial})
        coin.reset(options={"trial": trial})
        for decision in range(8):
            odds, reward = (env.step(np.zeros((1, 2)))[1] for env in (dense, coin))
            assert reward == (task.coin(trial, decision) < odds)


@families
def test_the_oracle_observes_the_goal_of_the_cue(family: Family):
    task = draw_cue_task(family, 4, 1)
    observed, _ = CueEnvironments([task], shows_goal=True).reset(options={"trial": 2})
    shown = task.goals[task.cue(2)] / family.goal_scale
    np.testing.assert_array_equal(observed[0, family.body_dim :][4:], shown.astype(np.float32))
    np.testing.assert_array_equal(observed[0, family.body_dim :][:4], task.codes[task.cue(2)])


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: draw_cue_task(POINT_MASS, 17, 0), "17"),
        (lambda: draw_cue_task(POINT_MASS, 1, -1), "-1"),
        (lambda: draw_cue_task(POINT_MASS, 1, 0, "new"), "'new'"),  # pyright: ignore
        (lambda: family_named("ant"), "'ant'"),
        *((lambda name=name: family_named(name), name) for name in ("point_mass-016", "ant-16")),
        *((lambda count=count: family_named(f"point_mass-{count}"), f"{count}") for count in (0, 8, 12)),
        (lambda: PointMass(tuple(range(25))), "held_out is"),
        (lambda: PointMass((25,)), r"held_out is \(25,\)"),
        (lambda: draw_cue_task(PointMass(()), 1, 0, "unseen"), "held out"),
        (lambda: CueEnvironments([]), "no family"),
        (lambda: CueEnvironments([draw_cue_task(POINT_MASS, 1, 0)], "gold"), "'gold'"),  # pyright: ignore
        (lambda: CueEnvironments([draw_cue_task(each, 1, 0) for each in FAMILIES.values()]), "reacher"),
    ],
)
def test_bad_input_is_named(call, named: str):
    with pytest.raises(AgenticRingError, match=named):
        call()
