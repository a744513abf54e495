"""The completion bit: trained where leaders follow leaders, without effect where no chain can train it."""

import jax
import numpy as np
import pytest

from agentic_ring.data.chain_loader import ChainConfig, ChainLoader, ChainPipeline
from agentic_ring.data.hindsight_chains import StratifiedSampler
from agentic_ring.data.store import TrajectoryStore, measure_scaling
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.agentic_transformer import COMPLETION_ROW, AgenticTransformerConfig
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.training.train_step import action_loss
from tests.data.synthetic import DOMAIN, TASK, two_task_store

STACK = TransformerConfig(width=16, layers=1, heads=2, ffn_width=32, remat="none")
MODEL = Model(AgenticTransformerConfig(STACK, DOMAIN.observation_dim, DOMAIN.action_dim, max_timestep=8))


@pytest.mark.parametrize("trajectories", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_bit_counts_only_where_chains_train_it(trajectories, tmp_path):
    """Its weights begin as 0, and only a gradient changes them."""
    mesh, config = make_mesh(MeshShape(), jax.devices()[:1]), ChainConfig(TASK, trajectories, action_repeat=1)
    with TrajectoryStore.open(two_task_store(tmp_path / "s.h5", [8] * 20)) as store, jax.set_mesh(mesh):
        loader = ChainLoader(store, config, measure_scaling(store, TASK, 1), ring=1)
        sampler = StratifiedSampler(store.returns(TASK), store.learnable, trajectories, 0.2, seed=0)
        batch = next(ChainPipeline(loader, sampler, 32, mesh))
        params = jax.jit(MODEL.init_params)(jax.random.key(0))
        gradient = jax.jit(jax.grad(lambda params: action_loss(MODEL.bind(params), batch)))(params)
    first, change = (np.asarray(x["embed_reward"]["kernel"])[COMPLETION_ROW] for x in (params, gradient))
    assert batch.steps.completion.any()
    assert not first.any()
    assert change.any() == (trajectories > 1)
