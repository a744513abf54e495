"""The curve of return against trajectories in context: its points, kept one by one, and its plot."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agentic_ring.errors import DataError
from agentic_ring.files import replacing
from evals.common.intervals import mean_interval
from evals.common.plots import BLUE, GREEN, ORANGE, PINK, error_bars, legend_below, save, titled_canvas
from evals.common.results import Figure, Results, write_results
from evals.common.rows import write_rows


@dataclass(frozen=True)
class ContextLengthConfig:
    """What all points have in common.

    Attributes:
      runs: folders of the main job's runs.
      models: by which the model of each is known again.
      checkpoint: of each of them.
      environments: at once, each with its own seed.
      first_seed: of the first environment.
    """

    runs: tuple[str, ...]
    models: tuple[str, ...]
    checkpoint: Literal["last", "best"]
    environments: int
    first_seed: int


@dataclass(frozen=True)
class Point:
    """One trial behind a prompt.

    Attributes:
      run: name of the run.
      trajectories: in context, the trial included.
      trained: those of the chains that the model was trained on.
      tokens: of the trajectories in context, when the trial ends.
      prompt_bytes, environments_bytes: of the caches.
      reading_seconds: of encoding the prompt, compilation included.
      trial_seconds: of the trial.
      returns: one for each environment.
    """

    run: str
    trajectories: int
    trained: int
    tokens: int
    prompt_bytes: int
    environments_bytes: int
    reading_seconds: float
    trial_seconds: float
    returns: tuple[float, ...]

    def figure(self) -> Figure:
        """Mean return with its interval over the environments."""
        name = f"return/{self.run}/{self.trajectories}_trajectories"
        return Figure.of(name, mean_interval(self.returns), "return")


def read_point(path: Path) -> Point:
    """A point that was measured before.

    Raises:
      DataError: the file holds none.
    """
    try:
        content = json.loads(path.read_text())
        return Point(**{**content, "returns": tuple(content["returns"])})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} is no point of this curve ({error!r}); delete it to measure it again"
        ) from error


def write_point(path: Path, point: Point) -> None:
    """Writes a point, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        beside.write_text(json.dumps(asdict(point)) + "\n")


def plot_points(path: Path, points: Sequence[Point]) -> None:
    """Return against trajectories in context, a curve a run; hollow beyond what the run was trained on."""
    canvas, axes = titled_canvas("Return by trajectories in context")
    for number, run in enumerate(dict.fromkeys(point.run for point in points)):
        colour = (BLUE, ORANGE, GREEN, PINK)[number % 4]
        own = sorted((point for point in points if point.run == run), key=lambda point: point.trajectories)
        counts = np.array([point.trajectories for point in own])
        intervals = [mean_interval(point.returns) for point in own]
        values = np.array([interval.value for interval in intervals])
        label = f"{run} (trained on {own[0].trained}, {intervals[0].n} environments)"
        axes.errorbar(counts, values, yerr=error_bars(intervals), color=colour, capsize=4, label=label)
        known = counts <= own[0].trained
        axes.plot(counts[known], values[known], "o", color=colour)
        axes.plot(counts[~known], values[~known], "o", color=colour, markerfacecolor="white")
    axes.set_xscale("log", base=2)
    counts = sorted({point.trajectories for point in points})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("trajectories in context, with the one rolled out; hollow: more than trained on")
    axes.set_ylabel("mean return (sum of rewards); bars: 95%")
    legend_below(canvas, axes)
    save(canvas, path)


def write_curve(directory: Path, settings: ContextLengthConfig, points: Sequence[Point]) -> list[Figure]:
    """Writes ``results.json``, ``context_length.csv`` (a row an environment) and the plot; the figures."""
    figures = [point.figure() for point in points]
    seconds = {
        f"{point.run}/{point.trajectories}": point.reading_seconds + point.trial_seconds for point in points
    }
    write_results(directory / "results.json", Results.of_this_process(asdict(settings), seconds, figures))
    rows: list[dict[str, Any]] = []
    for point in points:
        cells = {name: value for name, value in asdict(point).items() if name != "returns"}
        seeds = range(settings.first_seed, settings.first_seed + settings.environments)
        rows += [
            {**cells, "environment_seed": seed, "return": value}
            for seed, value in zip(seeds, point.returns, strict=True)
        ]
    write_rows(directory / "context_length.csv", rows)
    plot_points(directory / "context_length.png", points)
    return figures
