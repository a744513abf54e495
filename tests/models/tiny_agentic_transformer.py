"""A model small enough to compile in a second, and random chains for it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.attention import order
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.agentic_transformer import (
    COMPLETION_ROW,
    AgenticTransformerConfig,
    ChainBatch,
    ChainSteps,
)
from agentic_ring.models.model import Model, Params
from agentic_ring.models.transformer_config import TransformerConfig

OBSERVATION_DIM, ACTION_DIM, MAX_TIMESTEP = 5, 2, 16


def tiny_config(**changes) -> AgenticTransformerConfig:
    """Two layers of width 32; ``changes`` go to the stack."""
    size = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_width": 64, "remat": "none"}
    return AgenticTransformerConfig(
        TransformerConfig(**{**size, **changes}), OBSERVATION_DIM, ACTION_DIM, MAX_TIMESTEP
    )


@cache
def _fresh_params(config: AgenticTransformerConfig) -> Params:
    return jax.jit(Model(config).init_params)(jax.random.key(0))


@cache
def fresh_model(
    config: AgenticTransformerConfig,
) -> tuple[Model[AgenticTransformerConfig], Params, Callable[[ChainSteps], jax.Array]]:
    """A model, its parameters, and the compiled model with them.

    The parameters are fresh; only the weights of the completion bit, which start at 0, are as if trained.
    """
    model = Model(config)
    params = _fresh_params(replace(config, transformer=replace(config.transformer, rules=ShardingRules())))
    if not config.single_tokens:
        row = params["embed_reward"]["kernel"].at[COMPLETION_ROW].set(0.5)
        params = {**params, "embed_reward": {**params["embed_reward"], "kernel": row}}
    return model, params, jax.jit(lambda steps: model.bind(params)(steps))


def random_steps(batch: int, length: int, valid: int) -> ChainSteps:
    """Random steps [batch, length] in contiguous order, the first ``valid`` of them without padding."""
    random = np.random.default_rng(0)

    def floats(*width: int) -> np.ndarray:
        return random.normal(size=(batch, length, *width)).astype(np.float32)

    place = np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))
    return ChainSteps(
        return_to_go=floats(),
        observation=floats(OBSERVATION_DIM),
        action=np.tanh(floats(ACTION_DIM)),
        reward=floats(),
        completion=(place % MAX_TIMESTEP == MAX_TIMESTEP - 1).astype(np.float32),
        timestep=place % MAX_TIMESTEP,
        trajectory=place // MAX_TIMESTEP,
        position=np.where(place < valid, place, -1),
    )


def interleaved_steps(batch: int, length: int, valid: int) -> ChainSteps:
    """Random steps of single tokens; every third is a decision, and one more, so that two are neighbours."""
    steps = random_steps(batch, length, valid)
    place = np.arange(length)
    decision = ((place % 3 == 2) | (place == 7)) & (place < valid)
    trajectory = np.where(decision, -1, steps.trajectory).astype(np.int32)
    return replace(steps, trajectory=trajectory, span_reward=steps.return_to_go[:, ::-1])


def one_decision_each(steps: ChainSteps) -> ChainSteps:
    """A chain for each decision of steps [B, S] in contiguous order: [B x decisions, S].

    It has this decision and the known steps before it; all other steps are padding. Decisions are at the same
    places in all B rows.
    """
    place = np.arange(steps.position.shape[1])
    decisions = np.flatnonzero(steps.trajectory[0] < 0)[:, None]
    kept = (steps.trajectory[0] >= 0) & (place < decisions) | (place == decisions)
    position = np.where(kept, steps.position[:, None], -1).reshape(-1, len(place))
    return replace(jax.tree.map(lambda x: np.repeat(x, len(decisions), axis=0), steps), position=position)


def on_mesh(steps: ChainSteps, mesh: Mesh) -> ChainBatch:
    """The steps as a batch on the mesh; valid ones have loss weight 1, and a chain's seed is its number."""
    rules = ShardingRules()
    permutation = order("zigzag", steps.position.shape[1], mesh.shape["ring"])

    def place(array: np.ndarray) -> jax.Array:
        axes = ("batch", "sequence", *(None,) * (array.ndim - 2))
        return jax.device_put(array[:, permutation], rules.sharding(mesh, array.shape, axes))

    weight = (steps.position >= 0).astype(np.float32)
    seed = np.arange(len(weight), dtype=np.uint32)[:, None].repeat(weight.shape[1], axis=1)
    return jax.tree.map(place, ChainBatch(steps, weight, seed, "zigzag"))
