"""Drawn rewards are plain numbers, of the promised kinds, and not those of held-out tasks."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS, Task
from agentic_ring.data.rewards.family import RewardFunction, Term, draw_rewards
from agentic_ring.data.rewards.features import Features, compute_features
from agentic_ring.data.rewards.held_out import Screening, outside
from agentic_ring.errors import ArgumentError
from agentic_ring.files.json_files import parse_json

MAZE, CHEETAH = DOMAINS["point_mass_maze"], DOMAINS["cheetah"]
GOAL = RewardFunction((Term(("x", "y"), (0.1, -0.1), "near", 0.0, 0.02),))


def read(fields):
    return parse_json(json.dumps(fields).encode(), RewardFunction)


@pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS.keys())
def test_draws_follow_their_seed_and_return_from_json(domain):
    random = np.random.default_rng(0)
    physics = random.normal(size=(200, domain.physics_dim)) * 0.3
    features = compute_features(domain, physics, np.zeros((200, domain.action_dim)))
    rewards = draw_rewards(domain, features, 400, seed=1)
    assert rewards == draw_rewards(domain, features, 400, seed=1)
    assert rewards != draw_rewards(domain, features, 400, seed=2)
    assert [read(asdict(reward)) for reward in rewards] == rewards
    values = np.stack([reward(features) for reward in rewards])
    assert (values.shape, values.dtype, values.min(), values.max()) == ((400, 200), np.float64, 0, 1)
    if domain.name in ("point_mass_maze", "jaco"):
        assert all(reward.goal for reward in rewards)
        assert (values.max(axis=1) == 1).all(), "a goal lies where the data was"
    else:
        assert 0.18 < np.mean([reward.negated for reward in rewards]) < 0.32
        assert 0.28 < np.mean([reward.threshold is not None for reward in rewards]) < 0.42
        assert {len(reward.terms) for reward in rewards} == {1, 2}


def test_terms_are_near_above_or_below_and_a_product_is_negated_before_it_is_cut():
    features = Features(a=np.array([-1.0, 0, 1, 2, 3]), b=np.array([1.0, 1, 1, 1, 0]))
    near = Term(("a",), (1.0,), "near", 2.0, radius=1.0, sigmoid="linear")
    above = Term(("a",), (2.0,), "above", 2.0)
    np.testing.assert_allclose(above(features), [10**-2.25, 0.1, 10**-0.25, 1, 1])
    np.testing.assert_array_equal(replace(above, side="below", margin=0.0)(features), [1, 1, 1, 1, 0])
    both = RewardFunction((near, Term(("b",), (1.0,), "above", 0.0)))
    np.testing.assert_allclose(both(features), [0.55, 1, 1, 1, 0])
    np.testing.assert_allclose(replace(both, negated=True)(features), [0.45, 0, 0, 0, 1])
    np.testing.assert_array_equal(replace(both, negated=True, threshold=0.4)(features), [1, 0, 0, 0, 1])


def test_other_fields_and_values_are_refused():
    fields = asdict(GOAL)
    wrong = (
        {"side": "at"},
        {"margin": "0"},
        {"margin": -1.0},
        {"target": (0.1,)},
        {"side": "above"},
        {"c": 1},
    )
    for change in wrong:
        with pytest.raises(ValueError, match=r"side|margin|is no term|c\n"):
            read(fields | {"terms": [fields["terms"][0] | change]})


def test_goals_are_drawn_evenly_over_the_space_that_was_visited():
    features = Features(x=np.append(np.zeros(1000), [0.1]), y=np.zeros(1001))  # 1000 rows in one place
    goals = [reward.goal for reward in draw_rewards(MAZE, features, 1000, seed=0)]
    assert 450 < goals.count((0.1, 0.0)) < 550
    assert draw_rewards(MAZE, features, 1, seed=0, radius=0.1)[0].terms[0].radius == 0.1
    with pytest.raises(ArgumentError, match="radius is 0; use a number of metres above 0"):
        draw_rewards(MAZE, features, 1, seed=0, radius=0)
    with pytest.raises(ArgumentError, match="cheetah has no goals: leave it out"):
        draw_rewards(CHEETAH, features, 1, seed=0, radius=0.1)


def test_held_out_tasks_are_kept_out():
    random = np.random.default_rng(0)
    names = ("horizontal_velocity", "angular_momentum", "torso_height")
    features = Features({name: random.uniform(-5, 5, 1000) for name in names})
    speed, spin, height = (RewardFunction((Term((name,), (5.0,), "above", 5.0),)) for name in names)
    constant = RewardFunction((Term(("torso_height",), (-9.0,), "above", 0.0),))
    run, flip = (Task(CHEETAH, name) for name in ("run", "flip"))
    opposite = replace(speed, negated=True)
    found = outside([speed, height, spin, opposite, constant, spin], [run, flip], features)
    assert found == Screening((height, opposite), (1, 2), 1)
    correlation = np.corrcoef(speed(features), speed(features) + spin(features))[0, 1]
    for limit, kept in ((correlation + 1e-6, (speed,)), (correlation - 1e-6, ())):
        both = [lambda features: speed(features) + spin(features)]
        assert outside([speed], both, features, limit).kept == kept
    never_paid = features | {"horizontal_velocity": np.full(1000, -1.0)}
    assert outside([spin], [run], Features(never_paid)) == Screening((spin,), (0,), 0)


def test_goals_keep_a_distance_from_held_out_ones():
    features = Features(x=np.linspace(-0.3, 0.3, 601), y=np.full(601, 0.15))
    features |= {"control_x": np.zeros(601), "control_y": np.zeros(601)}
    goals = {shift: replace(GOAL.terms[0], target=(-0.15 + shift, 0.15)) for shift in (0.029, 0.031, 0.2)}
    near, far, other = (RewardFunction((term,)) for term in goals.values())
    held_out = [Task(MAZE, "reach_top_left"), Task(MAZE, "reach_bottom_left"), other]
    assert outside([near, far, other], held_out, features) == Screening((far,), (1, 0, 1), 0)
    assert outside([near, far], held_out, features, goal_radii=1.0).kept == (near, far)


def test_drawn_rewards_need_no_mujoco():
    code = (
        "import sys, numpy; from agentic_ring.data.rewards import family, held_out;"
        "print(family.Term(('x',), (1.0,), 'near', 0.5)({'x': numpy.ones(1)}), 'mujoco' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[1.]", "False"]
