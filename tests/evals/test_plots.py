"""What is drawn is checked by its colours in the PNG; how it looks, by eye."""

from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest

from agentic_ring.results.intervals import Interval, mean_interval
from evals.plots import BLUE, GREEN, ORANGE, PINK, plot_data_returns, plot_loss, plot_trial_returns


def pixels(path: Path, colour: str) -> np.ndarray:
    """Coordinates [n, 2] (x to the right, y downwards) of the PNG's pixels of exactly this colour."""
    image = matplotlib.image.imread(path)[..., :3]
    same = np.abs(image - matplotlib.colors.to_rgb(colour)).max(axis=-1) < 1 / 255
    return np.argwhere(same)[:, ::-1]


def test_the_loss_falls_from_left_to_right(tmp_path):
    path = tmp_path / "run" / "loss.png"
    rows = [{"step": 10 * step, "loss": 1.0 - step / 200} for step in range(200)]
    plot_loss(path, "walker_run", [*rows, {"step": 2000, "return": 3.0}])
    drawn = pixels(path, BLUE)
    curve = drawn[drawn[:, 0] < 700]  # left of the legend
    assert np.corrcoef(curve[:, 0], curve[:, 1])[0, 1] > 0.99
    assert list(path.parent.iterdir()) == [path]


def test_trials_rise_between_the_lines_of_the_data(tmp_path):
    path = tmp_path / "trials.png"
    generator = np.random.default_rng(0)
    trials = [mean_interval(generator.normal(60 + 20 * trial, 10, 16), "environments") for trial in range(4)]
    reference = mean_interval(generator.normal(25, 5, 16), "environments")
    alone = [mean_interval(generator.normal(60, 10, 16), "environments")] * 4
    data = {"data_median": 70.0, "data_best": 300.0}
    plot_trial_returns(path, "walker_run", trials, no_context=alone, random_policy=reference, **data)
    # Below the axes lies the legend.
    drawn = {colour: pixels(path, colour) for colour in (BLUE, ORANGE, GREEN, PINK)}
    drawn = {colour: found[found[:, 1] < 520] for colour, found in drawn.items()}
    heights = {colour: np.median(found[:, 1]) for colour, found in drawn.items()}
    assert heights[GREEN] < heights[BLUE] < heights[PINK]
    assert heights[GREEN] < heights[ORANGE]
    assert np.corrcoef(*drawn[BLUE].T)[0, 1] < -0.9  # upwards: y falls
    single = Interval(5.0, None, None, 1, "environments")
    plot_trial_returns(path, "walker_run", [single], no_context=[single], random_policy=single, **data)
    assert len(pixels(path, BLUE)) > 50


def test_each_algorithm_has_its_share_of_the_histogram(tmp_path):
    path = tmp_path / "data.png"
    counts = {"td3": 300, "rnd": 100, "ou": 30}
    algorithms = [name for name, count in counts.items() for _ in range(count)]
    returns = np.random.default_rng(0).uniform(0, 100, len(algorithms))
    plot_data_returns(path, "walker_run", returns, algorithms, random_policy=25.0, last_trial=80.0)
    areas = [len(pixels(path, colour)) for colour in (BLUE, ORANGE, GREEN)]
    assert areas[0] / areas[1] == pytest.approx(3, rel=0.15)
    assert areas[1] / areas[2] == pytest.approx(100 / 30, rel=0.35)  # its legend patch weighs more
