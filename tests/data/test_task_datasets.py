import numpy as np
import pytest

import agentic_ring
from agentic_ring.data.domains import domain_named, task_named
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.errors import ConfigError, DataError, UnknownNameError
from tests.data.synthetic import TASK, random_store

NAME = f"cartpole_{TASK}"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "store").mkdir()
    random_store(tmp_path / "store" / "cartpole-mix.h5", [30] * 25, algorithms=["td3", "ou"] * 12 + ["rnd"])
    return tmp_path


@pytest.mark.parametrize("streaming", [False, True])
def test_every_episode_is_in_one_part(root, streaming):
    environment, train, validation = agentic_ring.make_env_and_datasets(NAME, data=root, streaming=streaming)
    assert environment.reset(seed=0)[0].shape == (5,)
    assert (len(train), len(validation)) == (23, 2)
    with TrajectoryStore.open(root / "store" / "cartpole-mix.h5") as store:
        np.testing.assert_array_equal(validation.returns, store.returns(TASK)[[9, 19]])
        assert validation.algorithms == [store.algorithms[9], store.algorithms[19]]
        for dataset, episodes in ((train, [e for e in range(25) if e % 10 != 9]), (validation, [9, 19])):
            for trajectory, episode in zip(dataset, episodes, strict=True):
                np.testing.assert_equal(vars(trajectory), vars(store.steps(episode, 0, 30, TASK)))
    np.testing.assert_array_equal(train[-1].reward, train[22:][0].reward)
    with pytest.raises(IndexError):
        validation[2]


def test_wrong_names_list_the_right_ones(root):
    with pytest.raises(UnknownNameError, match=r"'humanoid'.*cheetah"):
        domain_named("humanoid")
    with pytest.raises(UnknownNameError, match=r"task of cheetah 'stand'.*run"):
        task_named(domain_named("cheetah"), "stand")
    with pytest.raises(UnknownNameError, match=r"'cartpole_run'; choose one of: .*cartpole_swingup"):
        agentic_ring.make_env_and_datasets("cartpole_run", data=root)
    with pytest.raises(UnknownNameError, match=r"'rnd'; choose one of: mix"):
        agentic_ring.make_env_and_datasets(NAME, "rnd", data=root)
    with pytest.raises(DataError, match=r"walker-mix.h5; .*python -m data_prep.stores --domain walker"):
        agentic_ring.make_env_and_datasets("walker_run", data=root)
    random_store(root / "store" / "cartpole-rnd.h5", [30] * 2)
    with pytest.raises(ConfigError, match=r"choose one: mix, rnd"):
        agentic_ring.make_env_and_datasets(NAME, data=root)
    assert len(agentic_ring.make_env_and_datasets(NAME, "rnd", data=root)[1]) == 2
