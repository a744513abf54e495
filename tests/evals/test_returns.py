"""Returns with and without context, and whether the context helps."""

from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import pytest

from agentic_ring.data.domains import parse_task
from agentic_ring.data.gymnasium_environments import make_environments
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.model import Model
from agentic_ring.rollouts.returns import ReturnReport
from agentic_ring.rollouts.trials import Cohort


def test_the_control_is_the_same_trial_by_a_policy_that_has_seen_nothing(small_run):
    config = small_run.config
    assert config.evaluation.prompt_trajectories == 2
    decisions = config.decisions * config.evaluation.trials
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    model, params = Model(config.model), jax.device_put(small_run.params, jax.devices()[0])
    # A cache of the same size: another one rounds differently, which the cart-pole magnifies.
    blank = InContextPolicy(model, params, mesh, config.scaling, config.target, 1, decisions)
    for number, returns in enumerate(small_run.report.no_context):
        seeds = [config.evaluation.first_seed + number]
        made = make_environments(parse_task(config.task), seeds, config.chains.action_repeat)
        with closing(made):
            for trial, expected in enumerate(returns):
                cohort = Cohort(blank.fresh_copy(), made)
                cohort.begin(trial)
                rewards, last = [], False
                while not last:
                    reward, last = cohort.step()
                    rewards.append(float(reward[0]))
                assert sum(rewards) == pytest.approx(expected, rel=1e-6)
    assert not np.allclose(small_run.report.no_context, small_run.report.trials, rtol=1e-3)


def report(trials, no_context, rollout) -> ReturnReport:
    trials, no_context = (np.array(returns, float) for returns in (trials, no_context))
    return ReturnReport(trials, no_context, 0 * trials, np.arange(3.0), 100.0, rollout)


def test_the_context_helps_if_the_lower_bound_of_its_gain_exceeds_the_margin(small_run):
    for last, gain, helps in (
        # More than 5 is required, for the lower bound; the trial between gains 1.
        ([14.0, 16.0, 15.0], "return 6.0 (5.5 to 6.5) more", True),
        ([12.0, 14.0, 13.0], "return 5.0 (4.5 to 5.5) more", False),
        ([10.0, 18.0, 17.0], "return 6.0 (3.5 to 7.5) more", False),
        ([2.0, 4.0, 3.0], "return 0.0 (-0.5 to 0.5) more", False),
    ):
        trials = [[90.0, 5.0, value] for value in last]
        verdict = report(trials, [[0.0, 4.0, 4.0]] * 3, small_run.report.rollout).verdict()
        assert gain in verdict
        assert ("it helps" in verdict, "it is not shown to help" in verdict) == (helps, not helps)
        assert "more than 5.0, which is 5% of the target" in verdict
    single = report([[7.0]], [[7.0]], small_run.report.rollout)
    assert single.context_gain == replace(single.context_gain, value=0.0, low=None, high=None, n=1)
    assert "return 0.0 more" in single.verdict()
