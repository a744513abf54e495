"""The experiment on trained context length, from flags to files, with models that train in seconds."""

import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from agentic_ring.data.families import family_named
from agentic_ring.data.families.cue_chains import CueChains, measure_cue_scaling
from agentic_ring.data.families.exploration import ExplorationStore
from agentic_ring.data.families.ranked_trials import RankingConfig, rank_trials
from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import write_config
from agentic_ring.results.results_file import read_results
from agentic_ring.results.rows import read_rows
from agentic_ring.training.metrics_log import read_metrics
from data_prep.explore import ExploreConfig, explore
from evals.in_context.verdict import Case
from evals.report_page.page import page
from evals.report_page.run_data import read_run
from experiments import in_context
from experiments.cue_runs.arms import arm_mesh, resolve_arm, train_arm
from experiments.cue_runs.cells import CueCell, prepare_cell, run_cell
from experiments.cue_runs.evaluation import arm_cases
from experiments.cue_runs.presets import CUE_PRESETS, N4, N32, N128, ORACLE, CuePreset, Stage
from experiments.cue_runs.report import differences, leak_figures
from tests.evals.report_page.test_report import Page
from tests.experiments.conftest import TINY

DEMO = CUE_PRESETS["demo"]
SMALL = replace(
    DEMO,
    transformer=TINY["transformer"],
    tokens=2048,
    tokens_per_update=256,
    checkpoint_every=2,
    explored=2000,
    ranking=RankingConfig(goals=20, leaders=2),
    tasks=2,
    trials=16,
    measured=2,
)
"""The demo with chains, models and rollouts for tests."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    explore(ExploreConfig("point_mass", trials=SMALL.explored, data=folder))
    return folder


@pytest.fixture(scope="module")
def store(data):
    with ExplorationStore.open(in_context.prepare_exploration(SMALL, "point_mass", data)) as opened:
        yield opened


def resolved(preset: CuePreset, arm, store, seed: int = 0):
    return resolve_arm(preset, arm, store, seed, measure_cue_scaling(store))


@pytest.fixture
def tiny(monkeypatch):
    """Arms and cells in this process: others would not see the small preset."""
    arms = (
        replace(N128, trials=8, earlier=(Stage(4, 0.3),)),
        replace(N32, trials=4),
        replace(N4, trials=2),
        ORACLE,
    )
    monkeypatch.setitem(CUE_PRESETS, "demo", replace(SMALL, arms=arms))
    ran = []

    def run_here(cells, output, workers, environment):
        for cell in cells:
            if not (cell.folder(output) / "results.json").exists():
                run_cell(cell, output)
                ran.append(cell.arm)
            yield cell

    monkeypatch.setattr("experiments.common.cells.run_cells", run_here)
    return ran


@pytest.mark.parametrize("preset", CUE_PRESETS.values(), ids=lambda preset: preset.name)
def test_all_arms_train_on_equally_many_tokens(preset, data):
    name = replace(family_named("point_mass"), decisions=preset.decisions).name
    with ExplorationStore.open(in_context.prepare_exploration(SMALL, name, data)) as store:
        ranked = rank_trials(store, SMALL.ranking)
        for arm in preset.arms:
            config = resolved(preset, arm, store)
            assert config.model == preset.model(store.family)
            tokens = [
                stage.training.steps
                * stage.training.batch_size
                * stage.chains.trials
                * (store.family.decisions // stage.chains.action_repeat)
                * config.model.tokens_per_step
                for stage in config.stages
            ]
            assert sum(tokens) == pytest.approx(preset.tokens, rel=0.01)
            lengths = [stage.chains.trials for stage in config.stages]
            assert lengths == [*([stage.trials for stage in arm.earlier] or [arm.trials]), arm.trials]
            assert config.chains.action_repeat == 1
            assert [stage.chains.cues for stage in config.stages] == [
                stage.cues or arm.cues for stage in arm.stages()
            ]
            assert [stage.chains.graded == 0 for stage in config.stages][:2] == [True, arm.graded == 0]
            for stage in config.stages:
                CueChains(store, ranked, stage.chains, config.scaling, preset.ring)


def test_seeds_and_stages_have_chains_of_their_own(store):
    assert resolved(DEMO, ORACLE, store).chains.told
    seeds = {stage.chains.seed for seed in range(2) for stage in resolved(DEMO, N4, store, seed).stages}
    assert len(seeds) == 4


def test_ablations_differ_from_the_plain_arm_in_one_setting(store):
    preset = CUE_PRESETS["ablations"]
    plain = asdict(resolved(preset, N128, store).chains)
    changed = {}
    for arm in preset.arms:
        chains = asdict(resolved(preset, arm, store).chains)
        changed[arm.name] = {name for name, value in chains.items() if value != plain[name]}
    assert changed == {
        "n128": set(),
        "n128_without_graded": {"graded"},
        "n128_unweighted": {"first_leader_weight"},
        "n128_without_decoys": {"decoys"},
        "n128_all_trials": {"loss"},
        "oracle": {"trials", "told"},
    }


def test_differences_are_paired_by_task():
    tasks = np.arange(8.0)[None, :, None] * np.ones((1, 8, 16))
    returns = {Case("n128", 16): tasks, Case("n128_unweighted", 16): tasks - 0.5}
    returns |= {Case("n128", 16, "likeliest"): tasks + 1, Case("oracle", 16): tasks}
    found = differences(returns)
    assert {name: (each.low, each.value, each.high) for name, each in found.items()} == {
        "n128_unweighted": (-0.5, -0.5, -0.5),
        "n128/likeliest": (1, 1, 1),
    }


def test_random_trials_are_probed_with_their_right_pay(store):
    ranked, chains = rank_trials(store, SMALL.ranking), resolved(SMALL, N4, store).chains

    def probed(misleading: float) -> dict[str, float]:
        found = leak_figures(store, ranked, replace(chains, misleading=misleading))
        return {figure.name: figure.value for figure in found}

    plain, misled = probed(0.0), probed(1.0)
    for pay in ("with_rewards", "without_rewards"):
        assert plain[f"leak/random_trials/{pay}"] == misled[f"leak/random_trials/{pay}"]
    assert plain["leak/training_chains/with_rewards"] > misled["leak/training_chains/with_rewards"]


def test_chains_of_the_long_preset_have_64k_tokens_after_a_curriculum():
    preset = CUE_PRESETS["long"]
    family = replace(family_named("point_mass"), decisions=preset.decisions)
    longest = preset.arm("n128")
    assert 128 * preset.decisions * preset.model(family).tokens_per_step == 65_536
    assert [stage.trials for stage in longest.stages()] == [32, 128, 128, 128]
    assert [stage.action_repeat for stage in longest.stages()] == [32, 32, 8, 1]
    assert sum(stage.share for stage in longest.stages()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "pay", "planned"),
    [
        ("point_mass", "dense", {"told", "thompson"}),
        ("point_mass", "coin", {"told"}),
        ("point_mass-16", "dense", set()),
        ("reacher", "dense", {"told", "thompson"}),
    ],
)
def test_references_are_left_out_where_they_are_not_exact(name, pay, planned, store, capsys):
    conditions = set()
    for arm in (N128, ORACLE):
        config = resolve_arm(SMALL, arm, store, 0, measure_cue_scaling(store), pay)
        assert config.chains.pay == config.evaluation.pay == pay
        conditions |= {case.condition for case in arm_cases(replace(config, family=name))}
    assert conditions & {"told", "thompson"} == planned
    assert (" is rolled out without " in capsys.readouterr().err) == (len(planned) < 2)


@pytest.mark.slow
def test_a_ring_of_8_gives_the_losses_of_one_device(store, tmp_path):
    losses = []
    for ring in (1, 8):
        preset = replace(SMALL, ring=ring)
        config = resolved(preset, replace(N128, trials=8, earlier=(Stage(4, 0.3),)), store)
        write_config(tmp_path / str(ring), config)
        train_arm(config, arm_mesh(preset), tmp_path / str(ring))
        losses.append(
            [
                row["loss"]
                for stage in (1, 2)
                for row in read_metrics(tmp_path / str(ring) / f"stage{stage}" / "metrics.jsonl")
            ]
        )
    assert len(losses[0]) == len(losses[1]) > 1
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


@pytest.mark.slow
def test_a_process_of_a_cell_has_the_devices_of_its_ring(store, tmp_path):
    cell = CueCell("oracle", 0)
    prepare_cell(cell, resolved(replace(SMALL, ring=2), ORACLE, store), tmp_path)
    subprocess.run(cell.command(tmp_path), check=True)
    assert read_results(cell.folder(tmp_path) / "results.json").hardware["devices"] == 2


def assert_reported(run: Path) -> None:
    """The page of the run has curves, the verdict, attention and film, and names what is lost."""
    reported = read_run(run, "tiny")
    parsed = Page(page([reported]))
    parsed.assert_loads_nothing()
    assert reported.missing == {}
    charts = [attrs["aria-label"] for tag, attrs in parsed.elements if tag == "svg"]
    assert len(charts) == 6  # returns, by cues, regret, controls, loss, attention
    assert "uniform attention: same cue, paid well" in charts[-1]
    assert sum(tag == "img" for tag, _ in parsed.elements) == 18
    for words in ("Verdict: NOT shown", "unseen over seen regions", "leak/random_trials/with_rewards"):
        assert words in parsed.words
    for arm in ("n128", "n32", "n4", "oracle"):
        assert len(reported.metrics[arm]) > 1
    (run / "arms" / "n128-seed0" / "recorded_trials.npz").unlink()
    without = read_run(run, "tiny")
    assert without.cues is not None
    assert without.cues.recorded is None
    assert Page(page([without])).words.count("delete results.json beside it") == 2


@pytest.mark.slow
def test_it_writes_figures_rows_and_plots_and_goes_on_where_it_stopped(data, tiny, tmp_path, capsys):
    run = tmp_path / "run"
    in_context.main(data=data, output=run)
    assert tiny == ["n128", "n32", "n4", "oracle"]
    printed = capsys.readouterr().out
    assert "verdict: NOT shown" in printed
    results = read_results(run / "results.json")
    for name in (
        *(f"return/{arm}/last16" for arm in ("n128", "n32", "n4")),
        *("return/random", "return/oracle", "return/n128/unseen/last16", "return/n32/cues4/last16"),
        *(
            f"control/{exact}{name}"
            for exact in ("", "thompson_")
            for name in ("right_pay", "another_task", "zeroed", "shuffled", "nothing")
        ),
    ):
        figure = results.figure(name)
        assert figure.low is not None
        assert 0 <= figure.low <= figure.value
        assert figure.n == SMALL.tasks
    assert results.figure("difference/n128/likeliest/last16").low is not None
    rows = read_rows(run / "trials.csv")
    assert {row["arm"] for row in rows} == {"n128", "n32", "n4", "oracle"}
    for name in ("without_rewards", "with_rewards"):
        assert results.figure(f"leak/random_trials/{name}").value <= 1
        assert results.figure(f"leak/training_chains/{name}").value <= 1
    for plot in ("learning_curves", "by_cues", "regret", "controls"):
        assert (run / f"{plot}.png").read_bytes().startswith(b"\x89PNG")

    assert_reported(run)

    tiny.clear()
    lost = run / "arms" / "n32-seed0" / "results.json"
    lost.unlink()
    in_context.main(data=data, output=run)
    assert tiny == ["n32"]
    assert read_results(run / "results.json").figures == results.figures

    with pytest.raises(ConfigError, match=r"other settings \(family, store\)"):
        write_config(run, in_context.ExperimentConfig("reacher", "demo", "dense", "reacher.h5"))
        in_context.main(data=data, output=run)


def test_chains_longer_than_the_data_are_refused_before_anything_is_trained(data, tmp_path):
    preset = replace(SMALL, arms=(replace(N128, trials=SMALL.explored + 1),))
    path = in_context.prepare_exploration(SMALL, "point_mass", data)
    with pytest.raises(ConfigError, match="a chain has 2001 trials"):
        in_context.prepare_cells(preset, 1, path, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [{"workers": 0}, {"seeds": 0}])
def test_numbers_below_1_are_refused(flags, tmp_path):
    with pytest.raises(ConfigError, match="must be at least 1"):
        in_context.main(output=tmp_path, **flags)
