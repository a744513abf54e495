from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from agentic_ring.data.hidden_tasks import ranked_trials
from agentic_ring.data.hidden_tasks.bodies import family_named
from agentic_ring.data.hidden_tasks.cue_task import CueTask, draw_cue_task
from agentic_ring.data.hidden_tasks.environments import CueEnvironments
from agentic_ring.data.hidden_tasks.exploration import ExplorationStore, ExploredTrials, write_exploration
from agentic_ring.data.hidden_tasks.ranked_trials import BANDS, RankingConfig, rank_trials
from agentic_ring.errors import AgenticRingError, DataError
from data_prep.explore import ExploreConfig, draw_actions, explore, explore_parts
from tests.data.hidden_tasks.exploration import explored, ranked


@pytest.mark.parametrize(
    ("name", "kind"), [("reacher", "dense"), ("point_mass", "sparse"), ("point_mass-16", "dense")]
)
def test_relabelled_rewards_equal_those_of_the_environments(name, kind, monkeypatch):
    store, family = explored(name, 100), family_named(name)
    # Goals that the trials come near, where the reward changes with the state.
    trials, random = np.arange(16), np.random.default_rng(0)
    goals = family.outcomes(store.physics[trials])[:, 12] + random.uniform(-0.02, 0.02, (16, 2))
    codes = draw_cue_task(family, 1, 0).codes
    tasks = [CueTask(family, codes, goal[None], 0) for goal in goals]
    starts = iter(store.physics[trials, 0])
    monkeypatch.setattr(CueTask, "start", lambda task, trial: next(starts))
    environments = CueEnvironments(tasks, kind)
    first, _ = environments.reset()
    steps = [environments.step(actions) for actions in store.actions[trials].swapaxes(0, 1)]
    relabelled = store.rewards(trials, goals, kind)
    np.testing.assert_array_equal(relabelled, np.stack([step[1] for step in steps], 1))
    assert 0 < relabelled.mean() < 1
    bodies = np.stack([first, *(step[0] for step in steps)], 1)[..., : family.body_dim]
    np.testing.assert_array_equal(store.observations(trials), bodies[:, :-1])
    np.testing.assert_array_equal(family.observe(store.physics[trials, -1]), bodies[:, -1])


def test_actions_are_held_and_idle_as_often_as_declared():
    family = family_named("point_mass")
    actions = draw_actions(family, np.random.default_rng(0), 5000)
    held = (actions[:, 1:] == actions[:, :-1]).all(-1).mean()
    both_idle = family.noise.redraw * family.noise.idle**2  # a redrawn action may be 0 again
    assert abs(held - (1 - family.noise.redraw) - both_idle) < 0.01
    assert abs((actions == 0).all(-1).mean() - family.noise.idle) < 0.01
    assert np.abs(actions).max() == 1


def test_trials_of_more_decisions_last_as_long_and_hold_their_actions_longer():
    family, long = family_named("reacher"), family_named("reacher-24")
    assert long.decisions * long.physics_steps == 8 * family.substeps * family.physics_steps
    ours, theirs = (draw_actions(each, np.random.default_rng(0), 50) for each in (long, family))
    np.testing.assert_array_equal(ours, theirs.repeat(3, axis=1))
    # The second on another number of threads, the third by another seed.
    runs = (long, 20, 3, 1), (family, 20, 3, 2), (family, 20, 4, 1)
    longer, parts, other = (next(explore_parts(*run)) for run in runs)
    np.testing.assert_array_equal(longer.physics, parts.physics)
    assert (parts.physics != other.physics).any()


def test_a_ranking_holds_the_best_of_each_start_cell_and_graded_trials_of_each_band():
    store, ranking = explored("point_mass"), ranked("point_mass")
    family = store.family
    cells = family.start_cell(store.physics[:, 0])
    assert not np.isin(family.region(ranking.goals), family.held_out).any()
    trials = np.arange(store.num_trials)
    for goal, demonstrations, graded in zip(*(field[:5] for field in vars(ranking).values()), strict=True):
        returns = store.rewards(trials, np.broadcast_to(goal, (len(trials), 2))).sum(axis=1)
        for cell, best in enumerate(demonstrations):
            assert (cells[best] == cell).all()
            expected = np.sort(returns[cells == cell])[::-1][: len(best)]
            np.testing.assert_allclose(returns[best], expected, atol=1e-5)
        for low, high, band in zip(BANDS, BANDS[1:], graded, strict=False):
            assert (returns[band] > low - 1e-4).all()
            assert (returns[band] < high + 1e-4).all()


def test_a_ranking_is_computed_once_for_a_store_and_its_settings(tmp_path: Path, capsys, monkeypatch):
    with ExplorationStore.open(explore(ExploreConfig("point_mass", 2000, data=tmp_path))) as store:
        config = RankingConfig(goals=3, demonstrations=2)
        first = rank_trials(store, config)
        assert "ranking trials" in capsys.readouterr().err
        np.testing.assert_equal(vars(rank_trials(store, config)), vars(first))
        assert "ranking trials" not in capsys.readouterr().err
        rank_trials(store, RankingConfig(goals=3, demonstrations=2, seed=1))
        assert len(list(store.path.parent.glob("*ranked*"))) == 2
        monkeypatch.setattr(ranked_trials, "BANDS", (9, 10))  # more than 8 decisions pay
        with pytest.raises(DataError, match="no trial earns a return of 9 to 10 for the goal"):
            rank_trials(store, config)


def test_stores_that_cannot_serve_are_refused(tmp_path: Path):
    with pytest.raises(AgenticRingError, match=r"absent\.h5"):
        ExplorationStore.open(tmp_path / "absent.h5")
    with (
        ExplorationStore.open(explore(ExploreConfig("point_mass", 60, data=tmp_path))) as small,
        pytest.raises(AgenticRingError, match="60 trials"),
    ):
        rank_trials(small)
    # The file says point_mass, its states are of another size.
    stranger = SimpleNamespace(name="point_mass", decisions=8, substeps=3, physics_dim=6, action_dim=2)
    part = ExploredTrials(np.zeros((2, 25, 6), np.float32), np.zeros((2, 8, 2), np.float32))
    write_exploration(tmp_path / "s.h5", stranger, 2, 0, [part])  # pyright: ignore[reportArgumentType]
    with pytest.raises(AgenticRingError, match=r"physics have shape \(2, 25, 6\)"):
        ExplorationStore.open(tmp_path / "s.h5")
    for settings in ({"family": "ant"}, {"trials": 0}, {"seed": -1}):
        with pytest.raises(AgenticRingError):
            ExploreConfig(**{"family": "point_mass"} | settings)
