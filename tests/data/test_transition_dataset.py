import numpy as np
import pytest

from agentic_ring.data.store import TrajectoryStore, measure_scaling
from agentic_ring.data.transition_dataset import best_episodes, read_transitions
from agentic_ring.errors import ConfigError, DataError
from tests.data.synthetic import TASK, random_store

REPEAT = 2


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = random_store(tmp_path_factory.mktemp("s") / "store.h5", [9, 4, 12], action_repeat=REPEAT)
    with TrajectoryStore.open(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def decisions(store):
    scaling = measure_scaling(store, TASK, REPEAT)
    return read_transitions(store, TASK, REPEAT, scaling, np.array([0, 2]))


def test_rows_are_the_decisions_of_the_chosen_episodes(store, decisions):
    scaling = measure_scaling(store, TASK, REPEAT)
    assert len(decisions.rows) == 5 + 6  # of 9 and 12 steps, the last of 9 lasting one
    for first, episode in ((0, 0), (6, 2)):
        stored = store.episode(episode)
        length = len(stored.episode)
        rewards = stored.rewards[TASK][1:]
        for decision, start in enumerate(range(0, length, REPEAT)):
            row = first + decision
            earned = rewards[start : start + REPEAT].sum()
            np.testing.assert_allclose(decisions.reward[row] * scaling.reward_scale, earned, rtol=1e-5)
            to_go = decisions.return_to_go[row] * scaling.return_scale
            np.testing.assert_allclose(to_go, rewards[start:].sum(), rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(decisions.action[row], stored.episode.action[start + 1])
            after = scaling.observation(stored.episode.observation[min(start + REPEAT, length)])
            np.testing.assert_allclose(decisions.observation[row + 1], after, rtol=1e-6)
            assert decisions.timestep[row] == decision


def test_transitions_stay_within_episodes(decisions):
    drawn = decisions.transitions(np.random.default_rng(0), (50, 40))
    successor = {bytes(decisions.observation[row]): decisions.observation[row + 1] for row in decisions.rows}
    assert {bytes(seen) for seen in drawn["observation"].reshape(-1, 5)} == set(successor)
    following = [successor[bytes(seen)] for seen in drawn["observation"].reshape(-1, 5)]
    np.testing.assert_array_equal(drawn["next_observation"].reshape(-1, 5), following)


@pytest.mark.parametrize("extent", ["all", "last"])
def test_windows_end_at_a_decision_and_begin_with_its_episode(decisions, extent):
    batch = decisions.windows(np.random.default_rng(0), 300, 4, extent)
    windows = batch.windows
    assert windows.present[:, -1].all()
    assert set(windows.present.sum(axis=1)) == {1, 2, 3, 4}
    # Present decisions are consecutive; the first decision is where padding ends.
    steps = windows.timestep
    inside = windows.present[:, :-1]
    assert (np.diff(steps, axis=1)[inside] == 1).all()
    first = windows.present.argmax(axis=1)
    assert not steps[np.arange(300), first][first > 0].any()
    for field in (windows.observation, windows.action, windows.return_to_go[..., None]):
        assert (field[~windows.present] == 0).all()
    counted = [0, 0, 0, 1] if extent == "last" else [1, 1, 1, 1]
    np.testing.assert_array_equal(batch.weight, windows.present * counted)


def test_the_best_share_is_a_share_of_steps():
    returns, lengths = np.array([5.0, 9.0, 7.0, 8.0]), np.array([10, 10, 60, 20])
    for share, expected in ((0.3, [1, 3]), (0.29, [1]), (0.01, [1]), (1.0, [1, 3, 2, 0])):
        assert best_episodes(returns, lengths, np.ones(4, bool), share).tolist() == expected
    noise = np.array([True, False, True, True])
    assert best_episodes(returns, lengths, noise, 0.3).tolist() == [3], "of 90 steps; noise is not imitated"


def test_bad_shares_and_data_are_named(store):
    with pytest.raises(ConfigError, match="share of best episodes is 0"):
        best_episodes(np.ones(2), np.ones(2), np.ones(2, bool), 0.0)
    with pytest.raises(DataError, match="no policy acted"):
        best_episodes(np.ones(2), np.ones(2), np.zeros(2, bool), 0.5)
    scaling = measure_scaling(store, TASK, 1)
    for repeat, episodes, message in ((3, [0], "for 2 steps, so decisions of 3"), (1, [], "no episode")):
        with pytest.raises(DataError, match=message):
            read_transitions(store, TASK, repeat, scaling, np.array(episodes, int))
