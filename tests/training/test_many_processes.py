"""Several processes train the same weights as one, in whatever order the ring visits their devices."""

import numpy as np
import pytest

from tests.training.worker import train_tiny
from tests.training.worker_processes import finish, losses, start_job


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "order", "data"), [(2, "00100111", 1), (4, "01230312", 2)])
def test_processes_train_the_same_weights_as_one(store, tmp_path, processes, order, data):
    one, many = tmp_path / "one", tmp_path / "many"
    expected = train_tiny(store, one, steps=3, data=data)
    finish(*start_job(store, many, processes, steps=3, data=data, devices=8 // processes, order=order))
    np.testing.assert_allclose(losses(many), losses(one), rtol=1e-5)
    weights = [np.load(many / f"weights-{number}.npy") for number in range(processes)]
    for others in weights[1:]:
        np.testing.assert_array_equal(others, weights[0])
    np.testing.assert_allclose(weights[0], expected, atol=1e-5)
