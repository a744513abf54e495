from dataclasses import fields, replace
from functools import cache

import jax
import numpy as np
import pytest

from agentic_ring.data.hidden_tasks.cue_chains import CueChainConfig, measure_cue_scaling
from agentic_ring.data.hidden_tasks.cue_task import draw_cue_task
from agentic_ring.errors import ConfigError, DataError, UnknownNameError
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from experiments.hidden_tasks.rollouts import (
    STORED,
    RolloutConfig,
    TrainedModel,
    case_returns,
    kept_returns,
    stored_context,
)
from experiments.hidden_tasks.verdict import Case
from tests.data.hidden_tasks.exploration import explored

CONFIG = RolloutConfig(tasks=4, trials=4, measured=2, stored=2)
TRIALS = 40


@cache
def trained(shape: MeshShape) -> TrainedModel:
    store = explored("point_mass")
    family = store.family
    stack = TransformerConfig(width=16, layers=1, heads=2, ffn_width=16, remat="none")
    sizes = family.observation_dim, family.action_dim, family.decisions
    model = Model(AgenticTransformerConfig(stack, *sizes, paired_tokens=True, action_modes=3))
    params = jax.jit(model.init_params)(jax.random.key(0))
    chains = CueChainConfig("point_mass", trials=3)
    return TrainedModel(model, params, mesh_on_first_devices(shape), measure_cue_scaling(store), chains)


@cache
def returns(condition: str, shape: MeshShape = MeshShape()) -> np.ndarray:
    return case_returns(trained(shape), CONFIG, Case("n3", 2, condition), explored("point_mass"))


def test_conditions_differ_where_their_contexts_do():
    online = returns("online")
    assert online.shape == (4, 4)
    for other in ("likeliest", "no_rewards", "random"):
        assert np.abs(online - returns(other)).max() > 1e-3
    # A window is never longer than the chains that the model was trained on.
    np.testing.assert_array_equal(returns("window_32"), online)
    no_context = returns("no_context")
    np.testing.assert_array_equal(no_context[:, 0], online[:, 0])
    assert np.abs(no_context[:, 1:] - online[:, 1:]).max() > 1e-4
    np.testing.assert_array_equal(returns("nothing"), no_context[:, :2])
    right, zeroed = returns("right_pay"), returns("zeroed")
    assert right.shape == zeroed.shape == (4, 2)
    assert not np.array_equal(right, zeroed)


@pytest.mark.slow
def test_returns_do_not_depend_on_the_mesh():
    np.testing.assert_allclose(returns("online", MeshShape(data=2)), returns("online"), atol=1e-3)


@cache
def contexts():
    store = explored("point_mass")
    scaling = replace(measure_cue_scaling(store), reward_scale=2.0)
    tasks = [draw_cue_task(store.family, 2, seed) for seed in (5, 6, 7)]
    return tasks, {each: stored_context(store, tasks, TRIALS, each, scaling) for each in STORED}


def test_stored_contexts_differ_in_their_rewards_only():
    tasks, made = contexts()
    for field in fields(made["right_pay"]):
        same = {np.asarray(getattr(steps, field.name)).tobytes() for steps in made.values()}
        assert len(same) == (4 if field.name == "reward" else 1), field.name
    right, shuffled = (made[each].reward.reshape(3, TRIALS, 8) for each in ("right_pay", "shuffled"))
    assert not made["zeroed"].reward.any()
    assert (right.sum(axis=(1, 2)) > 0).all()
    for rows in zip(right.tolist(), shuffled.tolist(), strict=True):
        assert sorted(rows[0]) == sorted(rows[1])  # whole trials change places
    store = explored("point_mass")
    coins = stored_context(store, tasks, TRIALS, "right_pay", measure_cue_scaling(store), "coin").reward
    assert set(np.unique(coins)) == {0.0, 1.0}
    assert not coins.reshape(right.shape)[right == 0].any()

    # Rewards are those of the shown cue of the right or the next task.
    steps = made["right_pay"]
    scaling = measure_cue_scaling(store)
    starts = store.observations(np.arange(store.num_trials))[:, 0] - np.array(scaling.observation_mean[:4])
    starts = starts / np.array(scaling.observation_std[:4])
    for row, rewarding in enumerate(((0, 1), (1, 2), (2, 0))):
        for trial in (0, TRIALS - 1):
            seen = np.asarray(steps.observation)[row, trial * 8]
            number = np.abs(starts - seen[:4]).sum(axis=1).argmin()
            np.testing.assert_array_equal(steps.action[row, trial * 8 :][:8], store.actions[number])
            cue = int(np.flatnonzero((tasks[row].codes == seen[4:8]).all(axis=1))[0])
            for condition, task in zip(("right_pay", "another_task"), rewarding, strict=True):
                expected = store.rewards(np.array([number]), tasks[task].goals[[cue]])[0] / 2
                found = np.asarray(made[condition].reward)[row, trial * 8 : trial * 8 + 8]
                np.testing.assert_allclose(found, expected, atol=1e-6)


def test_bad_settings_are_named():
    store, model = explored("point_mass"), trained(MeshShape())
    with pytest.raises(UnknownNameError, match="offline"):
        case_returns(model, CONFIG, Case("n3", 2, "offline"), store)
    reacher = replace(model, chains=replace(model.chains, family="reacher"))
    with pytest.raises(ConfigError, match="reacher"):
        case_returns(reacher, CONFIG, Case("n3", 2), store)
    with pytest.raises(ConfigError, match="tasks is 0"):
        replace(CONFIG, tasks=0)
    for count, trials, named in ((2, 9999, "9999"), (1, 4, "4 trials of 1 tasks")):
        with pytest.raises(ConfigError, match=named):
            stored_context(store, contexts()[0][:count], trials, "another_task", model.scaling)


def test_returns_are_kept_and_impossible_ones_refused(tmp_path):
    path, found = tmp_path / "returns" / "online.npz", np.arange(16.0).reshape(4, 4)
    for again in (found, found + 1):
        np.testing.assert_array_equal(kept_returns(path, 4, lambda again=again: again), found)
    impossible = {"finite": np.full((4, 2), np.nan), r"\[3, 2\]": np.zeros((3, 2)), r"\[4\]": np.zeros(4)}
    for number, (named, found) in enumerate((impossible | {"float32": np.zeros((4, 2), np.float32)}).items()):
        with pytest.raises(DataError, match=named):
            kept_returns(tmp_path / f"{number}.npz", 4, lambda found=found: found)
