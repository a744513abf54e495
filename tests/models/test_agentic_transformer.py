"""The inputs that each action depends on; mesh, chunks and remat do not change the results."""

import dataclasses
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.data.chain_loader import ChainConfig, ChainLoader, ChainPipeline
from agentic_ring.data.hindsight_chains import StratifiedSampler
from agentic_ring.data.store import TrajectoryStore, measure_scaling
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from agentic_ring.models.agentic_transformer import (
    COMPLETION_ROW,
    COMPONENT_DEVIATION,
    ChainBatch,
    action_loss,
    most_likely_action,
)
from agentic_ring.models.layers import ResidualDropout
from agentic_ring.models.model import Model
from agentic_ring.training.optimizer import OptimizerConfig, make_optimizer
from agentic_ring.training.train_step import init_state, make_train_step
from tests.data.synthetic import DOMAIN, TASK, random_store
from tests.models.tiny_agentic_transformer import ACTION_DIM, fresh_model, on_mesh, random_steps, tiny_config

STEPS = random_steps(batch=4, length=32, valid=29)
ONE = MeshShape(ring=1)
RATE = 0.3


@cache
def losses(shape: MeshShape, dropout: float = 0.0, accumulation: int = 1, **changes) -> list[float]:
    mesh = make_mesh(shape, jax.devices()[:1] if shape == ONE else None)
    model = Model(dataclasses.replace(tiny_config(**changes), dropout=dropout))
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=1), 10)
    with jax.set_mesh(mesh):
        state = init_state(model, optimizer, 0, mesh, ShardingRules())
        update = jax.jit(make_train_step(model, action_loss, optimizer, accumulation))
        batch = on_mesh(STEPS, mesh)
        measured = []
        for _ in range(3):
            state, metrics = update(state, batch)
            measured.append(float(metrics["loss"]))
    return measured


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (
            MeshShape(data=2, ring=4),
            {"dropout": RATE, "head_groups": 2, "remat": "full", "ffn_chunk": 3, "accumulation": 2},
        ),
        (MeshShape(ring=4, tensor=2), {"remat": "attention", "accumulation": 4}),
        (MeshShape(fsdp=4, ring=2), {"remat": "offload", "attention_kernel": "vanilla"}),
        (MeshShape(data=2, fsdp=2, ring=2), {"attention_strategy": "local"}),
        (MeshShape(stage=2, ring=4), {"dropout": RATE}),
    ],
    ids=str,
)
def test_the_loss_does_not_change_with_mesh_chunks_remat_and_accumulation(shape, changes):
    """Nor does dropout, whose masks belong to tokens, whatever computes them."""
    expected = losses(ONE, changes.get("dropout", 0.0))
    np.testing.assert_allclose(losses(shape, **changes), expected, rtol=2e-5)


def predict(steps, config=None) -> np.ndarray:
    return np.asarray(fresh_model(config or tiny_config())[2](steps))


def test_an_action_depends_only_on_earlier_tokens_and_not_on_padding():
    before = predict(STEPS)
    padding = STEPS.observation.copy()
    padding[:, 29:] = 1e3
    after = predict(dataclasses.replace(STEPS, observation=padding))
    np.testing.assert_array_equal(after[:, :29], before[:, :29])
    step = 15
    for name in ("return_to_go", "observation", "action", "reward", "completion"):
        first = step if name in ("return_to_go", "observation") else step + 1
        field = getattr(STEPS, name).copy()
        field[:, step] += 0.5
        after = predict(dataclasses.replace(STEPS, **{name: field}))
        np.testing.assert_array_equal(after[:, :first], before[:, :first], err_msg=name)
        assert not np.allclose(after[:, first], before[:, first]), name


def embedder(**changes):
    model, params, _ = fresh_model(dataclasses.replace(tiny_config(layers=1), **changes))
    return jax.jit(lambda steps: model.bind(params).tokens(steps))


@pytest.mark.parametrize("indices", [0, 8])
def test_the_trajectory_index_is_no_input_by_default(indices):
    other = dataclasses.replace(STEPS, trajectory=STEPS.trajectory[:, ::-1])
    embed = embedder(trajectory_index=indices)
    assert np.array_equal(embed(other), embed(STEPS)) == (indices == 0)


def test_paired_tokens_are_state_and_outcome_without_a_return():
    embed = embedder(paired_tokens=True)
    tokens = embed(STEPS)
    assert tokens.shape[1] == 2 * STEPS.position.shape[1]
    for name in ("return_to_go", "action", "reward", "observation"):
        changed = embed(dataclasses.replace(STEPS, **{name: getattr(STEPS, name) + 1}))
        states, outcomes = ((tokens != changed).any(axis=-1)[:, start::2].all() for start in (0, 1))
        assert (states, outcomes) == (name == "observation", name != "return_to_go"), name


