"""Pictures of recorded MuJoCo states, drawn without a display.

    python evals/report_page/filmstrip.py --task walker_run --states states.npy --frames frames.npy

draws each of the states float64 [F, P] as a picture, uint8 [F, height, width, 3]. MuJoCo takes its
graphics library from $MUJOCO_GL once, when it is first imported, and a library that is half installed
may end the whole process: so ``render`` starts this file as a process of its own for each library.
"""

import base64
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import matplotlib.image
import numpy as np

from agentic_ring import cli
from agentic_ring.data.tasks import Task, load_environment, parse_task
from agentic_ring.errors import AgenticRingError, DataError

WIDTH, HEIGHT = 240, 180
BACKENDS = ("egl", "osmesa")
"""Ways to draw without a display: on a GPU, and in software."""
TIMEOUT_SECONDS = 300


class RenderingError(AgenticRingError, RuntimeError):
    """No graphics library of this machine could draw."""


def render(task: Task, states: np.ndarray) -> np.ndarray:
    """Pictures uint8 [F, height, width, 3] of physics states float64 [F, P].

    Draws with $MUJOCO_GL where it is set, else with the first of ``BACKENDS`` that works.

    Raises:
      RenderingError: none does.
    """
    asked = os.environ.get("MUJOCO_GL")
    reasons = []
    for backend in [asked] if asked else BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            written, drawn = Path(folder) / "states.npy", Path(folder) / "frames.npy"
            np.save(written, states)
            flags = ["--task", task.full_name, "--states", str(written), "--frames", str(drawn)]
            reason = _run([sys.executable, __file__, *flags], backend)
            if reason is None:
                return np.load(drawn, allow_pickle=False)
            reasons.append(f"MUJOCO_GL={backend}: {reason}")
    raise RenderingError(
        f"MuJoCo cannot draw on this machine ({'; '.join(reasons)}). On Debian and Ubuntu, apt install "
        "libosmesa6 lets it draw in software; with a GPU, libegl1 and the driver's own EGL"
    )


def _run(command: Sequence[str], backend: str) -> str | None:
    """Runs a process with this graphics library; None, or the reason why it failed."""
    environment = {**os.environ, "MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_SECONDS} s"
    if ended.returncode == 0:
        return None
    lines = ended.stderr.strip().splitlines()
    return lines[-1] if lines else f"ended with status {ended.returncode}"


def evenly_spaced(count: int, wanted: int) -> np.ndarray:
    """At most ``wanted`` of the places 0 to ``count`` - 1, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).round().astype(int))


def data_uri(frame: np.ndarray) -> str:
    """A picture uint8 [height, width, 3] as a JPEG within an address, for a page without files beside it."""
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, frame, format="jpeg", pil_kwargs={"quality": 85})
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def main(task: str, states: Path, frames: Path) -> None:
    """Draws physics states with the graphics library of $MUJOCO_GL.

    Args:
      task: Full name of the task whose body it is, such as walker_run.
      states: NumPy file of physics states, float64 [F, P].
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
