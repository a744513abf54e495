"""dm_control's cheetah; a goal is a speed, with a sign for the direction."""

from functools import cache

import numpy as np

from agentic_ring.data.families.family import Family, HeldNoise

_FASTEST = 1.5
"""Largest target speed in metres per second, in either direction."""
_BANDS = 10
_POSES = 64
_SETTLING_STEPS = 200
_TIMESTEP = 0.01
"""Seconds of a physics step."""


class Cheetah(Family):
    """Cue -> speed: reward 1 within 0.1 m/s of it, falling linearly to 0 at 0.35 m/s.

    A decision lasts 0.12 s and pays for its mean speed, which follows from the torso's displacement. A trial
    has 8 decisions and starts from one of 64 poses that have settled on the ground, as in dm_control. Random
    torques that move all joints of a leg together explore speeds of about 1 m/s.
    """

    body = "cheetah"
    suite_task = ("cheetah", "run")
    physics_dim = 18
    body_dim = 18
    action_dim = 6
    goal_dim = 1
    standard_substeps = 1
    standard_physics_steps = 12
    near, far = 0.1, 0.35
    goal_scale = 1.0
    regions = _BANDS
    start_cells = _POSES
    noise = HeldNoise(redraw=0.6, idle=0.1, gain=2.0, shared=(0, 0, 0, 1, 1, 1))

    def draw_starts(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draws settled poses."""
        return self._poses()[random.integers(_POSES, size=count)]

    def start_cell(self, starts: np.ndarray) -> np.ndarray:
        """Returns the number of the nearest pose."""
        return np.argmin([np.abs(starts - pose).sum(axis=1) for pose in self._poses()], axis=0)

    def draw_any_goals(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Draws speeds in both directions."""
        return random.uniform(-_FASTEST, _FASTEST, (count, 1))

    def region(self, goals: np.ndarray) -> np.ndarray:
        """Returns the band of each speed, of 10 bands of 0.3 m/s."""
        return ((goals[:, 0] + _FASTEST) / (2 * _FASTEST) * _BANDS).astype(int).clip(0, _BANDS - 1)

    def observe(self, physics: np.ndarray) -> np.ndarray:
        """Returns positions, the horizontal one included, and velocities.

        dm_control leaves the horizontal position out. A trial starts where it is 0, and its increase in a
        decision is what the decision pays for.
        """
        return physics.astype(np.float32)

    def outcome(self, paths: np.ndarray) -> np.ndarray:
        """Returns the mean speed of each sub-step in metres per second."""
        return np.diff(paths[..., :1], axis=-2) / (self.physics_steps * _TIMESTEP)

    @cache  # noqa: B019 - there is one cheetah in a process
    def _poses(self) -> np.ndarray:
        """The poses that random joint angles settle to, float32 [64, P], at rest and at the origin."""
        physics = self.load_physics()
        limited = physics.model.jnt_limited == 1
        lower, upper = physics.model.jnt_range[limited].T
        random = np.random.default_rng(0)
        poses = np.zeros((_POSES, self.physics_dim), np.float32)
        for pose in poses:
            with physics.reset_context():
                physics.data.qpos[limited] = random.uniform(lower, upper)
            physics.step(_SETTLING_STEPS)
            pose[1 : physics.model.nq] = physics.data.qpos[1:]
        return poses
