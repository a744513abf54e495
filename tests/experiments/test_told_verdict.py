"""The verdict on told tasks, from the results of finished runs and evaluations to what is claimed."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.results import intervals
from agentic_ring.results.results_file import Figure, Results, read_results, write_results
from experiments import told_verdict
from experiments.common.cells import RESULTS_FILE
from experiments.exorl.told_presets import GOAL_PRESETS
from experiments.told_verdict import VerdictCell, VerdictConfig

RANDOM, BEST = 30.0, 230.0
UNSEEN_RANKS = {"n0": 0.5, "n128": 0.7, "own_trials/trial_1": 0.5, "own_trials/trial_4": 0.65}
SCORES = {
    "return/n0": 0.4,
    "return/n128": 0.8,
    "control/zeroed": 0.42,
    "control/shuffled": 0.3,
    "control/another_task": 0.1,
    "own_trials/trial_1": 0.4,
    "own_trials/trial_4": 0.6,
}


def finish(output, seeds=3, **changes: float) -> None:
    """Leaves results of runs and evaluations; ``changes`` are added to scores by part of their name."""
    config, random = VerdictConfig("walker", "demo", seeds, 0, None), np.random.default_rng(0)
    ends = Figure("return/random_policy", RANDOM, "return"), Figure("return/data_p95", BEST, "return")
    for seed in range(seeds):
        for task in (None, *DOMAINS["walker"].tasks):
            figures = [Figure("tokens_per_second", 7.0, "tokens/s"), *ends]
            for name, score in SCORES.items():
                shift = sum(change for part, change in changes.items() if part in name)
                score += shift + 0.01 * random.standard_normal()
                figures.append(Figure(name, RANDOM + score * (BEST - RANDOM), "return"))
            leave(VerdictCell(config, seed, task), output, figures)
        ranks = {
            name: rank + changes.get(f"rank/{name}", 0) + 0.02 * random.standard_normal(6)
            for name, rank in UNSEEN_RANKS.items()
        }
        figures = unseen_figures({f"rank/{name}": each for name, each in ranks.items()}, "rank")
        leave(VerdictCell(config, seed, "unseen"), output, figures)


def leave(cell: VerdictCell, output, figures) -> None:
    cell.folder(output).mkdir(parents=True)
    write_results(cell.folder(output) / RESULTS_FILE, Results.of_this_process({}, {}, figures))


def unseen_figures(values, unit) -> list[Figure]:
    return [
        Figure(f"{name}/reward_{i:02d}", value, unit)
        for name, each in values.items()
        for i, value in enumerate(each)
    ]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"n128": -0.1}, ["mean with 128"]),
        ({"n0": 0.35}, ["stand:", "walk:", "run:", "flip:", "mean with none"]),
        ({"zeroed": 0.1}, ["128, rewards zeroed"]),
        ({"another": 0.4}, ["no context minus another"]),
        ({"trial_4": -0.2}, ["own trials"]),
        ({"rank/n128": -0.12}, ["unseen reward functions, rank: 128"]),
        ({"rank/own_trials/trial_4": -0.15}, ["unseen reward functions, rank: own"]),
        ({"seeds": 2}, ["training seeds"]),
    ],
)
def test_what_is_found_is_compared_with_the_targets(changes, missed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 1000)
    seeds = changes.get("seeds", 3)
    finish(tmp_path, **changes)
    told_verdict.main(seeds=seeds, output=tmp_path)
    results, printed = read_results(tmp_path / RESULTS_FILE), capsys.readouterr().out
    assert results.figure("target/all_met").value == (not missed)
    assert ("verdict: NOT shown" in printed) == bool(missed)
    names = [f.name for f in results.figures if f.name.endswith("/met") and f.value == 0]
    assert len(names) == len(missed)
    for part in missed:
        assert any(f"target/{part}" in name for name in names)
    shown = results.figure("target/run: 128 trajectories minus none")
    expected = 0.4 + changes.get("n128", 0) - changes.get("n0", 0)
    assert shown.value == pytest.approx(expected, abs=0.03)


GOAL_SCORES = {
    "n0": 0.05,
    "n4": 0.2,
    "n32": 0.5,
    "n128": 0.7,
    "zeroed": 0.02,
    "another": 0.02,
    "own_trials/trial_1": 0.05,
    "own_trials/trial_8": 0.3,
    "oracle": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"n32": 0.18}, ["128 trajectories minus 32"]),
        ({"n4": 0.28}, ["32 trajectories minus 4"]),
        ({"n128": -0.12}, ["mean with 128"]),
        ({"zeroed": 0.05}, ["128, rewards zeroed"]),
        ({"another": 0.1}, ["128, another goal"]),
    ],
)
def test_goals_are_compared_with_an_oracle(changes, missed, tmp_path, monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 1000)
    config, random = VerdictConfig("point_mass_maze", "demo", 3, 0, None), np.random.default_rng(0)
    arms = product(range(3), (None, "unseen"), (False, True))
    for cell in (VerdictCell(config, *each) for each in arms):
        returns = {}
        for name, score in GOAL_SCORES.items():
            score += sum(change for part, change in changes.items() if part in name)
            returns[name] = 800 * (score + 0.02 * random.standard_normal(6))
        met = unseen_figures({"met/n32": [0.6]}, "share of contexts")
        leave(cell, tmp_path, met + unseen_figures(returns, "return"))
    told_verdict.main("point_mass_maze", output=tmp_path)
    results = read_results(tmp_path / RESULTS_FILE)
    assert results.figure("target/all_met").value == (not missed)
    names = [f.name for f in results.figures if f.name.endswith("/met") and f.value == 0]
    assert len(names) == len(missed)
    assert all(f"target/{part}" in name for part, name in zip(missed, names, strict=True))
    found = GOAL_SCORES["n128"] + changes.get("n128", 0)
    assert results.figure("target/mean with 128").value == pytest.approx(found, abs=0.02)
    over = results.figure("target/128 trajectories minus 32 of a model of at most 32 (reported)")
    assert over.value == pytest.approx(found - GOAL_SCORES["n32"] - changes.get("n32", 0), abs=0.03)


def test_a_cell_trains_or_evaluates_what_was_trained(tmp_path):
    config = VerdictConfig("walker", "demo", 3, 0, 20)
    train, evaluate = (VerdictCell(config, 2, task).command(tmp_path)[1:] for task in (None, "flip"))
    assert train[0].endswith("experiments/exorl_at_ring.py")
    assert " ".join(train[1:]).startswith("--task walker_stand --preset demo --seed 2 --updates 20")
    assert evaluate[0].endswith("evals/dmc_returns.py")
    flags = f"--run {tmp_path}/seed2 --task walker_flip --first-seed 90000 --output {tmp_path}/seed2-flip"
    assert " ".join(evaluate[1:]) == flags
    config = replace(config, domain="point_mass_maze", updates=None)
    maze = VerdictCell(config, 2, "unseen").command(tmp_path)[1:]
    assert maze[0].endswith("evals/unseen_returns.py")
    flags = f"--run {tmp_path}/seed2 --first-seed 90000 --output {tmp_path}/seed2-unseen"
    assert " ".join(maze[1:]) == flags


def test_a_model_of_fewer_trajectories_trains_on_as_many_tokens(tmp_path):
    config = VerdictConfig("point_mass_maze", "demo", 3, 2, 160)
    train, evaluate = (
        " ".join(VerdictCell(config, 2, task, fewer=True).command(tmp_path)) for task in (None, "unseen")
    )
    chains = GOAL_PRESETS["demo"].chains
    updates = 160 * (chains.decisions + 128) // (chains.decisions + 32)
    run = f"{tmp_path}/seed2-at_most_32"
    assert f"--num-trajectories 32 --updates {updates} --output {run}" in train
    assert f"--run {run} --contexts 0 32 128 --first-seed 92000" in evaluate
