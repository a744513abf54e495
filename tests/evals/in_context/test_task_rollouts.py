"""What stands between a policy and its environments in the controls."""

from typing import Any

import numpy as np

from evals.in_context.task_rollouts import ForgetfulPolicy, UnpaidPolicy


class Recorder:
    """Keeps what is asked of it, in order."""

    def __init__(self):
        self.calls: list[tuple[Any, ...]] = []

    def start_over(self, prompt) -> None:
        self.calls.append(("start_over", prompt))

    def begin_trial(self) -> None:
        self.calls.append(("begin_trial",))

    def act(self, observation: np.ndarray) -> np.ndarray:
        self.calls.append(("act", observation.tolist()))
        return observation + 1

    def receive(self, reward: np.ndarray, last: bool) -> None:
        self.calls.append(("receive", reward.tolist(), last))


def run_a_trial(policy) -> None:
    policy.begin_trial()
    assert policy.act(np.array([[1.0]])).tolist() == [[2.0]]
    policy.receive(np.array([3.0]), True)


def test_a_forgetful_policy_begins_every_trial_with_nothing():
    recorder = Recorder()
    policy: Any = ForgetfulPolicy(recorder)
    run_a_trial(policy)
    run_a_trial(policy)
    trial = [("start_over", None), ("begin_trial",), ("act", [[1.0]]), ("receive", [3.0], True)]
    assert recorder.calls == 2 * trial


def test_an_unpaid_policy_never_learns_of_a_reward():
    recorder = Recorder()
    run_a_trial(UnpaidPolicy(recorder))
    assert recorder.calls == [("begin_trial",), ("act", [[1.0]]), ("receive", [0.0], True)]
