import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agentic_ring.data.hindsight_chains import StratifiedSampler, completions, returns_to_go
from agentic_ring.errors import ConfigError, DataError


def test_returns_to_go_and_completions_of_a_small_example():
    rewards = np.array([1.0, 0.0, 2.5])
    np.testing.assert_array_equal(returns_to_go(rewards, target=5.0), [5.0, 4.0, 4.0])
    np.testing.assert_array_equal(completions(rewards, target=3.5), [0, 0, 1])
    np.testing.assert_array_equal(completions(rewards, target=3.6), [0, 0, 0])


@given(st.data())
def test_chains_ascend_and_every_demonstration_reaches_the_target(data):
    count, length, seed = (data.draw(st.integers(*ends)) for ends in ((4, 60), (1, 4), (0, 9)))
    returns = data.draw(hnp.arrays(np.float64, count, elements=st.floats(0, 1000)))
    learnable = data.draw(hnp.arrays(bool, count))
    learnable[data.draw(st.integers(0, count - 1))] = True
    sample = StratifiedSampler(returns, learnable, length, top_fraction=0.2, seed=seed)
    for index in range(5):
        plan = sample(index)
        ascending = returns[list(plan.episodes)]
        assert len(plan.episodes) == length
        assert (np.diff(ascending) >= 0).all()
        assert plan.target == ascending[-plan.demonstrations]
        assert learnable[list(plan.episodes[-plan.demonstrations :])].all()


def test_trajectories_come_from_every_stratum_and_demonstrations_in_equal_numbers_from_the_best():
    sample = StratifiedSampler(np.arange(1000.0), np.ones(1000, bool), length=4, top_fraction=0.2, seed=0)
    plans = [sample(index) for index in range(4000)]
    for plan in plans[:50]:
        good = plan.demonstrations
        assert min(plan.episodes[-good:]) >= 800
        strata = np.array_split(np.arange(800), 4 - good) if good < 4 else []
        assert all(episode in stratum for episode, stratum in zip(plan.episodes, strata, strict=False))
    assert sample(0, demonstrations=1).demonstrations == 1
    for good in range(1, 5):
        targets = [plan.target for plan in plans if plan.demonstrations == good]
        assert 900 < len(targets) < 1100
        # Uniform over the best 200, whose mean is 899.5, whatever the number.
        assert abs(np.mean(targets) - 899.5) < 8


def test_a_chain_depends_only_on_seed_and_index():
    one, same, other = (StratifiedSampler(np.arange(40.0), np.ones(40, bool), 4, 0.2, s) for s in (1, 1, 2))
    assert [one(i) for i in range(9)] == [same(i) for i in reversed(range(9))][::-1]
    assert one(0) != other(0)


@pytest.mark.parametrize(
    ("episodes", "policies", "length", "fraction", "error", "message"),
    [
        (3, 3, 4, 0.2, DataError, "the store has 3 and 3"),
        (8, 0, 4, 0.2, DataError, "the store has 8 and 0"),
        (8, 8, 0, 0.2, ConfigError, "chain of 0"),
        (8, 8, 4, 1.5, ConfigError, "top_fraction is 1.5"),
    ],
)
def test_impossible_chains_are_refused(episodes, policies, length, fraction, error, message):
    learnable = np.arange(episodes) < policies
    with pytest.raises(error, match=message):
        StratifiedSampler(np.arange(float(episodes)), learnable, length, fraction, seed=0)
