"""Compiled bytes of a training step: constant per device when ring and sequence grow together.

Beside the memory of a single device, a ring keeps keys and values in use and in flight, the sums of their
gradients, and copies of the halves that a hop computes: at most eight blocks [tokens of a device, width] on
any ring, a few per cent of a stack of real depth.
"""

import jax
import pytest

from agentic_ring.device_memory import PlannedMemory
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP
from agentic_ring.training.optimizer import OptimizerConfig
from evals.compile.step_memory import chain_step
from tests.models.tiny_agentic_transformer import tiny_config

STEPS = 256  # per device
WIDTH = 128
BLOCK_BYTES = STEPS * TOKENS_PER_STEP * WIDTH * 4
# Replicated parameters take the same memory on every ring, so only activations can differ.
REPLICATED = ShardingRules(embed=())


def step_memory(ring: int, steps: int = STEPS) -> PlannedMemory:
    """Returns the bytes for chains of ``steps`` per device, 48 layers scanned and rematerialised."""
    config = tiny_config(
        width=WIDTH, kv_heads=4, ffn_width=2 * WIDTH, layers=48, remat="full", ffn_chunk=128, rules=REPLICATED
    )
    mesh = make_mesh(MeshShape(ring=ring), jax.devices()[:ring])
    return chain_step(config, OptimizerConfig(), 1, ring * steps, mesh).memory()


@pytest.mark.slow
def test_bytes_per_device_stay_flat_as_ring_and_sequence_grow():
    alone, four, eight = (step_memory(ring) for ring in (1, 4, 8))
    assert eight.total == pytest.approx(alone.total, rel=0.05)
    assert eight.total == pytest.approx(four.total, rel=0.005)
    assert eight.temporary <= alone.temporary + 8 * BLOCK_BYTES
    # Each further token adds what every layer keeps and what one layer computes with. Scores of all chunk
    # pairs, hoisted out of the layers and kept, would grow with the square.
    more = step_memory(1, 8 * STEPS).temporary - alone.temporary
    assert 48 * WIDTH * 4 < more / (7 * STEPS * TOKENS_PER_STEP) < 4 * 48 * WIDTH * 4
