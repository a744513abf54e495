"""Filmstrips of recorded MuJoCo states, rendered without a display.

MuJoCo reads its graphics library from $MUJOCO_GL only once, when it is first imported, and a broken library
may crash the process: ``render`` therefore runs this file in a separate process for each library.
"""

import base64
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.image
import numpy as np

from agentic_ring.data.domains import Task, load_environment, parse_task
from agentic_ring.errors import AgenticRingError

WIDTH, HEIGHT = 240, 180
BACKENDS = ("egl", "osmesa")
"""Graphics libraries that need no display: on a GPU, and in software."""
TIMEOUT_SECONDS = 300


class Frame(NamedTuple):
    """Data URI of an image, simulated seconds since the trial began, and sum of the rewards until then."""

    source: str
    seconds: float
    earned: float


class Strip(NamedTuple):
    """Frames of one trial of one environment; trials are counted from 1."""

    trial: int
    frames: Sequence[Frame]


class RenderingError(AgenticRingError, RuntimeError):
    """No graphics library on this machine can render."""


def graphics_libraries() -> Sequence[str]:
    """The libraries to try: that in $MUJOCO_GL, else ``BACKENDS``.

    A process that has loaded environments has one in $MUJOCO_GL which draws nothing; it calls this before.
    """
    requested = os.environ.get("MUJOCO_GL")
    return [requested] if requested else BACKENDS


def render(task: Task, states: np.ndarray, libraries: Sequence[str] | None = None) -> np.ndarray:
    """Frames uint8 [F, height, width, 3] of physics states float64 [F, P].

    Uses the first of the libraries that works; None takes ``graphics_libraries()``.
    """
    reasons = []
    for backend in graphics_libraries() if libraries is None else libraries:
        environment = {**os.environ, "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
        with tempfile.TemporaryDirectory() as folder:
            written, drawn = Path(folder) / "states.npy", Path(folder) / "frames.npy"
            np.save(written, states)
            command = [sys.executable, __file__, task.full_name, str(written), str(drawn)]
            try:
                ended = subprocess.run(
                    command,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                reasons.append(f"MUJOCO_GL={backend}: no result within {TIMEOUT_SECONDS} s")
                continue
            if ended.returncode == 0:
                return np.load(drawn, allow_pickle=False)
        status = f"ended with status {ended.returncode}"
        reasons.append(f"MUJOCO_GL={backend}: {[status, *ended.stderr.strip().splitlines()][-1]}")
    raise RenderingError(
        f"MuJoCo cannot render on this machine ({'; '.join(reasons)}). On Debian and Ubuntu, apt install "
        "libosmesa6 to render in software, or libegl1 and the driver's EGL for a GPU"
    )


def evenly_spaced(count: int, wanted: int) -> np.ndarray:
    """At most ``wanted`` of the indices 0 to ``count`` - 1, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).round().astype(int))


def data_uri(frame: np.ndarray) -> str:
    """A frame uint8 [height, width, 3] as the data URI of a JPEG, for a self-contained page."""
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, frame, format="jpeg", pil_kwargs={"quality": 85})
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _draw(task: str, states: str, frames: str) -> None:
    """Renders the states in a NumPy file to another, with the graphics library in $MUJOCO_GL."""
    physics = load_environment(parse_task(task), seed=0).physics
    drawn = []
    for state in np.load(states, allow_pickle=False):
        with physics.reset_context():
            physics.set_state(state)
        drawn.append(physics.render(HEIGHT, WIDTH, camera_id=0))
    np.save(frames, np.stack(drawn))


if __name__ == "__main__":
    _draw(*sys.argv[1:])
