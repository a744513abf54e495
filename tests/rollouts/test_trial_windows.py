"""A window of n trials is a fresh policy that was given the last n - 1 of them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from agentic_ring.data.scaling import Scaling
from agentic_ring.errors import ConfigError
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from agentic_ring.models.agentic_transformer import ChainSteps
from agentic_ring.rollouts.policies import TrialWindowPolicy
from tests.models.tiny_agentic_transformer import OBSERVATION_DIM, fresh_model, tiny_config

ENVIRONMENTS, DECISIONS, TRIALS = 2, 3, 5
SCALING = Scaling((0.5,) * OBSERVATION_DIM, (2.0,) * OBSERVATION_DIM, reward_scale=2.0, return_scale=8.0)


@cache
def tiny_policy() -> InContextPolicy:
    """A policy on a ring of 2; 9 steps of context, which do not divide over it."""
    config = replace(tiny_config(layers=2), paired_tokens=True, action_modes=3)
    model, params, _ = fresh_model(config)
    mesh = mesh_on_first_devices(MeshShape(ring=2))
    return InContextPolicy(model, params, mesh, SCALING, 0.0, ENVIRONMENTS, TRIALS * DECISIONS)


def run_trial(policy, trial: int) -> tuple[np.ndarray, list[ChainSteps]]:
    """Actions of a trial whose observations and rewards depend on its number only; and its steps."""
    random = np.random.default_rng(trial)
    policy.begin_trial()
    actions, steps = [], []
    for decision in range(DECISIONS):
        observation = random.normal(size=(ENVIRONMENTS, OBSERVATION_DIM)).astype(np.float32)
        actions.append(np.asarray(policy.act(observation)))
        policy.receive(random.uniform(0, 1, ENVIRONMENTS).astype(np.float32), decision == DECISIONS - 1)
        steps.append(getattr(policy, "_policy", policy).last_step)
    return np.stack(actions), steps


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_equals_a_fresh_policy_with_these_trials_as_prompt(window):
    policy = tiny_policy()
    policy.start_over(None)
    windowed = TrialWindowPolicy(policy, window)
    runs = [run_trial(windowed, trial) for trial in range(TRIALS)]
    kept = [step for _, steps in runs[TRIALS - window : -1] for step in steps]
    prompt = None
    if kept:
        prompt = ChainSteps.joined(kept)
        place = np.broadcast_to(np.arange(len(kept), dtype=np.int32), prompt.position.shape)
        prompt = replace(prompt, position=place, trajectory=place // DECISIONS)
    policy.start_over(prompt)
    fresh, _ = run_trial(policy, TRIALS - 1)
    np.testing.assert_allclose(runs[-1][0], fresh, atol=1e-5)
    # The first trials are those of a policy with everything in context; later ones are not.
    policy.start_over(None)
    everything = [run_trial(policy, trial)[0] for trial in range(TRIALS)]
    for trial in range(window):
        np.testing.assert_array_equal(runs[trial][0], everything[trial])
    assert np.abs(runs[-1][0] - everything[-1]).max() > 1e-3


def test_a_window_holds_at_least_the_current_trial():
    with pytest.raises(ConfigError, match="the window has 0 trials"):
        TrialWindowPolicy(tiny_policy(), 0)
