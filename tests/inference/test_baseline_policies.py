import numpy as np

from agentic_ring.data.store import Scaling
from agentic_ring.inference.baseline_policies import ReactivePolicy, WindowPolicy

SCALING = Scaling((1.0, 2.0), (2.0, 4.0), reward_scale=8.0, return_scale=100.0)


class Recorder:
    """A model that records its inputs and acts by the return-to-go."""

    class config:
        window, observation_dim, action_dim = 3, 2, 1

    def bind(self, params):
        return lambda windows: windows.return_to_go[..., None] - params


def test_a_window_holds_the_last_decisions_of_its_own_trial():
    policy = WindowPolicy(Recorder(), np.float32(0), SCALING, target=50.0, num_environments=2)
    reactive = ReactivePolicy(lambda seen: seen, SCALING)
    for _ in range(2):  # the second trial starts with an empty window
        policy.begin_trial()
        actions = []
        for step in range(4):
            seen, present = np.full((2, 2), float(step), np.float32), min(step + 1, 3)
            actions.append(policy.act(seen))
            windows = policy._windows
            assert windows.present.sum(axis=1).tolist() == [present, present]
            assert windows.timestep[0, -present:].tolist() == list(range(step + 1 - present, step + 1))
            np.testing.assert_allclose(windows.observation[:, -1], SCALING.observation(seen))
            np.testing.assert_allclose(reactive.act(seen), windows.observation[:, -1])
            policy.receive(np.array([10.0, 0.0], np.float32), last=step == 3)
        # The return-to-go decreases by the reward of each environment.
        np.testing.assert_allclose(windows.return_to_go, [[0.4, 0.3, 0.2], [0.5, 0.5, 0.5]], rtol=1e-6)
        np.testing.assert_allclose(windows.action[:, -2:], np.stack(actions[-2:], axis=1))
