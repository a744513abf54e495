"""Returns of a tiny model in every condition, kept in files."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from agentic_ring.data.families.cue_chains import measure_cue_scaling
from agentic_ring.errors import ConfigError, DataError, UnknownNameError
from agentic_ring.inference.sampling import Sampling
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from evals.in_context.rollouts import Condition, CueRolloutConfig, TrainedArm, arm_returns, kept_returns
from tests.data.families.exploration import explored

CONFIG = CueRolloutConfig("point_mass", cues=2, tasks=4, trials=4, measured=2, stored=2)


@cache
def arm(shape: MeshShape = MeshShape()) -> TrainedArm:
    store = explored("point_mass")
    stack = TransformerConfig(width=16, layers=1, heads=2, ffn_width=16, remat="none")
    family = store.family
    model = Model(
        AgenticTransformerConfig(
            stack,
            family.observation_dim,
            family.action_dim,
            family.decisions,
            paired_tokens=True,
            action_modes=3,
        )
    )
    params = jax.jit(model.init_params)(jax.random.key(0))
    return TrainedArm(model, params, mesh_on_first_devices(shape), measure_cue_scaling(store), trials=3)


@cache
def returns(condition: Condition, shape: MeshShape = MeshShape()) -> np.ndarray:
    return arm_returns(arm(shape), CONFIG, condition, explored("point_mass"))


def test_conditions_differ_where_their_contexts_do():
    online = returns("online")
    assert online.shape == (4, 4)
    assert online.dtype == np.float64
    no_context = returns("no_context")
    np.testing.assert_array_equal(no_context[:, 0], online[:, 0])
    assert np.abs(no_context[:, 1:] - online[:, 1:]).max() > 1e-4
    np.testing.assert_array_equal(returns("nothing"), no_context[:, :2])


def test_stored_contexts_differ_by_their_pay():
    right, zeroed = returns("right_pay"), returns("zeroed")
    assert right.shape == zeroed.shape == (4, 2)
    assert not np.array_equal(right, zeroed)


def test_only_rewards_tell_how_good_a_trial_was_as_in_training():
    policy = arm().policy(arm().mesh, 4, 8, Sampling())
    policy.begin_trial()
    policy.act(np.zeros((4, explored("point_mass").family.observation_dim), np.float32))
    policy.receive(np.ones(4, np.float32), last=True)
    seen = policy.last_step
    assert not seen.return_to_go.any()
    assert not seen.completion.any()
    np.testing.assert_array_equal(seen.reward, 1.0)


@pytest.mark.slow
def test_other_actions_rewards_and_windows():
    online = returns("online")
    assert np.abs(online - returns("likeliest")).max() > 1e-3
    assert np.abs(online - returns("no_rewards")).max() > 1e-3
    # A window is never longer than the chains that the model was trained on.
    np.testing.assert_array_equal(returns("window_32"), online)


@pytest.mark.slow
def test_returns_do_not_depend_on_the_mesh():
    np.testing.assert_allclose(returns("online", MeshShape(data=2)), returns("online"), atol=1e-3)


def test_returns_are_kept(tmp_path):
    calls = []

    def roll_out() -> np.ndarray:
        calls.append(1)
        return np.arange(16.0).reshape(4, 4)

    path = tmp_path / "returns" / "online.npz"
    first = kept_returns(path, CONFIG, roll_out)
    np.testing.assert_array_equal(kept_returns(path, CONFIG, roll_out), first)
    assert len(calls) == 1
    with pytest.raises(
        DataError, match=r'online.npz is of .*"cues": 2.*expected .*"cues": 8.*delete the file'
    ):
        kept_returns(path, replace(CONFIG, cues=8), roll_out)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"online.npz: it is not a readable .*; delete the file"):
        kept_returns(path, CONFIG, roll_out)
    np.savez(path, returns=np.full((4, 4), np.nan), config=np.array(""))
    with pytest.raises(DataError, match=r"online.npz is of"):
        kept_returns(path, CONFIG, roll_out)


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (np.full((4, 2), np.nan), "returns that are not finite"),
        (np.zeros((3, 2)), r"float64 \[3, 2\]; expected float64 \[4, trials\]"),
        (np.zeros((4, 2), np.float32), r"float32 \[4, 2\]; expected float64"),
    ],
    ids=["nan", "tasks", "dtype"],
)
def test_files_with_impossible_returns_are_refused(tmp_path, returned, error):
    path = tmp_path / "online.npz"
    kept_returns(path, CONFIG, lambda: returned)
    with pytest.raises(DataError, match=error):
        kept_returns(path, CONFIG, lambda: returned)


def test_bad_settings_are_refused():
    store = explored("point_mass")
    with pytest.raises(UnknownNameError, match="unknown condition 'offline'"):
        arm_returns(arm(), CONFIG, "offline", store)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="holds trials of point_mass, but chains of reacher"):
        arm_returns(arm(), replace(CONFIG, family="reacher"), "online", store)
    with pytest.raises(ConfigError, match="tasks is 0"):
        replace(CONFIG, tasks=0)
