from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from agentic_ring.data.domains import parse_task
from agentic_ring.data.store import Scaling, TrajectoryStore
from agentic_ring.errors import ConfigError
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.mesh import MeshShape, make_mesh, mesh_on_first_devices
from agentic_ring.models.agentic_transformer import ChainSteps
from agentic_ring.rollouts import policies
from agentic_ring.rollouts.policies import RolloutPlan, TrialWindowPolicy, as_prompt, read_prompt
from experiments.exorl.pipeline import resolve
from experiments.exorl.presets import PRESETS
from tests.data.synthetic import TASK, random_store
from tests.models.tiny_agentic_transformer import OBSERVATION_DIM, fresh_model, tiny_config

ENVIRONMENTS, DECISIONS, TRIALS = 2, 3, 5
SCALING = Scaling((0.5,) * OBSERVATION_DIM, (2.0,) * OBSERVATION_DIM, reward_scale=2.0, return_scale=8.0)


def test_a_prompt_ascends_below_the_target_and_aims_at_it(tmp_path):
    path = random_store(tmp_path / "s.h5", [10] * 20)
    preset = replace(PRESETS["demo"], trials=1, prompt_trajectories=3)
    mesh = make_mesh(MeshShape(ring=8))
    config = resolve(preset, parse_task(f"cartpole_{TASK}"), path, mesh, "leaders", seed=0)
    with TrajectoryStore.open(path) as store:
        prompt = read_prompt(store, config, ring=8)
        assert config.target == np.quantile(store.returns(TASK), 0.95)
    assert prompt.position.shape == (1, 32)  # 3 x 10 steps, padded to the ring
    np.testing.assert_array_equal(prompt.position[0], [*range(30), -1, -1])
    starts = prompt.return_to_go[0, [0, 10, 20]] * config.scaling.return_scale
    np.testing.assert_allclose(starts, config.target, rtol=1e-6)
    earned = prompt.reward[0, :30].reshape(3, 10).sum(axis=1) * config.scaling.reward_scale
    assert (np.diff(earned) > 0).all()
    assert earned.max() <= config.target


@pytest.mark.parametrize(
    ("cores", "prompt_tokens", "environments", "expected"),
    [
        (2, 3000, 16, (1, 1, 2)),
        (2, 30_000, 16, (1, 2, 1)),
        (4, 0, 12, (3, 1, 2)),
        (4, 0, 10, (1, 1, 2)),
        (1, 0, 3, (1, 1, 1)),
    ],
)
def test_simulated_devices_leave_a_core_to_the_environments_unless_the_prompt_is_long(
    monkeypatch, cores, prompt_tokens, environments, expected
):
    monkeypatch.setattr(policies, "usable_cores", lambda: cores)
    plan = RolloutPlan.choose(make_mesh(MeshShape(ring=8)), environments, prompt_tokens)
    assert (plan.mesh.shape["data"], plan.mesh.shape["ring"], plan.policies) == expected
    assert plan.mesh.size == expected[0] * expected[1]


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
    policy.start_over(None)
    if kept:
        prompt = ChainSteps.joined(kept)
        place = np.broadcast_to(np.arange(len(kept), dtype=np.int32), prompt.position.shape)
        policy.start_over(replace(prompt, position=place, trajectory=place // DECISIONS))
    fresh, _ = run_trial(policy, TRIALS - 1)
    np.testing.assert_allclose(runs[-1][0], fresh, atol=1e-5)
    # The first trials are those of a policy with everything in context; later ones are not.
    policy.start_over(None)
    everything = [run_trial(policy, trial)[0] for trial in range(TRIALS)]
    for trial in range(window):
        np.testing.assert_array_equal(runs[trial][0], everything[trial])
    assert np.abs(runs[-1][0] - everything[-1]).max() > 1e-3


def test_a_window_of_one_trial_keeps_the_prompt_and_none_is_refused():
    policy = tiny_policy()
    with pytest.raises(ConfigError, match="the window has 0 trials"):
        TrialWindowPolicy(policy, 0)
    policy.start_over(None)
    _, steps = run_trial(policy, 0)
    prompt = as_prompt([steps])
    policy.start_over(prompt)
    windowed = TrialWindowPolicy(policy, 1)
    first, other, again = (run_trial(windowed, trial)[0] for trial in (1, 2, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3
    policy.start_over(None)
    assert np.abs(run_trial(policy, 1)[0] - first).max() > 1e-4
