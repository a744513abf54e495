"""Chains of known steps and decisions: each decision has its own context, whatever else is in the chain."""

from dataclasses import asdict, replace

import jax
import numpy as np
import pytest

from agentic_ring.data.spans import span_edges, span_fields
from agentic_ring.errors import ArgumentError, ConfigError
from agentic_ring.files.json_files import read_json, write_json
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig, ChainBatch, action_loss
from tests.models.tiny_agentic_transformer import (
    fresh_model,
    interleaved_steps,
    on_mesh,
    one_decision_each,
    random_steps,
    tiny_config,
)

STEPS = interleaved_steps(batch=2, length=32, valid=29)
DECISIONS = np.flatnonzero(STEPS.trajectory[0] < 0)


def single(**changes) -> AgenticTransformerConfig:
    return replace(tiny_config(**changes), single_tokens=True, action_modes=3)


def check_interleaving(shape: MeshShape, batch: int, **changes) -> None:
    """Compares chains on a mesh with one chain for each decision on one device."""
    steps = interleaved_steps(batch, 32, 29)
    model, params, _ = fresh_model(single(**changes))
    plain, mesh = fresh_model(single())[0], mesh_on_first_devices(shape)
    with jax.set_mesh(mesh):
        chains = on_mesh(steps, mesh)
        weight = np.where(chains.steps.trajectory < 0, chains.weight, 0.0)
        chains = replace(chains, weight=jax.device_put(weight, chains.weight.sharding))
        gradient = jax.jit(jax.value_and_grad(lambda params: action_loss(model.bind(params), chains)))(params)
        mixture = jax.jit(lambda p: model.bind(p).action_mixture(chains.steps, chains.layout))(params)
    alone = one_decision_each(steps)
    place = np.tile(DECISIONS, batch)
    chosen = np.arange(32) == place[:, None]

    def loss_alone(params):
        seed = np.zeros(alone.position.shape, np.uint32)
        module = plain.bind(params)
        # The layout None, which reads the order from positions with gaps, is not one of a ``ChainBatch``.
        batch = ChainBatch(alone, chosen.astype(np.float32), seed, None)
        return action_loss(module, batch), module.action_mixture(alone)

    (loss, mixture_alone), gradient_alone = jax.jit(jax.value_and_grad(loss_alone, has_aux=True))(params)
    # Where each decision stands in the mesh's order.
    columns = np.concatenate([np.flatnonzero(np.asarray(chains.steps.position[0]) == p) for p in DECISIONS])
    for together, apart in zip(mixture, mixture_alone, strict=True):
        found = np.asarray(together)[:, columns].reshape(len(place), *together.shape[2:])
        np.testing.assert_allclose(found, np.asarray(apart)[chosen], atol=2e-6)
    np.testing.assert_allclose(gradient[0], loss, rtol=1e-5)
    for found, expected in zip(*map(jax.tree.leaves, (gradient[1], gradient_alone)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max() + 1e-7)


def test_interleaved_decisions_equal_chains_of_one_decision_each():
    check_interleaving(MeshShape(ring=4), batch=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (MeshShape(stage=2, ring=2, tensor=2), {"remat": "full"}),
        (MeshShape(data=2, ring=4), {"remat": "attention", "head_groups": 2}),
        (MeshShape(fsdp=2, ring=2), {"attention_strategy": "ulysses"}),
        (MeshShape(ring=2), {"attention_strategy": "local", "attention_kernel": "vanilla"}),
    ],
    ids=str,
)
def test_interleaving_on_other_meshes(shape, changes):
    check_interleaving(shape, batch=4, **changes)


def test_only_earlier_known_steps_and_its_own_observation_change_a_decision():
    encode = fresh_model(single())[2]
    before = np.asarray(encode(STEPS))

    def changed_decisions(step: int, name: str) -> list[bool]:
        field = getattr(STEPS, name).copy()
        field[:, step] += 1
        after = np.asarray(encode(replace(STEPS, **{name: field})))[:, DECISIONS]
        return (after != before[:, DECISIONS]).any(axis=(0, 2)).tolist()

    known, decision = 12, 14
    none, later, own = ([step in kind for step in DECISIONS] for kind in ((), range(known, 32), [decision]))
    for name in ("observation", "action", "reward", "span_reward", "timestep"):
        assert changed_decisions(known, name) == later, name
        assert changed_decisions(decision, name) == (own if name == "observation" else none), name
    for name in ("return_to_go", "completion"):
        assert changed_decisions(known, name) == changed_decisions(decision, name) == none, name
    assert changed_decisions(known, "trajectory") == none


def test_older_configurations_load_and_wrong_combinations_are_refused(tmp_path):
    stored = asdict(tiny_config())
    del stored["single_tokens"]
    write_json(tmp_path / "config.json", stored)
    assert read_json(tmp_path / "config.json", AgenticTransformerConfig, "") == tiny_config()
    for name, value in (("paired_tokens", True), ("trajectory_index", 4)):
        with pytest.raises(ConfigError, match=f"single_tokens and {name} are both set"):
            replace(single(), **{name: value})
    with pytest.raises(ArgumentError, match="the steps have no span_reward"):
        fresh_model(single())[2](random_steps(1, 4, 4))


def test_spans_cover_a_trajectory_and_show_their_middle():
    assert span_edges(10, 4).tolist() == [0, 2, 5, 7, 10]
    time = np.arange(10.0, dtype=np.float32)
    fields = span_fields(time[:, None], -time[:, None], 2 * time, 4)
    assert fields["observation"][:, 0].tolist() == [1, 3, 6, 8] == (-fields["action"][:, 0]).tolist()
    assert fields["reward"].tolist() == [2, 6, 12, 16]
    assert fields["span_reward"].tolist() == [1, 6, 11, 16]
    assert fields["timestep"].tolist() == [0, 1, 2, 3]
    for spans in (0, 11):
        with pytest.raises(ConfigError, match=f"spans is {spans} in a trajectory of 10 decisions"):
            span_edges(10, spans)
