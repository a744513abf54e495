"""Renders recorded MuJoCo states without a display.

    python evals/report_page/filmstrip.py --task walker_run --states states.npy --frames frames.npy

renders states float64 [F, P] as frames uint8 [F, height, width, 3]. MuJoCo reads its graphics library from
$MUJOCO_GL only once, when it is first imported, and a broken library may crash the process: ``render``
therefore runs this file in a separate process for each library.
"""

import base64
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.image
import numpy as np

from agentic_ring.data.domains import Task, load_environment, parse_task
from agentic_ring.errors import AgenticRingError, DataError
from agentic_ring.terminal import cli

WIDTH, HEIGHT = 240, 180
BACKENDS = ("egl", "osmesa")
"""Graphics libraries that need no display: on a GPU, and in software."""
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Frame:
    """One frame of a filmstrip.

    Attributes:
      source: data URI of the image.
      seconds: simulated time since the beginning of the trial.
      earned: sum of the rewards up to this time.
    """

    source: str
    seconds: float
    earned: float


@dataclass(frozen=True)
class Strip:
    """Frames of one trial of one environment; trials are counted from 1."""

    trial: int
    frames: Sequence[Frame]


class RenderingError(AgenticRingError, RuntimeError):
    """No graphics library on this machine can render."""


def render(task: Task, states: np.ndarray) -> np.ndarray:
    """Frames uint8 [F, height, width, 3] of physics states float64 [F, P].

    Uses the graphics library in $MUJOCO_GL if that is set, else the first of ``BACKENDS`` that works.

    Raises:
      RenderingError: no library works.
    """
    requested = os.environ.get("MUJOCO_GL")
    reasons = []
    for backend in [requested] if requested else BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            written, drawn = Path(folder) / "states.npy", Path(folder) / "frames.npy"
            np.save(written, states)
            flags = ["--task", task.full_name, "--states", str(written), "--frames", str(drawn)]
            reason = _run([sys.executable, __file__, *flags], backend)
            if reason is None:
                return np.load(drawn, allow_pickle=False)
            reasons.append(f"MUJOCO_GL={backend}: {reason}")
    raise RenderingError(
        f"MuJoCo cannot render on this machine ({'; '.join(reasons)}). On Debian and Ubuntu, apt install "
        "libosmesa6 to render in software, or libegl1 and the driver's EGL for a GPU"
    )


def _run(command: Sequence[str], backend: str) -> str | None:
    """Runs a process with this graphics library; returns None, or the reason why it failed."""
    environment = {**os.environ, "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no result within {TIMEOUT_SECONDS} s"
    if ended.returncode == 0:
        return None
    lines = ended.stderr.strip().splitlines()
    return lines[-1] if lines else f"ended with status {ended.returncode}"


def evenly_spaced(count: int, wanted: int) -> np.ndarray:
    """At most ``wanted`` of the indices 0 to ``count`` - 1, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).round().astype(int))


def data_uri(frame: np.ndarray) -> str:
    """A frame uint8 [height, width, 3] as the data URI of a JPEG, for a self-contained page."""
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, frame, format="jpeg", pil_kwargs={"quality": 85})
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def main(task: str, states: Path, frames: Path) -> None:
    """Renders physics states with the graphics library in $MUJOCO_GL.

    Args:
      task: Full name of the task, such as walker_run.
      states: NumPy file with physics states, float64 [F, P].
      frames: NumPy file to write, uint8 [F, height, width, 3].
    """
    environment = load_environment(parse_task(task), seed=0)
    physics = environment.physics
    rows = np.load(states, allow_pickle=False)
    expected = physics.get_state().shape
    if rows.shape[1:] != expected:
        raise DataError(f"{states} has shape {list(rows.shape)}; {task} needs states of {list(expected)}")
    drawn = []
    for state in rows:
        with physics.reset_context():
            physics.set_state(state)
        drawn.append(physics.render(HEIGHT, WIDTH, camera_id=0))
    np.save(frames, np.stack(drawn))


if __name__ == "__main__":
    cli.run(main)
