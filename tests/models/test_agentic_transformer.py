"""The inputs that each action depends on; mesh, chunks and remat do not change the results."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from agentic_ring.data.chain_loader import ChainBatch
from agentic_ring.errors import ConfigError
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from agentic_ring.models.agentic_transformer import most_likely_action
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.training.losses import action_loss
from agentic_ring.training.optimizer import OptimizerConfig, make_optimizer
from agentic_ring.training.train_step import init_state, make_train_step
from tests.models.tiny_agentic_transformer import ACTION_DIM, fresh_params, on_mesh, random_steps, tiny_config

STEPS = random_steps(batch=4, length=64, valid=61)


def losses(config, shape: MeshShape, devices=None, updates: int = 3, accumulation: int = 1) -> list[float]:
    """Losses of the first updates on one batch."""
    mesh = make_mesh(shape, devices)
    model, optimizer = Model(config), make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=1), 10)
    with jax.set_mesh(mesh):
        state = init_state(model, optimizer, 0, mesh, ShardingRules())
        update = jax.jit(make_train_step(model, action_loss, optimizer, accumulation))
        batch = on_mesh(STEPS, mesh)
        measured = []
        for _ in range(updates):
            state, metrics = update(state, batch)
            measured.append(float(metrics["loss"]))
    return measured


@pytest.fixture(scope="module")
def expected_losses() -> list[float]:
    return losses(tiny_config(), MeshShape(), jax.devices()[:1])


@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(ring=8),
        pytest.param(MeshShape(fsdp=4, ring=2), marks=pytest.mark.slow),
        pytest.param(MeshShape(data=2, ring=4), marks=pytest.mark.slow),
        pytest.param(MeshShape(data=2, fsdp=2, ring=1, tensor=2), marks=pytest.mark.slow),
        pytest.param(MeshShape(ring=4, tensor=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_loss_does_not_change_with_the_mesh(shape, expected_losses):
    np.testing.assert_allclose(losses(tiny_config(), shape), expected_losses, rtol=2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_groups": 2, "remat": "full"},
        {"ffn_chunk": 3},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {"remat": "full"},
                {"remat": "attention"},
                {"remat": "offload"},
                {"head_groups": 2},
                {"attention_kernel": "vanilla"},
                {"attention_strategy": "local"},
            )
        ),
    ],
    ids=str,
)
def test_chunks_remat_and_strategies_agree(changes, expected_losses):
    np.testing.assert_allclose(
        losses(tiny_config(**changes), MeshShape(data=4, ring=2)), expected_losses, rtol=2e-5
    )


@pytest.mark.slow
def test_accumulated_gradients_are_those_of_the_whole_batch(expected_losses):
    accumulated = losses(tiny_config(), MeshShape(data=2, ring=4), accumulation=2)
    np.testing.assert_allclose(accumulated, expected_losses, rtol=2e-5)


def predict(steps, config=None) -> np.ndarray:
    model = Model(config or tiny_config())
    params = fresh_params(model)
    return np.asarray(jax.jit(lambda p, s: model.bind(p)(s))(params, steps))


def test_an_action_depends_only_on_earlier_tokens():
    before = predict(STEPS)
    step = 30
    for name in ("return_to_go", "observation", "action", "reward", "completion"):
        first = step if name in ("return_to_go", "observation") else step + 1
        field = getattr(STEPS, name).copy()
        field[:, step] += 0.5
        after = predict(dataclasses.replace(STEPS, **{name: field}))
        np.testing.assert_array_equal(after[:, :first], before[:, :first], err_msg=name)
        assert not np.allclose(after[:, first], before[:, first]), name


def test_padding_changes_nothing():
    field = STEPS.observation.copy()
    field[:, 61:] = 1e3
    after = predict(dataclasses.replace(STEPS, observation=field))
    np.testing.assert_array_equal(after[:, :61], predict(STEPS)[:, :61])


@pytest.mark.slow
def test_the_trajectory_index_is_no_input_by_default():
    other = dataclasses.replace(STEPS, trajectory=STEPS.trajectory[:, ::-1])
    np.testing.assert_array_equal(predict(other), predict(STEPS))
    ablation = dataclasses.replace(tiny_config(), trajectory_index=8)
    assert not np.allclose(predict(other, ablation), predict(STEPS, ablation))


@pytest.mark.parametrize("name", ["return_to_go", "action", "reward", "observation"])
def test_paired_tokens_are_state_and_outcome_without_a_return(name):
    model = Model(dataclasses.replace(tiny_config(layers=1), paired_tokens=True))
    bound = model.bind(fresh_params(model))
    other = dataclasses.replace(STEPS, **{name: getattr(STEPS, name) + 1})
    tokens, changed = (np.asarray(bound.tokens(steps)) for steps in (STEPS, other))
    assert tokens.shape[1] == 2 * STEPS.position.shape[1]
    states, outcomes = ((tokens != changed).any(axis=-1)[:, start::2].all() for start in (0, 1))
    assert (states, outcomes) == (name == "observation", name != "return_to_go")


def test_the_most_likely_of_several_actions_is_taken():
    random = np.random.default_rng(0)
    actions = random.normal(size=(2, 8, 3, ACTION_DIM)).astype(np.float32)
    log_probs = random.normal(size=(2, 8, 3)).astype(np.float32)
    expected = [[actions[b, s, log_probs[b, s].argmax()] for s in range(8)] for b in range(2)]
    np.testing.assert_array_equal(most_likely_action(actions, log_probs), expected)


def test_the_mixture_loss_needs_one_component_near_the_action():
    steps = random_steps(batch=1, length=4, valid=4)
    batch = ChainBatch(steps, np.ones((1, 4), np.float32), np.zeros((1, 4), np.uint32), "contiguous")

    def loss(actions: np.ndarray, probs: list[float]) -> float:
        log_probs = np.log(np.broadcast_to(probs, (1, 4, len(probs))))
        model = SimpleNamespace(action_mixture=lambda *_: (actions, log_probs))
        return float(action_loss(model, batch))

    near, far = steps.action[:, :, None] + 0.1, steps.action[:, :, None] - 0.5
    assert loss(near, [1.0]) == pytest.approx(4 * 0.01, rel=1e-4)
    assert loss(far, [1.0]) == pytest.approx(4 * 0.25, rel=1e-4)
    both = np.concatenate([near, far], axis=2)
    assert loss(near, [1.0]) < loss(both, [0.9, 0.1]) < loss(both, [0.5, 0.5]) < loss(both, [0.1, 0.9])
    assert loss(both, [0.5, 0.5]) < loss(far, [1.0])


def test_impossible_sizes_are_refused():
    with pytest.raises(ConfigError, match="width 30 over 4 heads"):
        TransformerConfig(width=30, layers=1, heads=4, ffn_width=8)
    with pytest.raises(ConfigError, match="kv_heads 3 does not divide heads 4"):
        TransformerConfig(width=32, layers=1, heads=4, kv_heads=3, ffn_width=8)
