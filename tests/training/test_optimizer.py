"""The learning-rate schedule, for runs of any length, and what an update of Muon changes."""

from functools import cache

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from agentic_ring.models.model import Model
from agentic_ring.training.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from agentic_ring.training.train_step import abstract_state
from tests.models.tiny_agentic_transformer import tiny_config


@given(
    steps=st.integers(1, 500),
    warmup=st.integers(0, 1000),
    final=st.floats(0.0, 0.9),
    peak=st.floats(1e-6, 1.0),
)
def test_any_number_of_updates_warms_up_peaks_and_decays(steps, warmup, final, peak):
    config = OptimizerConfig(peak, warmup_steps=warmup, final_fraction=final)
    # All in arrays of one length: JAX compiles anew for each.
    measured = np.asarray(learning_rate_schedule(config, steps)(np.arange(500)))[:steps]
    top = measured.argmax()
    assert measured[0] > 0
    np.testing.assert_allclose(measured[top], peak, rtol=1e-5)
    assert (np.diff(measured[: top + 1]) > 0).all()
    assert top <= min(warmup, steps / 8)
    assert (np.diff(measured[top:]) <= 0).all()
    if steps > 1:
        np.testing.assert_allclose(measured[-1], final * peak, rtol=1e-4, atol=1e-6 * peak)


ONE = MeshShape(ring=1)
MUON = OptimizerConfig(weight_decay=0.0, warmup_steps=0, muon_learning_rate=0.02)


@cache
def muon_change(shape: MeshShape, devices: int = 8) -> dict[str, np.ndarray]:
    """What one update of Muon with random gradients of -1 and 1 adds to each parameter, by its path."""
    mesh, optimizer = make_mesh(shape, jax.devices()[:devices]), make_optimizer(MUON, steps=10)
    params = abstract_state(Model(tiny_config(projection_bias=True)), optimizer, mesh, ShardingRules()).params
    random, signs = np.random.default_rng(0), np.array([-1, 1], np.float32)
    gradients = jax.tree.map(lambda x: jax.device_put(random.choice(signs, x.shape), x.sharding), params)
    with jax.set_mesh(mesh):  # without decay weights do not matter
        update = jax.jit(
            lambda gradients: optimizer.update(gradients, optimizer.init(gradients), gradients)[0]
        )
        change = update(gradients)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(change)}


def test_muon_moves_every_matrix_of_every_layer_about_equally_in_all_directions():
    change = muon_change(ONE, devices=1)
    blocks = {p: x for p, x in change.items() if "blocks" in p and x.ndim > 2 and "bias" not in p}
    assert len(blocks) == 7
    for path, x in blocks.items():
        layers = x.reshape(2, -1, x.shape[-1]) if "output" in path else x.reshape(2, x.shape[1], -1)
        stretch = max(1.0, layers.shape[2] / layers.shape[1]) ** 0.5
        singular = np.linalg.svd(layers, compute_uv=False) / (MUON.muon_learning_rate * stretch)
        assert singular.min() > 0.4, path
        assert singular.max() < 1.4, path
    others = [np.abs(x) for path, x in change.items() if path not in blocks]
    # AdamW's first update of each number is the learning rate, times this factor for Nesterov's momentum.
    size = (0.9 * 0.1 / (1 - 0.9**2) + 1) * MUON.learning_rate
    np.testing.assert_allclose(np.concatenate([x.ravel() for x in others]), size, rtol=1e-3)


def test_only_matrices_decay():
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=0), steps=10)
    params = {name: np.ones(2, np.float32) for name in ("query", "query_bias", "bias", "scale")}
    change, _ = jax.jit(optimizer.update)(jax.tree.map(np.zeros_like, params), optimizer.init(params), params)
    assert {name for name, x in change.items() if x.any()} == {"query"}


def test_muon_moves_sharded_matrices_as_whole_ones():
    change = muon_change(ONE, devices=1)
    for path, x in muon_change(MeshShape(fsdp=2, ring=1, tensor=2), devices=4).items():
        np.testing.assert_allclose(x, change[path], atol=2e-6, err_msg=path)
