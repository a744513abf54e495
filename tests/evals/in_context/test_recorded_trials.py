"""Recorded trials are those of the rollout, and attention is grouped by cue and by pay."""

from functools import cache

import numpy as np
import pytest

from agentic_ring.errors import DataError
from evals.in_context.recorded_trials import (
    GROUPS,
    RecordedTrials,
    read_recorded_trials,
    record_trials,
    trial_groups,
    write_recorded_trials,
)
from evals.in_context.returns_file import read_returns, write_returns
from evals.in_context.verdict import Case
from evals.report_page.drawn_trials import drawn_film
from tests.data.families.exploration import explored
from tests.evals.in_context.test_rollouts import CONFIG, arm, returns

FAMILY = explored("point_mass").family


@cache
def recorded() -> RecordedTrials:
    return record_trials(arm(), CONFIG, FAMILY)


def test_the_trials_are_those_of_the_online_rollout():
    found = recorded()
    np.testing.assert_allclose(found.reward.sum(axis=-1), returns("online"), atol=1e-3)
    tasks = CONFIG.draw_tasks(FAMILY)
    assert found.physics.shape == (4, 4, 9, 4)
    for task, cues, goals, physics in zip(tasks, found.cue, found.goal, found.physics, strict=True):
        for trial in range(4):
            assert cues[trial] == task.cue(trial)
            np.testing.assert_array_equal(goals[trial], task.goals[task.cue(trial)])
            np.testing.assert_array_equal(physics[trial, 0], task.start(trial))


def test_groups_are_told_by_cue_and_by_the_median_return():
    groups = trial_groups(np.array([0, 1, 0, 1, 0]), np.array([5.0, 0.0, 1.0, 4.0, 3.0]))
    names = [GROUPS[group] for group in groups[4]]
    assert names == [
        "same cue, paid well",
        "other cue, paid little",
        "same cue, paid little",
        "other cue, paid well",
        "current trial",
    ]


def test_attention_by_group_adds_up_to_1_and_even_attention_counts_tokens():
    found = recorded()
    assert found.attention.shape == (4, 1, 2, 5)
    np.testing.assert_allclose(found.attention.sum(axis=-1), 1, atol=1e-5)
    # The chain has the last 3 trials; an action of trial i, decision d, sees 16 i + 2 d + 1 tokens.
    for cue, reward, even in zip(found.cue[:, 1:], found.reward[:, 1:], found.even, strict=True):
        groups, expected = trial_groups(cue, reward.sum(axis=-1)), np.zeros(5)
        for trial in range(3):
            for decision in range(8):
                seen = 16 * trial + 2 * decision + 1
                for earlier in range(trial):
                    expected[groups[trial, earlier]] += 16 / seen / 24
                expected[4] += (2 * decision + 1) / seen / 24
        np.testing.assert_allclose(even, expected, atol=1e-6)


def test_recorded_trials_and_returns_are_kept_in_files_whose_damage_is_named(tmp_path):
    path = tmp_path / "recorded_trials.npz"
    write_recorded_trials(path, recorded())
    kept = vars(read_recorded_trials(path))
    for name, array in vars(recorded()).items():
        np.testing.assert_array_equal(kept[name], array)
    cut = RecordedTrials(**{**kept, "cue": kept["cue"][:, 1:]})
    write_recorded_trials(path, cut)
    with pytest.raises(DataError, match=r"shapes that do not go together.*delete results\.json"):
        read_recorded_trials(path)
    with pytest.raises(DataError, match=r"none\.npz.*delete results\.json"):
        read_recorded_trials(tmp_path / "none.npz")

    found = {Case("n4", 16): np.ones((1, 2, 3)), Case("n128", 4, "thompson", "unseen"): np.zeros((2, 1, 1))}
    write_returns(tmp_path / "returns.npz", found)
    read = read_returns(tmp_path / "returns.npz")
    assert set(read) == set(found)
    assert all((read[case] == found[case]).all() for case in found)
    write_returns(tmp_path / "returns.npz", {Case("n4", 16): np.full((1, 2, 3), np.nan)})
    with pytest.raises(DataError, match="expected finite float64"):
        read_returns(tmp_path / "returns.npz")


def test_the_film_shows_first_and_last_trial_with_the_rewards_up_to_each_decision():
    first, last = drawn_film(FAMILY, recorded())
    assert (first.trial, last.trial) == (1, 4)
    for strip in (first, last):
        assert len(strip.frames) == 9
        assert strip.frames[0].earned == 0
        assert strip.frames[-1].seconds == pytest.approx(8 * 0.6)
        assert strip.frames[-1].earned == pytest.approx(recorded().reward[0, strip.trial - 1].sum(), abs=1e-6)
        assert len({frame.source for frame in strip.frames}) == 9
