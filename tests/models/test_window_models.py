"""Behaviour cloning and the Decision Transformer: their inputs, and learning of a known policy."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax

from agentic_ring.models.baselines import (
    BehaviorCloningConfig,
    DecisionTransformerConfig,
    WindowBatch,
    Windows,
)
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.training.train_step import window_loss

WINDOW, OBSERVATION, ACTION = 4, 3, 2
CLONING = BehaviorCloningConfig(OBSERVATION, ACTION, WINDOW, width=32, layers=2)
DECISION = DecisionTransformerConfig(
    OBSERVATION,
    ACTION,
    max_timestep=10,
    window=WINDOW,
    transformer=TransformerConfig(width=32, layers=1, heads=1, ffn_width=64, remat="none"),
)


def windows(generator, count=6):
    return Windows(
        return_to_go=generator.uniform(0, 1, (count, WINDOW)).astype(np.float32),
        observation=generator.normal(size=(count, WINDOW, OBSERVATION)).astype(np.float32),
        action=generator.uniform(-1, 1, (count, WINDOW, ACTION)).astype(np.float32),
        timestep=np.tile(np.arange(WINDOW, dtype=np.int32), (count, 1)),
        present=np.ones((count, WINDOW), bool),
    )


@cache
def predictions(config):
    """A fresh model as a compiled function of windows."""
    model = Model(config)
    params = jax.jit(model.init_params)(jax.random.key(0))
    return jax.jit(lambda given: model.bind(params)(given))


def changed(given, field, place):
    values = getattr(given, field).copy()
    values[:, place] += 1 if values.dtype != np.int32 else 5
    return replace(given, **{field: values})


def test_cloning_depends_only_on_observations():
    given = windows(np.random.default_rng(0))
    predict = predictions(CLONING)
    before = predict(given)
    assert before.shape == (6, 1, ACTION)
    assert np.abs(before).max() <= 1
    for field in ("return_to_go", "action", "timestep"):
        np.testing.assert_array_equal(predict(changed(given, field, -1)), before)
    for place in range(WINDOW):
        assert not np.array_equal(predict(changed(given, "observation", place)), before)


def test_the_decision_transformer_depends_on_the_past_and_its_state_but_not_its_action_or_padding():
    given, predict = windows(np.random.default_rng(0)), predictions(DECISION)
    before = predict(given)
    assert before.shape == (6, WINDOW, ACTION)
    padded = replace(given, present=np.arange(WINDOW) >= np.full((6, 1), 2))
    for field in ("return_to_go", "observation", "timestep", "action"):
        moved = ~np.isclose(predict(changed(given, field, 2)), before, atol=1e-6).all((0, 2))
        assert moved.tolist() == [False, False, field != "action", True], field
        after = predict(changed(changed(padded, field, 0), field, 1))
        np.testing.assert_allclose(after[:, 2:], predict(padded)[:, 2:], atol=1e-6)


def fitted(config, batch_of, steps):
    """Parameters after some updates of Adam, as a function of windows."""
    model, optimizer = Model(config), optax.adam(5e-3)

    @jax.jit
    def update(params, state, batch):
        gradient = jax.grad(lambda p: window_loss(model.bind(p), batch) / batch.weight.sum())(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state

    params = jax.jit(model.init_params)(jax.random.key(0))
    state = jax.jit(optimizer.init)(params)
    for _ in range(steps):
        params, state = update(params, state, batch_of())
    return jax.jit(lambda given: model.bind(params)(given))


def test_cloning_recovers_a_linear_policy():
    generator = np.random.default_rng(0)
    gain = np.array([[0.5, -0.2], [0.1, 0.3], [-0.4, 0.2]], np.float32)

    def batch_of():
        given = windows(generator, 256)
        action = np.tanh(given.observation @ gain)
        weight = np.zeros((256, WINDOW), np.float32)
        weight[:, -1] = 1
        return WindowBatch(replace(given, action=action), weight)

    predict = fitted(CLONING, batch_of, 300)
    test = batch_of().windows
    error = np.square(predict(test)[:, 0] - test.action[:, -1]).mean()
    assert error < 0.02 * np.square(test.action[:, -1]).mean()


def test_the_decision_transformer_follows_its_target_return():
    """In the data the action is good for a high return-to-go and the opposite for a low one."""
    generator = np.random.default_rng(0)

    def batch_of():
        given = windows(generator, 32)
        good = given.return_to_go[:, :1] > 0.5
        sign = np.where(good, 1, -1)[..., None].astype(np.float32)
        action = (0.8 * sign * np.ones_like(given.action)).astype(np.float32)
        return WindowBatch(
            replace(given, action=action, return_to_go=np.repeat(good, WINDOW, 1).astype(np.float32)),
            np.ones((32, WINDOW), np.float32),
        )

    predict = fitted(DECISION, batch_of, 100)
    test = batch_of().windows
    np.testing.assert_allclose(predict(test)[:, 0], test.action[:, 0], atol=0.15)
