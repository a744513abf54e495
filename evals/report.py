"""Writes one self-contained HTML page about a run, or about several runs side by side.

    python evals/report.py runs/walker_run-demo-seed0
    python evals/report.py runs/walker_run-demo-seed0 runs/walker_run-demo-seed1 --output report.html

shows results beside the paper's figures, curves of trials and controls, training loss, training data,
attention over trials, images of the first and last trial, and provenance. The page needs no server, network
or script. A part that is not available is left out, and the page says why.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jinja2
import tyro

from agentic_ring.errors import ConfigError
from agentic_ring.files.atomic import replacing
from agentic_ring.results.results_file import Figure, short_number
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from evals.report_page.charts import (
    attention_chart,
    attention_course,
    contexts_chart,
    data_chart,
    loss_chart,
    told_figures,
    trials_chart,
)
from evals.report_page.run_data import ReportedRun, read_run

TEMPLATE = Path(__file__).parent / "report_page"
TILES = {
    "return/last_trial": "last trial",
    "return/trial_1": "first trial",
    "return/context_gain": "gain from context",
    "return/random_policy": "random policy",
    "return/data_best": "best of the data",
}
"""Label of each figure at the top; see also ``_tiles``."""


def page(runs: Sequence[ReportedRun]) -> str:
    """The page of one run, or of several runs side by side."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["short"] = short_number
    # Parts of a long name between which a line may break.
    environment.filters["line_break_parts"] = lambda text: re.split(r"(?<=[/_.,])(?=[^\W\d])", text)
    tasks = [_task(run) or run.name for run in runs]
    title = ", ".join(dict.fromkeys(tasks))
    return environment.get_template("page.html").render(
        runs=[_shown(run, _top(runs)) for run in runs],
        title=title if len(runs) == 1 else f"{len(runs)} runs: {title}",
        rows=_result_rows(runs),
        paper=any(figure.paper is not None for run in runs for figure in run.results.figures),
        loss=loss_chart({run.name: run.metrics for run in runs if run.metrics}),
        differing=_differing_settings(runs),
        style=(TEMPLATE / "page.css").read_text(),
    )


def _task(run: ReportedRun) -> str | None:
    """What the run was evaluated on: a user's reward, or a task."""
    asked = run.results.config.get("reward", run.results.config.get("task"))
    return None if asked is None else str(asked)


def _tiles(figures: Mapping[str, Figure]) -> list[tuple[str, Figure]]:
    """Label and figure of each tile; the first four figures for a run of another kind."""
    labels = TILES
    if told := told_figures([*figures.values()]):
        most = max(told)
        own = {f"return/n{most}": f"{most} stored trajectories", "return/n0": "nothing stored"}
        labels = own | {f"gain/n{most}": "normalised gain"} | TILES
    return [(label, figures[name]) for name, label in labels.items() if name in figures] or [
        *figures.items()
    ][:4]


def _top(runs: Sequence[ReportedRun]) -> float | None:
    """Highest return of several runs of one task; None if they have no common scale."""
    if len(runs) == 1 or len({_task(run) for run in runs}) > 1:
        return None
    returns = [f for run in runs for f in run.results.figures if f.name.startswith("return/")]
    return max((f.value if f.high is None else f.high for f in returns), default=None)


def _shown(run: ReportedRun, top: float | None) -> dict[str, Any]:
    """The values of one run that the template reads."""
    figures = {figure.name: figure for figure in run.results.figures}
    shown = {
        "name": run.name,
        "results": run.results,
        "tiles": _tiles(figures),
        "missing": run.missing,
        "film": run.film,
        "contexts": contexts_chart(run.results.figures, run.name, top),
        "trials": trials_chart(run.results.figures, run.name, top),
        "data": run.record and data_chart(run.record, run.results.figures, run.name),
        "attention": None,
        "config": json.dumps(run.results.config, indent=2),
    }
    attention, first_trial = run.attention, run.prompt_trajectories
    if attention is not None:
        last = attention.trajectory == attention.trajectory.max()
        shown |= {
            "attention": attention_chart(attention, first_trial, run.name),
            "course": attention_course(attention, first_trial, run.name),
            # Share [layers, heads] of the last trial's attention to anything before that trial, and the same
            # under uniform attention.
            "heads": attention.shares[:, :, last, :-1].sum(axis=-1).mean(axis=-1),
            "even_back": float(attention.even[last, :-1].sum(axis=-1).mean()),
        }
    return shown


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

    def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in config.items():
            flat |= (
                flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
            )
        return flat

    flat = [flattened(run.results.config) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    values = [(name, [json.dumps(settings.get(name)) for settings in flat]) for name in names]
    return [(name, row) for name, row in values if len(set(row)) > 1]


def main(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, cli.optional_flag(metavar="RUN ...")],
    output: Annotated[Path | None, cli.optional_flag(metavar="FILE")] = None,
) -> None:
    """Writes an HTML page about finished runs.

    Args:
      runs: Folders of the runs, such as runs/walker_run-demo-seed0.
      output: File of the page. Default: report.html in the run's folder, or in the current folder if there
        are several runs.
    """
    paths = [run.resolve() for run in runs]
    if not runs or len(set(paths)) < len(paths):
        raise ConfigError(f"the runs are {[*map(str, paths)]}; name the folder of one, and of each run once")
    # The name on the page is that of the folder, or the whole path if two share that name.
    unique = len({path.name for path in paths}) == len(paths)
    reported = []
    for directory, path in zip(runs, paths, strict=True):
        reported.append(read_run(directory, path.name if unique else str(path)))
        for reason in reported[-1].missing.values():
            say(f"{directory}: left out: {reason}")
    file = output or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    with replacing(file) as beside:
        beside.write_text(page(reported), encoding="utf-8")
    print(f"written to {file}")


if __name__ == "__main__":
    cli.run(main)
