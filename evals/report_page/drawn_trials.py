"""Drawn frames of recorded trials of a cue task: the path of what the goal asks for, and the goal."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Circle

from agentic_ring.data.families import Family
from evals.in_context.recorded_trials import RecordedTrials
from evals.plots import BLUE, GREEN, GREY, ORANGE
from evals.report_page.filmstrip import Frame, Strip, data_uri, evenly_spaced

_FRAMES = 9
_WIDTH, _HEIGHT, _DPI = 2.4, 1.8, 200
"""Size of a frame in inches, and its resolution."""


def drawn_film(family: Family, recorded: RecordedTrials) -> list[Strip]:
    """Frames of the first and the last trial of the first recorded task, at most 9 each.

    A goal of two numbers is drawn in the plane. Its disc earns the full reward, and nothing is earned outside
    of the circle. A goal of one number is drawn over the decisions.
    """
    trials = recorded.cue.shape[1]
    seconds = family.load_physics().timestep() * family.physics_steps * family.substeps
    shown = sorted({0, trials - 1})
    paths = [_path(family, recorded.physics[0, trial]) for trial in shown]
    goals = [recorded.goal[0, trial] for trial in shown]
    reach = 1.05 * max(np.abs(each).max() for each in (*paths, *(goal + family.far for goal in goals)))
    strips = []
    for trial, path, goal in zip(shown, paths, goals, strict=True):
        cue = recorded.cue[0, trial]
        before = int((recorded.cue[0, :trial] == cue).sum())
        earned = np.concatenate([[0.0], np.cumsum(recorded.reward[0, trial], dtype=np.float64)])
        frames = [
            Frame(
                data_uri(_frame(family, path[: decision + 1], goal, reach)),
                float(decision * seconds),
                float(earned[decision]),
            )
            for decision in evenly_spaced(len(earned), _FRAMES)
        ]
        strips.append(Strip(trial + 1, frames, f"; its cue was shown {before} times before"))
    return strips


def _path(family: Family, states: np.ndarray) -> np.ndarray:
    """What the goal asks for at each of the states [D + 1, P]: [D + 1, G]."""
    return family.outcomes(np.concatenate([states[:1], states]))


def _frame(family: Family, path: np.ndarray, goal: np.ndarray, reach: float) -> np.ndarray:
    """A frame uint8 [height, width, 3] of the path up to now."""
    canvas = Canvas(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    agg = FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(GREY)
    if family.goal_dim == 1:
        at = np.arange(len(path))
        axes.axhspan(goal[0] - family.far, goal[0] + family.far, color=GREEN, alpha=0.15, linewidth=0)
        axes.axhspan(goal[0] - family.near, goal[0] + family.near, color=GREEN, alpha=0.7, linewidth=0)
        axes.plot(at, path[:, 0], color=BLUE, linewidth=1.5, marker="o", markersize=3)
        axes.plot(at[-1:], path[-1:, 0], color=ORANGE, marker="o", markersize=6)
        axes.set_xlim(-0.3, family.decisions + 0.3)
        axes.set_ylim(-reach, reach)
    else:
        axes.add_patch(Circle((goal[0], goal[1]), family.far, fill=False, edgecolor=GREEN, linestyle="--"))
        axes.add_patch(Circle((goal[0], goal[1]), family.near, color=GREEN))
        axes.plot(path[:, 0], path[:, 1], color=BLUE, linewidth=1.5, marker="o", markersize=3)
        axes.plot(path[-1:, 0], path[-1:, 1], color=ORANGE, marker="o", markersize=6)
        axes.set_xlim(-reach, reach)
        axes.set_ylim(-reach, reach)
        axes.set_aspect("equal")
    agg.draw()
    return np.asarray(agg.buffer_rgba())[..., :3].copy()