def test_the_most_likely_of_several_actions_is_taken():
    random = np.random.default_rng(0)
    actions = random.normal(size=(2, 8, 3, ACTION_DIM)).astype(np.float32)
    log_probs = random.normal(size=(2, 8, 3)).astype(np.float32)
    expected = [[actions[b, s, log_probs[b, s].argmax()] for s in range(8)] for b in range(2)]
    np.testing.assert_array_equal(most_likely_action(actions, log_probs), expected)


@pytest.mark.parametrize("probs", [[1.0], [0.9, 0.1], [0.1, 0.9]])
def test_the_mixture_loss_is_the_log_likelihood_of_gaussians(probs):
    steps, distances = random_steps(batch=1, length=4, valid=4), np.array([0.1, -0.5])[: len(probs)]
    batch = ChainBatch(steps, np.ones((1, 4), np.float32), np.zeros((1, 4), np.uint32), "contiguous")
    mixture = (
        steps.action[:, :, None] + distances[:, None],
        np.log(np.broadcast_to(probs, (1, 4, len(probs)))),
    )
    loss = float(action_loss(SimpleNamespace(action_mixture=lambda *_: mixture), batch))
    scale = 2 * COMPONENT_DEVIATION**2 / ACTION_DIM
    expected = -4 * scale * np.log(probs @ np.exp(-(distances**2) / scale))
    assert loss == pytest.approx(expected, rel=1e-4)


SEQUENCES, TOKENS, WIDTH = 3, 50, 64


def dropped(layer: int = 0, branch: int = 0, order: np.ndarray | None = None) -> np.ndarray:
    """Ones after dropout, with the tokens in this order, by default that of their positions."""
    order = np.arange(TOKENS) if order is None else order
    sequence = jnp.arange(SEQUENCES, dtype=jnp.uint32)[:, None].repeat(TOKENS, axis=1)
    position = jnp.broadcast_to(jnp.asarray(order, jnp.int32), sequence.shape)
    ones = jnp.ones((SEQUENCES, TOKENS, WIDTH))
    return np.asarray(ResidualDropout(sequence, position, RATE)(jnp.int32(layer), branch, ones))


def test_a_share_is_dropped_by_masks_that_follow_their_tokens_and_never_repeat():
    values, order = dropped(), np.random.default_rng(0).permutation(TOKENS)
    np.testing.assert_allclose(np.unique(values), [0, 1 / (1 - RATE)], rtol=1e-6)
    # 9,600 draws: a standard deviation of 0.005.
    assert abs((values == 0).mean() - RATE) < 0.02
    np.testing.assert_array_equal(dropped(order=order), values[:, order])
    masks = np.concatenate(
        [dropped(layer, branch).reshape(-1, WIDTH) for layer in (0, 1) for branch in (0, 1)]
    )
    assert len(np.unique(masks, axis=0)) == 4 * SEQUENCES * TOKENS


def test_dropout_acts_only_where_there_are_seeds():
    model, params, _ = fresh_model(dataclasses.replace(tiny_config(), dropout=RATE))
    seeds = np.ones(STEPS.position.shape, np.uint32)
    dropped = jax.jit(lambda steps: model.bind(params).action_mixture(steps, None, seeds)[0])(STEPS)
    plain = predict(STEPS)
    assert not np.allclose(dropped[:, :, 0], plain, rtol=1e-2)
    np.testing.assert_array_equal(predict(STEPS, model.config), plain)


@pytest.mark.parametrize("trajectories", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_completion_bit_counts_only_where_chains_train_it(trajectories, tmp_path):
    """Its weights begin as 0, and only a gradient changes them."""
    sizes = {"observation_dim": DOMAIN.observation_dim, "action_dim": DOMAIN.action_dim}
    model = Model(dataclasses.replace(tiny_config(layers=1), **sizes))
    mesh = make_mesh(ONE, jax.devices()[:1])
    with TrajectoryStore.open(random_store(tmp_path / "s.h5", [8] * 20)) as store, jax.set_mesh(mesh):
        config = ChainConfig(TASK, trajectories, action_repeat=1)
        loader = ChainLoader(store, config, measure_scaling(store, TASK, 1), ring=1)
        sampler = StratifiedSampler(store.returns(TASK), store.learnable, trajectories, 0.2, seed=0)
        batch = next(ChainPipeline(loader, sampler, 32, mesh))
        params = jax.jit(model.init_params)(jax.random.key(0))
        gradient = jax.jit(jax.grad(lambda params: action_loss(model.bind(params), batch)))(params)
    first, change = (np.asarray(x["embed_reward"]["kernel"])[COMPLETION_ROW] for x in (params, gradient))
    assert batch.steps.completion.any()
    assert not first.any()
    assert change.any() == (trajectories > 1)
