"""Stored contexts differ in their pay only; a policy behind one forgets its own trials."""

from dataclasses import fields, replace

import numpy as np
import pytest

from agentic_ring.data.families.cue_chains import measure_cue_scaling
from agentic_ring.data.families.cue_task import draw_cue_task
from agentic_ring.errors import ConfigError
from evals.in_context.contexts import STORED_PAYS, as_context, draw_stored_trials
from tests.data.families.exploration import explored

TRIALS = 40


@pytest.fixture(scope="module")
def contexts():
    store = explored("point_mass")
    scaling = replace(measure_cue_scaling(store), reward_scale=2.0)
    tasks = [draw_cue_task(store.family, 2, seed) for seed in (5, 6, 7)]
    drawn = {pay: draw_stored_trials(store, tasks, TRIALS, pay) for pay in STORED_PAYS}
    return store, tasks, {pay: as_context(stored, store, tasks, scaling) for pay, stored in drawn.items()}


def test_only_the_rewards_differ(contexts):
    _, _, made = contexts
    for field in fields(made["right_pay"]):
        same = {np.asarray(getattr(steps, field.name)).tobytes() for steps in made.values()}
        assert len(same) == (4 if field.name == "reward" else 1), field.name
    right, shuffled = (made[pay].reward.reshape(3, TRIALS, 8) for pay in ("right_pay", "shuffled"))
    assert not made["zeroed"].reward.any()
    assert (right.sum(axis=(1, 2)) > 0).all()
    for row, other in zip(right, shuffled, strict=True):
        assert sorted(row.tolist()) == sorted(other.tolist())  # whole trials change places


def test_rewards_are_those_of_the_shown_cue_of_the_right_or_the_next_task(contexts):
    store, tasks, made = contexts
    steps = made["right_pay"]
    starts = store.observations(np.arange(store.num_trials))[:, 0]
    scaling = measure_cue_scaling(store)
    for row, payers in enumerate(((0, 1), (1, 2), (2, 0))):
        for trial in (0, TRIALS - 1):
            seen = np.asarray(steps.observation)[row, trial * 8]
            body = starts - np.array(scaling.observation_mean[:4])
            body = body / np.array(scaling.observation_std[:4])
            number = np.abs(body - seen[:4]).sum(axis=1).argmin()
            cue = int(np.flatnonzero((tasks[row].codes == seen[4:8]).all(axis=1))[0])
            for pay, payer in zip(("right_pay", "another_task"), payers, strict=True):
                paid = store.rewards(np.array([number]), tasks[payer].goals[[cue]])[0] / 2
                found = np.asarray(made[pay].reward)[row, trial * 8 : trial * 8 + 8]
                np.testing.assert_allclose(found, paid, atol=1e-6)


def test_contexts_that_cannot_be_made_are_refused(contexts):
    store, tasks, _ = contexts
    with pytest.raises(ConfigError, match=rf"a context of 9999 trials .* has only {store.num_trials}"):
        draw_stored_trials(store, tasks, 9999, "right_pay")
    with pytest.raises(ConfigError, match="another task's pay needs two tasks"):
        draw_stored_trials(store, tasks[:1], 4, "another_task")
