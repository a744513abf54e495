"""What the experiment on trained context length reports: figures, verdict, rows and plots."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentic_ring.data.families.cue_chains import CueChainConfig, CueChains, measure_cue_scaling
from agentic_ring.data.families.exploration import ExplorationStore
from agentic_ring.data.families.leak_probe import probe_goals
from agentic_ring.data.families.ranked_trials import RankedTrials
from agentic_ring.results.intervals import Interval
from agentic_ring.results.results_file import Figure, Results, write_results
from agentic_ring.results.rows import write_rows
from evals.in_context.learning_curves import CONTROLS, EXACT_CONTROLS, mean_return, write_plots
from evals.in_context.returns_file import FILE_NAME, write_returns
from evals.in_context.verdict import CUES, ONLINE, ORACLE, Case, Returns, Verdict, block, in_words
from experiments.cue_runs.evaluation import RANDOM, TOLD

PROBED_CHAINS = 250
"""Number of chains from which the leak probe predicts goals."""


def all_figures(returns: Returns, verdict: Verdict) -> list[Figure]:
    """Every figure of ``results.json``: returns, controls, and what the verdict was found on."""

    def figure(name: str, quantity: np.ndarray) -> Figure:
        return Figure.from_interval(name, mean_return(quantity), "return")

    controls = [*CONTROLS, *(name for name in EXACT_CONTROLS if Case("n128", CUES, name) in returns)]
    return [
        *(
            figure(f"return/{case.condition}", found.mean(axis=-1))
            for case, found in returns.items()
            if case.condition in (RANDOM, TOLD)
        ),
        figure("return/oracle", returns[Case(ORACLE, CUES)].mean(axis=-1)),
        *(figure(f"control/{name}", returns[Case("n128", CUES, name)].mean(axis=-1)) for name in controls),
        *(
            figure(f"return/{_name(case)}/{part}16", block(returns, case, first))
            for case in returns
            if case.condition not in (*CONTROLS, *EXACT_CONTROLS) and case.arm != ORACLE
            for part, first in (("first", 0), ("last", -16))
        ),
        *(
            Figure.from_interval(f"difference/{name}/last16", found, "return")
            for name, found in differences(returns).items()
        ),
        *verdict.figures(),
    ]


def differences(returns: Returns) -> dict[str, Interval]:
    """Return of the last 16 trials less that of the plain arm in the same tasks, by the name of what differs.

    What differs is a setting of the training data, or the likeliest action in place of a sampled one.
    """
    found = {}
    for case in returns:
        plain = Case(case.arm.partition("_")[0], case.cues)
        comparable = case.condition in (ONLINE, "likeliest") and case.region == "seen"
        if comparable and case != plain and plain in returns:
            found[_name(case)] = mean_return(block(returns, case) - block(returns, plain))
    return found


def differences_table(returns: Returns) -> Table:
    """Table of ``differences`` for ``rich.print``."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("setting")
    table.add_column("return of the last 16 trials, less that of the plain arm")
    for name, found in differences(returns).items():
        table.add_row(name, in_words(found))
    return table


def _name(case: Case) -> str:
    """Such as n128, or n128/unseen or n128/cues4 where it is not the main case."""
    other = (
        f"cues{case.cues}" if case.cues != CUES else "",
        "" if case.condition == ONLINE else case.condition,
        "" if case.region == "seen" else case.region,
    )
    return "/".join((case.arm, *filter(None, other)))


def leak_figures(store: ExplorationStore, ranked: RankedTrials, config: CueChainConfig) -> list[Figure]:
    """How much of the goals' variance contexts tell without rewards, and with them.

    Args:
      store: explored trials.
      ranked: their ranking.
      config: the training chains; they are probed, and chains whose poor trials are all random and rightly
        paid.
    """
    scaling = measure_cue_scaling(store)
    random = replace(config, graded=0.0, decoys=0.0, misleading=0.0)
    probed = {"training_chains": config, "random_trials": random}
    figures = []
    for name, chains in probed.items():
        found = probe_goals(CueChains(store, ranked, chains, scaling, ring=1), PROBED_CHAINS)
        shares = {"without_rewards": found.without_rewards, "with_rewards": found.with_rewards}
        figures += [
            Figure(f"leak/{name}/{pay}", share, "R squared", n=found.contexts)
            for pay, share in shares.items()
        ]
    return figures


def trial_rows(returns: Returns) -> list[dict[str, Any]]:
    """A row for each case, training seed and trial: the mean return over the tasks."""
    return [
        {**case._asdict(), "seed": seed, "trial": trial + 1, "return": round(float(value), 4)}
        for case, found in returns.items()
        for (seed, trial), value in np.ndenumerate(found.mean(axis=1))
    ]


def write_report(
    directory: Path,
    family: str,
    config: dict[str, Any],
    seconds: dict[str, float],
    returns: Returns,
    verdict: Verdict,
    leaks: list[Figure],
) -> None:
    """Writes ``results.json``, ``trials.csv``, the returns and the plots."""
    figures = [*all_figures(returns, verdict), *leaks]
    write_results(directory / "results.json", Results.of_this_process(config, seconds, figures))
    write_rows(directory / "trials.csv", trial_rows(returns))
    write_returns(directory / FILE_NAME, returns)
    write_plots(directory, family, returns)
