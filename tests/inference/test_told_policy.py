"""A policy that trajectories tell the task decides as the model that encodes the whole chain."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from agentic_ring.data.spans import span_fields
from agentic_ring.data.store import Scaling
from agentic_ring.errors import ConfigError
from agentic_ring.inference import told_policy
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.told_policy import ToldPolicy
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from agentic_ring.models.agentic_transformer import ChainSteps
from agentic_ring.models.model import Model
from tests.models.tiny_agentic_transformer import (
    ACTION_DIM,
    OBSERVATION_DIM,
    fresh_model,
    interleaved_steps,
    one_decision_each,
    random_steps,
    tiny_config,
)

ENVIRONMENTS, TRIALS, DECISIONS, SPANS = 4, 2, 7, 3
SCALING = Scaling((0.5,) * OBSERVATION_DIM, (2.0,) * OBSERVATION_DIM, reward_scale=2.0, return_scale=8.0)
CONFIG = replace(tiny_config(), single_tokens=True, action_modes=3)


def make_policy(shape, prompt=None, environments=ENVIRONMENTS, config=CONFIG, **options) -> ToldPolicy:
    model, params, _ = fresh_model(config)
    sizes = environments, TRIALS, DECISIONS, SPANS
    return ToldPolicy(model, params, mesh_on_first_devices(shape), SCALING, *sizes, prompt, **options)


def known_steps(rows: int, length: int, valid: int) -> ChainSteps:
    steps = random_steps(rows, length, valid)
    return replace(steps, span_reward=steps.return_to_go)


def roll_out(policy: ToldPolicy, first: int = 0) -> tuple[np.ndarray, ChainSteps]:
    """Acts on random observations and rewards: actions [E, trials x decisions, A], and the whole chain.

    ``first`` is the number of the policy's first environment.
    """
    random, rows = np.random.default_rng(1), slice(first, first + policy.num_environments)
    actions, parts = [], []
    for trial in range(TRIALS):
        observation = random.normal(size=(ENVIRONMENTS, DECISIONS, OBSERVATION_DIM)).astype(np.float32)[rows]
        reward = random.uniform(0, 1, (ENVIRONMENTS, DECISIONS)).astype(np.float32)[rows]
        policy.begin_trial()
        for decision in range(DECISIONS):
            actions.append(np.asarray(policy.act(observation[:, decision])))
            policy.receive(reward[:, decision], decision == DECISIONS - 1)
        seen, start = SCALING.observation(observation), trial * SPANS
        acted = np.stack(actions[-DECISIONS:], axis=1)
        known = span_fields(seen, acted, reward / SCALING.reward_scale, SPANS)
        place = {"trajectory": trial, "position": start + np.arange(SPANS)}
        decided = {"observation": seen, "trajectory": -1, "position": start, "span_reward": 0}
        parts += [policy.new_steps(DECISIONS, **decided), policy.new_steps(SPANS, **known, **place)]
    return np.stack(actions, axis=1), ChainSteps.joined(parts)


@pytest.mark.parametrize(
    ("shape", "rows", "chunk"),
    [
        (MeshShape(ring=1), 0, 8192),
        (MeshShape(data=2, ring=2), 1, 3),
        pytest.param(MeshShape(ring=4), ENVIRONMENTS, 8192, marks=pytest.mark.slow),
        pytest.param(MeshShape(fsdp=2, ring=2, tensor=2), ENVIRONMENTS, 8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_decisions_on_caches_equal_encoding_the_whole_chain(shape, rows, chunk, monkeypatch):
    """With no prompt, one that all environments share in chunks of 3, rounded up to 4, or one for each."""
    monkeypatch.setattr(told_policy, "PROMPT_CHUNK", chunk)
    prompt = known_steps(rows, 10, 9) if rows else None
    policy = make_policy(shape, prompt)
    actions, chain = roll_out(policy)
    assert actions.shape == (ENVIRONMENTS, TRIALS * DECISIONS, ACTION_DIM)
    if prompt is not None:
        chain = replace(chain, position=chain.position + 9)
        before = jax.tree.map(lambda x: np.repeat(x[:, :9], ENVIRONMENTS // rows, axis=0), prompt)
        chain = ChainSteps.joined([before, chain])
    decisions = np.flatnonzero(chain.trajectory[0] < 0)
    expected = np.asarray(fresh_model(CONFIG)[2](one_decision_each(chain)))
    expected = expected[np.arange(len(expected)), np.tile(decisions, ENVIRONMENTS)]
    np.testing.assert_allclose(actions, expected.reshape(actions.shape), atol=1e-5)


def test_draws_depend_on_seed_environment_and_decision_only():
    config, sampling = replace(CONFIG, transformer=tiny_config(layers=1).transformer), Sampling(1.0, seed=5)
    drawn, _ = roll_out(make_policy(MeshShape(data=2, ring=1), config=config, sampling=sampling))
    half = make_policy(MeshShape(ring=1), environments=2, config=config, sampling=sampling)
    shared = roll_out(half)[0], roll_out(half.fresh_copy(2), 2)[0]
    np.testing.assert_allclose(np.concatenate(shared), drawn, atol=1e-5)
    other = half.fresh_copy()
    other._sampling = jax.device_put(Sampling(1.0, seed=6).values, half._sampling.seed.sharding)
    assert np.abs(roll_out(other)[0] - shared[0]).max() > 1e-2


def test_trials_and_prompts_that_do_not_fit_are_refused():
    policy = make_policy(MeshShape(ring=1))
    for _ in range(TRIALS):
        policy.begin_trial()
    with pytest.raises(ConfigError, match="made for 2 trials"):
        policy.begin_trial()
    with pytest.raises(
        ConfigError, match="the trial had 1 decisions, but the policy was made for trials of 7"
    ):
        policy.receive(np.zeros(ENVIRONMENTS, np.float32), last=True)
    with pytest.raises(ConfigError, match="the prompt has decisions"):
        policy.start_over(interleaved_steps(1, 8, 8))
    mesh, model = mesh_on_first_devices(MeshShape(ring=1)), Model(CONFIG)
    with pytest.raises(
        ConfigError, match="spans is 17, but the model was made for trajectories of at most 16"
    ):
        ToldPolicy(model, {}, mesh, SCALING, ENVIRONMENTS, 1, 20, 17)
    with pytest.raises(ConfigError, match="the model has no single_tokens"):
        ToldPolicy(Model(tiny_config()), {}, mesh, SCALING, ENVIRONMENTS, 1, 20, 10)


@pytest.mark.usefixtures("full_compiler")
def test_a_decision_copies_no_cache():
    policy = make_policy(MeshShape(ring=2))
    programs, step = policy._programs, policy.new_steps(1, trajectory=-1, span_reward=0)
    draw = policy._sampling, policy._numbers, np.int32(0)
    with jax.set_mesh(programs.mesh):
        lowered = programs.decide.lower(programs.weights, step, policy._cache, None, *draw)
    compiled = lowered.compile().as_text()
    own = rf"f32\[{ENVIRONMENTS},2,{policy._cache.positions.shape[1] // 2},8\]"
    assert re.search(rf"{own}\S* parameter\(", compiled)
    assert not re.search(rf"{own}\S* copy\(", compiled)
