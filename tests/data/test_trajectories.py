import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.data.trajectories import Trajectory, detect_action_repeat, is_held, make_episode
from agentic_ring.errors import DataError
from tests.data.synthetic import DOMAIN, random_episode


def arrays():
    return vars(random_episode(np.random.default_rng(6), 6, "").episode)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("physics", lambda _: None, r"arrays are .'action'.*'reward'\], expected .*'physics'"),
        ("physics", lambda a: a.astype(np.float32), "physics is float32 .* expected float64"),
        ("physics", lambda a: np.zeros((7, 18)), r"physics is .* \(7, 18\).*cartpole"),
        ("action", lambda a: a[1:], r"action is float32 \(6, 1\), .*\(7, 1\)"),
        ("action", lambda a: a * 3, r"action reaches .*expected values in \[-1, 1\]"),
        ("observation", lambda a: np.float32(1), r"observation is float32 \(\), .*\(0, 5\)"),
        ("observation", lambda a: np.insert(a[1:], 3, np.nan, 0), "observation is not finite in row 3 of 7"),
    ],
)
def test_bad_arrays_are_named(name, change, message):
    contents = arrays()
    assert len(make_episode(contents | {"task": np.zeros((7, 10))}, DOMAIN)) == 6  # as APS adds it
    with pytest.raises(DataError, match=message):
        changed = contents | {name: change(contents.get(name))}
        make_episode({name: array for name, array in changed.items() if array is not None}, DOMAIN)


@pytest.mark.parametrize("rows", [0, 1])
def test_episodes_without_a_step_are_refused(rows):
    with pytest.raises(DataError, match="length 0"):
        make_episode({name: array[:rows] for name, array in arrays().items()}, DOMAIN)


@given(
    repeat=st.integers(1, 12), decisions=st.integers(2, 30), cut=st.integers(0, 11), seed=st.integers(0, 99)
)
def test_action_repeat_is_found_whatever_the_length(repeat, decisions, cut, seed):
    actions = np.random.default_rng(seed).uniform(-1, 1, (decisions, 2))
    held = np.repeat(actions, repeat, axis=0)
    held = held[: len(held) - cut % repeat]
    assert detect_action_repeat(held) == repeat
    assert is_held(held, repeat)
    assert not is_held(held, repeat + 1)
    constant = np.ones((10, 1))  # its repeat is unknown
    assert (detect_action_repeat(constant), is_held(constant, repeat)) == (1, True)


def test_trajectory_refuses_what_is_none():
    observation, action, reward = np.zeros((3, 5)), np.zeros((3, 1)), np.zeros(3)
    for wrong in (
        (observation, action, reward[:, None]),
        (observation, action[:2], reward),
        (observation[:0], action[:0], reward[:0]),
    ):
        with pytest.raises(DataError, match="at least one transition, not"):
            Trajectory(*wrong)
    with pytest.raises(DataError, match=r"action is not finite in row 1"):
        Trajectory(observation, np.array([[0], [np.nan], [0]]), reward)
