"""The completion bit: trained where leaders follow leaders, without effect where no chain can train it."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from agentic_ring.data.chain_loader import ChainConfig, ChainLoader, ChainPipeline
from agentic_ring.data.hindsight_chains import StratifiedSampler
from agentic_ring.data.store import TrajectoryStore, measure_scaling
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from agentic_ring.models.agentic_transformer import COMPLETION_ROW, AgenticTransformerConfig
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.training.optimizer import OptimizerConfig, make_optimizer
from agentic_ring.training.train_step import action_loss, init_state, make_train_step
from tests.data.synthetic import DOMAIN, TASK, random_store

UPDATES = 4
STACK = TransformerConfig(width=16, layers=1, heads=2, ffn_width=32, remat="none")
MODEL = Model(AgenticTransformerConfig(STACK, DOMAIN.observation_dim, DOMAIN.action_dim, max_timestep=8))


def trained(path, trajectories: int):
    """The parameters after a few updates, the last chains, and how often they carry the bit."""
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    config = ChainConfig(TASK, trajectories, action_repeat=1)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=1), UPDATES + 1)
    with TrajectoryStore.open(random_store(path, [8] * 20)) as store, jax.set_mesh(mesh):
        scaling = measure_scaling(store, TASK, 1)
        sampler = StratifiedSampler(store.returns(TASK), store.learnable, trajectories, 0.2, seed=0)
        batches = ChainPipeline(ChainLoader(store, config, scaling, ring=1), sampler, 8, mesh)
        state = init_state(MODEL, optimizer, 0, mesh, ShardingRules())
        update, bits = jax.jit(make_train_step(MODEL, action_loss, optimizer, 1)), 0.0
        for _ in range(UPDATES):
            batch = next(batches)
            bits += float(batch.steps.completion.sum())
            state, _ = update(state, batch)
    return state.params, batch.steps, bits


@pytest.mark.parametrize("trajectories", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_bit_counts_only_where_chains_train_it(trajectories, tmp_path):
    params, steps, bits = trained(tmp_path / "s.h5", trajectories)
    row = np.asarray(params["embed_reward"]["kernel"])[COMPLETION_ROW]
    assert bits > 0
    # A rollout that reaches its target feeds the bit to all later trials.
    reached = replace(steps, completion=np.ones_like(steps.completion))
    act = jax.jit(lambda steps: MODEL.bind(params)(steps))
    same = np.array_equal(act(reached), act(replace(steps, completion=0 * steps.completion)))
    assert same == (trajectories == 1)
    assert row.any() == (trajectories > 1)
