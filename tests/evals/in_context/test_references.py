"""Reference policies stand in the order that theory gives them."""

import numpy as np
import pytest

from agentic_ring.data.families import family_named
from agentic_ring.data.families.cue_task import draw_cue_task
from agentic_ring.data.families.environments import make_cue_environments
from agentic_ring.errors import ConfigError, UnknownNameError
from evals.in_context.references import ThompsonPolicy, reference_policy, regret
from evals.in_context.rollouts import CueRolloutConfig, reference_returns, thompson_returns
from tests.data.families.exploration import explored

POINT_MASS = family_named("point_mass")
ONE_CUE = CueRolloutConfig("point_mass", cues=1, tasks=8, trials=10)


def test_references_are_ordered_by_what_they_know():
    """Told the goal, remembering four trials, only the current one, nothing."""
    told, remembers, forgets, random = (
        reference_returns(name, ONE_CUE, POINT_MASS)[:, 4:].mean()
        for name in ("told", "thompson_4", "thompson_1", "random")
    )
    assert told > 3.5
    assert 0.85 * told < remembers < 1.05 * told
    assert random + 0.3 < forgets < 0.5 * told
    assert random < 0.6


@pytest.mark.parametrize(("name", "least"), [("reacher", 6.0), ("cheetah", 5.5)])
def test_a_told_controller_reaches_goals_of_every_body(name, least):
    config = CueRolloutConfig(name, cues=4, tasks=8, trials=2)
    told, again, random = (
        reference_returns(each, config, family_named(name)) for each in ("told", "told", "random")
    )
    np.testing.assert_array_equal(told, again)
    assert told.mean() > least
    assert random.mean() < 0.4 * told.mean()


def test_on_reacher_a_memory_of_all_trials_beats_that_of_one():
    config = CueRolloutConfig("reacher", cues=4, tasks=6, trials=12)
    short, long = (
        reference_returns(f"thompson_{n}", config, family_named("reacher"))[:, 8:].mean() for n in (1, 12)
    )
    assert long > short + 1


def test_stored_trials_tell_what_they_pay_rightly_or_not():
    store = explored("point_mass")
    config = CueRolloutConfig("point_mass", cues=2, tasks=8, measured=4, stored=100)
    right, nothing, wrong, zeroed = (
        thompson_returns(128, config, condition, store).mean()
        for condition in ("right_pay", "nothing", "another_task", "zeroed")
    )
    assert nothing + 1 < right
    assert wrong < nothing - 0.2
    assert zeroed < nothing - 0.5  # goals that the stored trials came near are ruled out
    one = thompson_returns(2, config, "right_pay", store).mean()
    assert one < right - 0.5


@pytest.mark.slow
def test_a_memory_that_is_too_short_for_the_cues_does_not_help():
    config = CueRolloutConfig("point_mass", cues=8, tasks=16, trials=24)
    short, long = (reference_returns(f"thompson_{n}", config, POINT_MASS)[:, 12:].mean() for n in (2, 24))
    assert long > short + 0.5


def test_regret_adds_up_what_is_missed():
    assert regret(np.array([[1.0, 2.0, 4.0]]), np.array([[4.0, 4.0, 4.0]])).tolist() == [[3.0, 5.0, 5.0]]


def test_references_that_would_not_be_exact_are_refused():
    task = draw_cue_task(POINT_MASS, 1, 0)
    coins = make_cue_environments(POINT_MASS, [task], "coin")
    with pytest.raises(ConfigError, match="dense rewards, and decisions are paid coin"):
        reference_policy("thompson_4", coins, "seen", 0)
    reference_policy("told", coins, "seen", 0)
    family = family_named("point_mass-16")
    environments = make_cue_environments(family, [draw_cue_task(family, 1, 0)])
    with pytest.raises(ConfigError, match="of 8 decisions, and those of point_mass-16 have 16"):
        reference_policy("told", environments, "seen", 0)


def test_unknown_references_are_refused():
    environments = make_cue_environments(POINT_MASS, [draw_cue_task(POINT_MASS, 1, 0)])
    for name in ("oracle", "thompson", "thompson_x"):
        with pytest.raises(UnknownNameError, match=f"unknown reference '{name}'; choose one of: random"):
            reference_policy(name, environments, "seen", 0)
    with pytest.raises(ConfigError, match="the memory has 0 trials"):
        reference_policy("thompson_0", environments, "seen", 0)
    assert isinstance(reference_policy("thompson_1", environments, "seen", 0), ThompsonPolicy)
