"""The experiment on trained context length, from flags to files, with models that train in seconds."""

import subprocess
from dataclasses import replace

import numpy as np
import pytest

from agentic_ring.data.hidden_tasks.cue_chains import CueChains, measure_cue_scaling
from agentic_ring.data.hidden_tasks.exploration import ExplorationStore
from agentic_ring.data.hidden_tasks.ranked_trials import RankingConfig, rank_trials
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.files.run_folder import write_config
from agentic_ring.results.results_file import read_results
from agentic_ring.results.rows import read_rows
from experiments import in_context
from experiments.hidden_tasks.rollouts import RolloutConfig
from experiments.hidden_tasks.variants import N128, ORACLE, PRESETS, VariantCell, resolve_variant
from tests.experiments.conftest import TINY

SMALL = replace(
    PRESETS["demo"],
    transformer=TINY["transformer"],
    tokens=2048,
    tokens_per_update=256,
    checkpoint_every=2,
    explored=2000,
    ranking=RankingConfig(goals=20, demonstrations=2),
    rollouts=RolloutConfig(tasks=2, trials=16, measured=2),
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    with ExplorationStore.open(in_context.prepare_exploration(SMALL, "point_mass", data)) as opened:
        yield opened


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_all_variants_train_on_equally_many_tokens(preset, store):
    ranked, scaling = rank_trials(store, SMALL.ranking), measure_cue_scaling(store)
    seeds = set()
    for variant in preset.variants:
        for seed in range(2):
            config = resolve_variant(preset, variant, store, seed, scaling, "coin")
            first, last = (stage.chains for stage in config.stages)
            updates = [(stage.training, stage.chains.trials) for stage in config.stages]
            tokens = [each.steps * each.batch_size * trials * 8 * 2 for each, trials in updates]
            assert sum(tokens) == pytest.approx(preset.tokens, rel=0.01)
            assert tokens[0] == pytest.approx(0.3 * preset.tokens, rel=0.02)
            assert (first.trials, last.trials) == (variant.first_trials or variant.trials, variant.trials)
            assert (first.graded, last.graded) == (0, 0.5)
            for chains in (first, last):
                assert (chains.reward_kind, chains.shows_goal) == ("coin", variant.name == "oracle")
                CueChains(store, ranked, chains, scaling, ring=1)
            seeds |= {first.seed, last.seed}
    assert len(seeds) == 4  # the same chains for all variants, others for each seed and stage


@pytest.mark.slow
def test_it_writes_figures_rows_and_plots_and_goes_on_where_it_stopped(
    store, cells_run, tmp_path, capsys, monkeypatch
):
    variants = replace(N128, trials=4, first_trials=2), ORACLE
    monkeypatch.setitem(PRESETS, "demo", replace(SMALL, variants=variants))
    data, run = store.path.parents[1], tmp_path / "run"
    in_context.main(data=data, output=run)
    assert [cell.variant for cell in cells_run] == ["n128", "oracle"]
    assert "verdict: NOT shown" in capsys.readouterr().out
    results = read_results(run / "results.json")
    last = ("n128", "n128/unseen", "n128/cues4", "n128/likeliest")
    for name in (
        *(f"return/{name}/last16" for name in last),
        *("return/random", "return/oracle", "return/n128/window_32/first16"),
        *(f"control/{name}" for name in ("right_pay", "another_task", "zeroed", "shuffled", "nothing")),
    ):
        figure = results.figure(name)
        assert figure.low is not None
        assert 0 <= figure.low <= figure.value
        assert figure.n == 2  # tasks
    rows = read_rows(run / "trials.csv")
    assert {row["variant"] for row in rows} == {"n128", "oracle"}
    last = [float(row["last"]) for row in read_rows(run / "tasks.csv") if row["condition"] == "zeroed"]
    assert np.mean(last) == pytest.approx(results.figure("control/zeroed").value, abs=1e-4)
    for plot in ("learning_curves", "by_cues", "controls"):
        assert (run / f"{plot}.png").read_bytes().startswith(b"\x89PNG")

    # A cell that lost results and returns is computed by its command, from its checkpoint; the others stay.
    cell = VariantCell("oracle", 0)
    lost = cell.folder(run) / "returns" / "cues16-online-seen.npz"
    lost.unlink()
    (cell.folder(run) / "results.json").unlink()
    subprocess.run(cell.command(run), check=True)
    in_context.main(data=data, output=run)
    assert len(cells_run) == 2
    assert read_results(run / "results.json").figures == results.figures

    lost.unlink()
    with pytest.raises(DataError, match="cues16-online-seen"):
        in_context.main(data=data, output=run)
    with pytest.raises(ConfigError, match="family, store"):
        write_config(run, in_context.ExperimentConfig("reacher", "demo", "dense", "reacher.h5"))
        in_context.main(data=data, output=run)


def test_bad_settings_are_refused_before_anything_is_trained(store, tmp_path):
    preset = replace(SMALL, variants=(replace(N128, trials=SMALL.explored + 1),))
    with pytest.raises(ConfigError, match="2001 trials"):
        in_context.prepare_cells(preset, 1, store.path, tmp_path)
    for flags in ({"workers": 0}, {"seeds": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            in_context.main(output=tmp_path, **flags)
    assert not list(tmp_path.iterdir())
