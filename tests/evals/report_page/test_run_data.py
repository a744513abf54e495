"""What a report computes: attention over trials, and pictures."""

from ctypes.util import find_library

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.data.domains import load_environment, parse_task
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.models.model import Model
from agentic_ring.rollouts.policies import read_prompt
from evals.report_page.filmstrip import HEIGHT, WIDTH, data_uri, evenly_spaced, render
from evals.report_page.run_data import attention_over_trials, rollout_chain
from tests.evals.conftest import DECISIONS

TRAJECTORIES, PROMPT = 5, 2
TASK = parse_task("cartpole_swingup")


def test_attention_over_the_chain_that_the_model_acted_on_is_plain_softmax(small_run):
    config, rollout = small_run.config, small_run.report.rollout
    with TrajectoryStore.open(config.store) as store:
        prompt = read_prompt(store, config, ring=1)
    chain = rollout_chain(rollout, config.target, config.scaling, prompt)
    # Over the whole chain at once the model gives the actions that it took step by step.
    model = Model(config.model)
    bound = model.bind(small_run.params)
    actions = jax.jit(lambda model, steps: model(steps))(bound, chain)
    taken = rollout.action.reshape(-1, 1)
    np.testing.assert_allclose(actions[0, PROMPT * DECISIONS :], taken, atol=2e-5)
    assert np.ptp(taken) > 0.01

    found = attention_over_trials(model, small_run.params, chain, PROMPT, actions=7)
    queries = 7 * (TRAJECTORIES - PROMPT)
    assert found.shares.shape == (2, 4, queries, TRAJECTORIES)
    np.testing.assert_allclose(found.shares.sum(axis=-1), 1, atol=1e-5)
    np.testing.assert_allclose(found.even.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_array_equal(found.trajectory, np.repeat([2, 3, 4], 7))
    assert list(found.timestep[:7]) == [0, 3, 6, 10, 13, 16, 19]
    later = np.arange(TRAJECTORIES) > found.trajectory[:, None]
    assert (found.shares[:, :, later] == 0).all()
    assert (found.even[later] == 0).all()
    # The very first action of the last trial sees two tokens of its own among all those before.
    first = np.flatnonzero((found.trajectory == 4) & (found.timestep == 0))[0]
    assert found.even[first, 4] == pytest.approx(2 / (4 * 4 * DECISIONS + 2))

    # The first layer again, with the whole matrix of scores.
    positions, _ = bound.positions(chain)
    block = jax.tree.map(lambda x: x[0], bound.transformer.blocks)
    query, key, _ = block.attention.project(bound.tokens(chain), positions)
    key = jnp.repeat(key, 2, axis=2)  # 4 query heads on 2 key heads
    scores = jnp.einsum("btnh,bsnh->nts", query, key) / 2  # heads of 4
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    weights = np.asarray(jax.nn.softmax(scores, axis=-1))
    of_token = np.repeat(chain.trajectory[0], 4)
    tokens = 4 * (found.trajectory * DECISIONS + found.timestep) + 1
    for index in range(TRAJECTORIES):
        expected = weights[:, tokens][:, :, of_token == index].sum(axis=-1)
        np.testing.assert_allclose(found.shares[0, :, :, index], expected, atol=1e-5)


@pytest.mark.skipif(find_library("OSMesa") is None, reason="MuJoCo needs OSMesa to draw in software")
def test_a_state_is_drawn_where_the_cart_stands(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    physics = load_environment(TASK, seed=0).physics
    states = []
    for place in (-1.2, 1.2):
        with physics.reset_context():
            physics.named.data.qpos["slider"] = place
        states.append(physics.get_state())
    frames = render(TASK, np.array(states))
    assert frames.shape == (2, HEIGHT, WIDTH, 3)
    assert frames.dtype == np.uint8
    # The cart is the warmest thing in the picture.
    warmth = [(frame[..., 0].astype(int) - frame[..., 2]).clip(0).sum(axis=0) for frame in frames]
    left, right = (np.average(np.arange(WIDTH), weights=row) for row in warmth)
    assert left < WIDTH / 2 < right
    assert data_uri(frames[0]).startswith("data:image/jpeg;base64,/9j/")


def test_places_hold_the_first_and_the_last():
    assert [[*evenly_spaced(count, 5)] for count in (1, 3, 9)] == [[0], [0, 1, 2], [0, 2, 4, 6, 8]]
