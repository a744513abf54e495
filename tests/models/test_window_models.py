"""Behaviour cloning and the Decision Transformer: their inputs, and their loss."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np

from agentic_ring.models.baselines import (
    BehaviorCloningConfig,
    DecisionTransformerConfig,
    WindowBatch,
    Windows,
    window_loss,
)
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig

WINDOW, OBSERVATION, ACTION = 4, 3, 2
CLONING = BehaviorCloningConfig(OBSERVATION, ACTION, WINDOW, width=32, layers=2)
DECISION = DecisionTransformerConfig(
    OBSERVATION,
    ACTION,
    max_timestep=10,
    window=WINDOW,
    transformer=TransformerConfig(width=32, layers=1, heads=1, ffn_width=64, remat="none"),
)


def windows():
    generator = np.random.default_rng(0)
    return Windows(
        return_to_go=generator.uniform(0, 1, (6, WINDOW)).astype(np.float32),
        observation=generator.normal(size=(6, WINDOW, OBSERVATION)).astype(np.float32),
        action=generator.uniform(-1, 1, (6, WINDOW, ACTION)).astype(np.float32),
        timestep=np.tile(np.arange(WINDOW, dtype=np.int32), (6, 1)),
        present=np.ones((6, WINDOW), bool),
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
    given = windows()
    predict = predictions(CLONING)
    before = predict(given)
    assert before.shape == (6, 1, ACTION)
    assert np.abs(before).max() <= 1
    for field in ("return_to_go", "action", "timestep"):
        np.testing.assert_array_equal(predict(changed(given, field, -1)), before)
    for place in range(WINDOW):
        assert not np.array_equal(predict(changed(given, "observation", place)), before)


def test_the_decision_transformer_depends_on_the_past_and_its_state_but_not_its_action_or_padding():
    given, predict = windows(), predictions(DECISION)
    before = predict(given)
    assert before.shape == (6, WINDOW, ACTION)
    padded = replace(given, present=np.arange(WINDOW) >= np.full((6, 1), 2))
    for field in ("return_to_go", "observation", "timestep", "action"):
        moved = ~np.isclose(predict(changed(given, field, 2)), before, atol=1e-6).all((0, 2))
        assert moved.tolist() == [False, False, field != "action", True], field
        after = predict(changed(changed(padded, field, 0), field, 1))
        np.testing.assert_allclose(after[:, 2:], predict(padded)[:, 2:], atol=1e-6)


def test_the_loss_is_the_weighted_error_of_the_actions():
    given = windows()
    weight = np.random.default_rng(1).uniform(0, 1, (6, WINDOW)).astype(np.float32)
    for config in (CLONING, DECISION):
        predicted = predictions(config)(given)
        expected = np.sum(weight * np.square(predicted - given.action).mean(-1))
        loss = window_loss(lambda _, predicted=predicted: predicted, WindowBatch(given, weight))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
