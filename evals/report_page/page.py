"""Renders a report as one self-contained HTML page (template: page.html) without scripts."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from agentic_ring.results.results_file import Figure, short_number
from evals.report_page.attention_over_trials import TrialAttention
from evals.report_page.charts import attention_chart, attention_course, data_chart, loss_chart
from evals.report_page.run_data import ReportedRun
from evals.report_page.trial_charts import trials_chart

TILES = {
    "return/last_trial": "last trial",
    "return/trial_1": "first trial",
    "return/context_gain": "gain from context",
    "return/random_policy": "random policy",
    "return/data_best": "best of the data",
}
"""Label of each figure at the top."""


def page(runs: Sequence[ReportedRun]) -> str:
    """The page of one run, or of several runs side by side."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short_number
    environment.filters["line_break_parts"] = _line_break_parts
    return environment.get_template("page.html").render(
        runs=[_shown(run, _top(runs)) for run in runs],
        title=_title(runs),
        rows=_result_rows(runs),
        paper=any(figure.paper is not None for run in runs for figure in run.results.figures),
        loss=loss_chart(_losses(runs)),
        differing=_differing_settings(runs),
        style=(Path(__file__).parent / "page.css").read_text(),
    )


def _losses(runs: Sequence[ReportedRun]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Losses by the name of the run."""
    return {run.name: run.metrics for run in runs if run.metrics}


def _title(runs: Sequence[ReportedRun]) -> str:
    tasks = list(dict.fromkeys(map(_task, runs)))
    return ", ".join(tasks) if len(runs) == 1 else f"{len(runs)} runs: {', '.join(tasks)}"


def _task(run: ReportedRun) -> str:
    return str(run.results.config.get("task", run.name))


def _top(runs: Sequence[ReportedRun]) -> float | None:
    """Highest return of several runs of one task; None if they have no common scale."""
    if len(runs) == 1 or len({run.results.config.get("task") for run in runs}) > 1:
        return None
    returns = [f for run in runs for f in run.results.figures if f.name.startswith("return/")]
    return max((f.value if f.high is None else f.high for f in returns), default=None)


def _shown(run: ReportedRun, top: float | None) -> dict[str, Any]:
    """The values of one run that the template reads."""
    results, attention, first_trial = run.results, run.attention, run.prompt_trajectories
    return {
        "name": run.name,
        "results": results,
        "tiles": _tiles(results.figures),
        "missing": run.missing,
        "film": run.film,
        "trials": trials_chart(results.figures, run.name, top),
        "data": run.record and data_chart(run.record, results.figures, run.name),
        "attention": attention and attention_chart(attention, first_trial, run.name),
        "course": attention and attention_course(attention, first_trial, run.name),
        "heads": attention and _looking_back(attention),
        "even_back": attention and _even_back(attention),
        "config": json.dumps(results.config, indent=2),
    }


def _tiles(figures: Sequence[Figure]) -> list[tuple[str, Figure]]:
    """(label, figure) of the figures at the top; the first four for a run of another kind."""
    named = {figure.name: figure for figure in figures}
    found = [(label, named[name]) for name, label in TILES.items() if name in named]
    return found or [(figure.name, figure) for figure in figures[:4]]


def _looking_back(attention: TrialAttention) -> np.ndarray:
    """Share [layers, heads] of the last trial's attention to anything before that trial."""
    last = attention.trajectory == attention.trajectory.max()
    return attention.shares[:, :, last, :-1].sum(axis=-1).mean(axis=-1)


def _even_back(attention: TrialAttention) -> float:
    """The same share under uniform attention."""
    last = attention.trajectory == attention.trajectory.max()
    return float(attention.even[last, :-1].sum(axis=-1).mean())


def _line_break_parts(text: str) -> list[str]:
    """Parts of a long name between which a line may break."""
    return re.split(r"(?<=[/_.,])(?=[^\W\d])", text)


def _result_rows(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """A row for each figure that any run has; ``cells`` has one figure or None per run."""
    by_run = [{f.name: f for f in run.results.figures} for run in runs]
    rows = []
    for name in dict.fromkeys(name for figures in by_run for name in figures):
        cells: list[Figure | None] = [figures.get(name) for figures in by_run]
        present = [figure for figure in cells if figure is not None]
        paper = dict.fromkeys(figure.paper for figure in present if figure.paper is not None)
        rows.append({"name": name, "unit": present[0].unit, "cells": cells, "paper": list(paper)})
    return rows


def _differing_settings(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """Dotted names of the settings in which the runs differ, with the value in each run."""
    flat = [_flattened(run.results.config) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    values = [(name, [json.dumps(settings.get(name)) for settings in flat]) for name in names]
    return [(name, row) for name, row in values if len(set(row)) > 1]


def _flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
