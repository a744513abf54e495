import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evals.report_page.attention_over_trials import attention_over_trials, rollout_chain

from agentic_ring.data.store import TrajectoryStore
from agentic_ring.models.model import Model
from agentic_ring.rollouts.policies import read_prompt
from tests.evals.conftest import DECISIONS
from tests.evals.finished_run import FinishedRun

TRAJECTORIES, PROMPT = 5, 2


@pytest.fixture(scope="module")
def chain(small_run: FinishedRun):
    config = small_run.config
    with TrajectoryStore.open(config.store) as store:
        prompt = read_prompt(store, config, ring=1)
    return rollout_chain(small_run.report.rollout, config.target, config.scaling, prompt)


def test_the_chain_is_what_the_model_acted_on(small_run, chain):
    """Over the whole chain at once the model gives the actions that it took step by step."""
    model = Model(small_run.config.model).bind(small_run.params)
    actions = jax.jit(lambda model, steps: model(steps))(model, chain)
    taken = small_run.report.rollout.action.reshape(-1, 1)
    np.testing.assert_allclose(actions[0, PROMPT * DECISIONS :], taken, atol=2e-5)
    assert np.ptp(taken) > 0.01


def test_shares_are_those_of_plain_softmax_and_add_up_to_1(small_run, chain):
    model = Model(small_run.config.model)
    found = attention_over_trials(model, small_run.params, chain, PROMPT, actions=7)
    queries = 7 * (TRAJECTORIES - PROMPT)
    assert found.shares.shape == (2, 4, queries, TRAJECTORIES)
    np.testing.assert_allclose(found.shares.sum(axis=-1), 1, atol=1e-5)
    np.testing.assert_allclose(found.even.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_array_equal(found.trajectory, np.repeat([2, 3, 4], 7))
    assert list(found.timestep[:7]) == [0, 3, 6, 10, 13, 16, 19]

    # The first layer again, with the whole matrix of scores.
    bound = model.bind(small_run.params)
    positions, _ = bound.positions(chain)
    first = jax.tree.map(lambda x: x[0], bound.transformer.blocks)
    query, key, _ = first.attention.project(bound.tokens(chain), positions)
    key = jnp.repeat(key, 2, axis=2)  # 4 query heads on 2 key heads
    scores = jnp.einsum("btnh,bsnh->nts", query, key) / 2  # heads of 4
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    weights = np.asarray(jax.nn.softmax(scores, axis=-1))
    of_token = np.repeat(chain.trajectory[0], 4)
    tokens = 4 * (found.trajectory * DECISIONS + found.timestep) + 1
    for index in range(TRAJECTORIES):
        expected = weights[:, tokens][:, :, of_token == index].sum(axis=-1)
        np.testing.assert_allclose(found.shares[0, :, :, index], expected, atol=1e-5)


def test_nothing_lies_on_later_trials(small_run, chain):
    found = attention_over_trials(Model(small_run.config.model), small_run.params, chain, PROMPT)
    assert found.shares.shape[2] == (TRAJECTORIES - PROMPT) * DECISIONS
    later = np.arange(TRAJECTORIES) > found.trajectory[:, None]
    assert (found.shares[:, :, later] == 0).all()
    assert (found.even[later] == 0).all()
    # The very first action of the last trial sees two tokens of its own among all those before.
    first = np.flatnonzero((found.trajectory == 4) & (found.timestep == 0))[0]
    assert found.even[first, 4] == pytest.approx(2 / (4 * 4 * DECISIONS + 2))
