import numpy as np
import pytest

from agentic_ring.data.domains import load_environment, parse_task
from agentic_ring.data.gymnasium_environments import make_environments
from agentic_ring.errors import DataError
from agentic_ring.rollouts.returns import EvaluationRecord, RecordingPolicy, read_record, write_record
from agentic_ring.rollouts.trials import Cohort, RandomPolicy, run_trials

TASK = parse_task("cartpole_swingup")
ACTION_REPEAT = 100  # 10 decisions an episode


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    environments = make_environments(TASK, [3, 4], ACTION_REPEAT)
    policy = RecordingPolicy(RandomPolicy(2, TASK.domain.action_dim, seed=0), environments)
    returns = run_trials("random policy", [Cohort(policy, environments)], trials=2, decisions=10)
    environments.close()
    data, folder = (np.array([1.0, 2.0]), np.array(["td3", "ou"])), tmp_path_factory.mktemp("run")
    assert read_record(folder) is None
    write_record(folder, EvaluationRecord(*data, policy.rollout()))
    return returns, folder


def test_the_recorded_actions_lead_from_each_recorded_state_to_the_next(recorded):
    returns, folder = recorded
    record = read_record(folder)
    assert record.data_algorithms.tolist() == ["td3", "ou"]
    rollout = record.rollout
    assert (rollout.observation.shape, rollout.physics.shape) == ((2, 10, 5), (2, 11, 4))
    np.testing.assert_allclose(rollout.reward.sum(axis=1), returns[0], rtol=1e-5)
    environment = load_environment(TASK, seed=0)
    environment.reset()
    physics = environment.physics
    for trial in range(2):
        for step in range(10):
            with physics.reset_context():
                physics.set_state(rollout.physics[trial, step])
            for _ in range(ACTION_REPEAT):
                physics.set_control(rollout.action[trial, step])
                physics.step(environment._n_sub_steps)
            np.testing.assert_allclose(physics.get_state(), rollout.physics[trial, step + 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": np.zeros((2, 9), np.float32)}, r"reward is float32 \[2, 9\]"),
        ({"physics": np.zeros((2, 10, 4))}, "10 rows per trial; expected 11"),
        ({"action": np.full((2, 10, 1), np.nan, np.float32)}, "action holds values that are not finite"),
        ({"data_algorithms": np.array([object(), None])}, "cannot be read"),
        ({"extra": np.zeros(3)}, "extra"),
    ],
)
def test_arrays_that_do_not_fit_are_named(recorded, tmp_path, change, message):
    with np.load(recorded[1] / "evaluation.npz") as file:
        arrays = dict(file)
    np.savez(tmp_path / "evaluation.npz", **(arrays | change))
    with pytest.raises(DataError, match=message):
        read_record(tmp_path)
