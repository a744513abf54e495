"""Writes one self-contained HTML page about a run, or about several runs side by side.

    python evals/report.py runs/walker_run-demo-seed0
    python evals/report.py runs/walker_run-demo-seed0 runs/walker_run-demo-seed1 --output report.html

shows results beside the paper's figures, curves of trials and controls, training loss, training data,
attention over trials, images of the first and last trial, and provenance. The page needs no server, network
or script. A part that is not available is left out, and the page says why.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from agentic_ring.errors import ConfigError
from agentic_ring.files.atomic import replacing
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from evals.report_page.page import page
from evals.report_page.run_data import read_run


def run_names(runs: Sequence[Path]) -> list[str]:
    """The name of each run on the page: its folder's name, or the whole path if two share that name.

    Raises:
      ConfigError: a run is named twice.
    """
    paths = [str(run.resolve()) for run in runs]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"{path} was given {paths.count(path)} times; name each run once")
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else paths


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
    if not runs:
        raise ConfigError("no run was given; name the folder of one, such as runs/walker_run-demo-seed0")
    reported = []
    for directory, name in zip(runs, run_names(runs), strict=True):
        reported.append(read_run(directory, name))
        for reason in reported[-1].missing.values():
            say(f"{directory}: left out: {reason}")
    path = output or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    with replacing(path) as beside:
        beside.write_text(page(reported), encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    cli.run(main)
