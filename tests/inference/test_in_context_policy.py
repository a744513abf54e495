"""Decoding with the cache gives the same actions as encoding the whole context again."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from agentic_ring.data.store import Scaling
from agentic_ring.errors import ConfigError
from agentic_ring.inference.in_context_policy import ContextBytes, InContextPolicy
from agentic_ring.inference.sampling import Sampling
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh, mesh_on_first_devices
from agentic_ring.models.agentic_transformer import ChainSteps
from agentic_ring.models.model import Model
from tests.models.tiny_agentic_transformer import (
    ACTION_DIM,
    MAX_TIMESTEP,
    OBSERVATION_DIM,
    fresh_params,
    random_steps,
    tiny_config,
)

ENVIRONMENTS, TRIALS, TARGET = 4, 3, 6.0
SCALING = Scaling((0.5,) * OBSERVATION_DIM, (2.0,) * OBSERVATION_DIM, reward_scale=2.0, return_scale=8.0)


def roll_out(policy: InContextPolicy, trials: int = TRIALS, target: float | None = TARGET) -> ChainSteps:
    """Acts on random observations and rewards; returns the steps as training would have them."""
    aimed = target is not None
    random = np.random.default_rng(1)
    columns = []
    for trial in range(trials):
        policy.begin_trial()
        left = np.full(ENVIRONMENTS, target or 0.0)
        for timestep in range(MAX_TIMESTEP):
            observation = random.normal(size=(ENVIRONMENTS, OBSERVATION_DIM)).astype(np.float32)
            action = policy.act(observation)
            reward = random.uniform(0, 1, ENVIRONMENTS).astype(np.float32)
            last = timestep == MAX_TIMESTEP - 1
            policy.receive(reward, last)
            columns.append(
                ChainSteps(
                    return_to_go=left / SCALING.return_scale,
                    observation=SCALING.observation(observation),
                    action=action,
                    reward=reward / SCALING.reward_scale,
                    completion=((left - reward <= 0) & (last and aimed)).astype(np.float32),
                    timestep=np.full(ENVIRONMENTS, timestep),
                    trajectory=np.full(ENVIRONMENTS, trial),
                    position=np.full(ENVIRONMENTS, trial * MAX_TIMESTEP + timestep),
                )
            )
            left = left - reward * aimed
    return jax.tree.map(lambda *steps: np.stack(steps, axis=1), *columns)


def make_policy(shape, decisions, prompt=None, config=None, target=TARGET, **options):
    """A policy with a fresh model on a mesh, and the same model encoding whole contexts."""
    model = Model(config or tiny_config())
    params = fresh_params(model)
    mesh = shape if isinstance(shape, Mesh) else mesh_on_first_devices(shape)
    policy = InContextPolicy(model, params, mesh, SCALING, target, ENVIRONMENTS, decisions, prompt, **options)
    return policy, jax.jit(lambda steps: model.bind(params)(steps))


@pytest.mark.parametrize(
    ("shape", "prompt_steps"),
    [
        (MeshShape(ring=8), 24),
        (MeshShape(fsdp=4, ring=2), 0),
        pytest.param(MeshShape(ring=8), 0, marks=pytest.mark.slow),
        pytest.param(MeshShape(data=2, ring=2, tensor=2), 24, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_cached_decoding_equals_encoding_the_whole_context(shape, prompt_steps):
    prompt = random_steps(batch=1, length=prompt_steps, valid=prompt_steps - 3) if prompt_steps else None
    policy, encode = make_policy(shape, TRIALS * MAX_TIMESTEP, prompt)
    steps = roll_out(policy)
    if prompt is not None:
        valid = jax.tree.map(lambda x: np.repeat(x[:, : prompt_steps - 3], ENVIRONMENTS, axis=0), prompt)
        steps.position[:] += prompt_steps - 3
        steps = jax.tree.map(lambda a, b: np.concatenate([a, b], axis=1), valid, steps)
    ours = steps.action[:, -TRIALS * MAX_TIMESTEP :]
    assert np.abs(ours - encode(steps)[:, -TRIALS * MAX_TIMESTEP :]).max() < 1e-4
    # The context matters: actions of a model that forgot the first trial would differ by far more.
    assert np.abs(np.diff(ours, axis=1)).max() > 1e-2
    assert ours.shape == (ENVIRONMENTS, TRIALS * MAX_TIMESTEP, ACTION_DIM)
    with pytest.raises(ConfigError, match="made for 48 decisions"):
        policy.act(np.zeros((ENVIRONMENTS, OBSERVATION_DIM), np.float32))


@pytest.mark.parametrize(("hold", "target"), [(2, TARGET), (8, None)])
def test_a_held_action_is_chosen_with_all_steps_in_context(hold, target):
    policy, encode = make_policy(MeshShape(ring=2), TRIALS * MAX_TIMESTEP, target=target, hold=hold)
    steps = roll_out(policy, target=target)
    assert steps.return_to_go.any() == steps.completion.any() == (target is not None)
    chosen = steps.timestep[0] % hold == 0
    np.testing.assert_array_equal(steps.action[:, 1:][:, ~chosen[1:]], steps.action[:, :-1][:, ~chosen[1:]])
    expected = encode(steps)
    np.testing.assert_allclose(steps.action[:, chosen], expected[:, chosen], atol=1e-4)
    assert np.abs(steps.action - expected)[:, ~chosen].max() > 0.01


def test_a_trial_that_ends_within_a_held_action_is_refused():
    policy, _ = make_policy(MeshShape(ring=1), 8, hold=2)
    policy.begin_trial()
    policy.act(np.zeros((ENVIRONMENTS, OBSERVATION_DIM), np.float32))
    policy.receive(np.zeros(ENVIRONMENTS, np.float32), last=True)
    with pytest.raises(ConfigError, match="had 1 steps, and actions are held for 2"):
        policy.begin_trial()


def test_the_rules_name_the_axes_that_share_environments_and_steps():
    rules = ShardingRules(("rows",), ("outer", "inner"), embed=("outer",), heads=(), ffn=(), vocab=())
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    mesh = Mesh(devices, ("rows", "outer", "inner"), axis_types=(AxisType.Auto,) * 3)
    prompt = random_steps(batch=1, length=8, valid=8)
    policy, encode = make_policy(
        mesh, TRIALS * MAX_TIMESTEP, prompt, tiny_config(layers=1, rules=rules), prompt_chunk=4
    )
    steps = roll_out(policy)
    steps.position[:] += 8
    whole = jax.tree.map(
        lambda a, b: np.concatenate([np.repeat(a, ENVIRONMENTS, axis=0), b], axis=1), prompt, steps
    )
    np.testing.assert_allclose(steps.action, encode(whole)[:, 8:], atol=1e-4)


@cache
def hidden_task_policy() -> tuple[InContextPolicy, Callable[[ChainSteps], jax.Array]]:
    """A policy with all options of hidden tasks, and the same model encoding whole contexts."""
    config = replace(tiny_config(layers=1), paired_tokens=True, action_modes=3)
    return make_policy(MeshShape(ring=1), TRIALS * MAX_TIMESTEP, config=config)


def test_a_reward_that_carries_its_step_is_decoded_as_it_is_encoded():
    policy, encode = hidden_task_policy()
    policy.start_over(None)
    steps = roll_out(policy)
    np.testing.assert_allclose(steps.action, encode(steps), atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (MeshShape(ring=1), {}),
        pytest.param(MeshShape(fsdp=2, ring=2), {"prompt_chunk": 60}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_environments_with_prompts_of_their_own_are_decoded_as_encoded(shape, options):
    valid = 119
    prompt = random_steps(batch=ENVIRONMENTS, length=122, valid=valid)
    config = tiny_config(layers=1)
    policy, encode = make_policy(shape, TRIALS * MAX_TIMESTEP, prompt, config, **options)
    first = roll_out(policy).action
    policy.discard_trials()
    steps = roll_out(policy)
    np.testing.assert_array_equal(steps.action, first)
    steps.position[:] += valid
    whole = jax.tree.map(lambda a, b: np.concatenate([a[:, :valid], b], axis=1), prompt, steps)
    np.testing.assert_allclose(steps.action, encode(whole)[:, valid:], atol=1e-4)


@pytest.mark.parametrize(
    "shape", [MeshShape(ring=1), pytest.param(MeshShape(fsdp=2, ring=2), marks=pytest.mark.slow)], ids=str
)
def test_a_cache_that_grows_keeps_its_tokens(shape):
    trials = 9 * shape.ring
    policy, encode = make_policy(shape, trials * MAX_TIMESTEP, config=tiny_config(layers=1))
    slots = policy._cache.positions.shape[1]
    steps = roll_out(policy, trials)
    assert policy._cache.positions.shape[1] > slots
    np.testing.assert_allclose(steps.action, encode(steps), atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "length", "valid", "error"),
    [
        (3, 8, 8, "the prompt has 3 rows .* expected one row, or 4 of the same length"),
        (4, 8, [8, 8, 7, 8], "rows of \\[8, 8, 7, 8\\] steps"),
    ],
    ids=str,
)
def test_prompts_that_do_not_fit_are_refused(rows, length, valid, error):
    policy, _ = hidden_task_policy()
    prompt = random_steps(rows, length, valid if isinstance(valid, int) else np.array(valid)[:, None])
    with pytest.raises(ConfigError, match=error):
        policy.start_over(prompt)


def test_draws_depend_on_seed_environment_and_decision_only():
    """Not on the mesh, nor on which policies share the environments."""
    config = replace(tiny_config(layers=1), action_modes=3)
    model = Model(config)
    params = fresh_params(model)
    random = np.random.default_rng(3)
    observation = random.normal(size=(8, ENVIRONMENTS, OBSERVATION_DIM)).astype(np.float32)

    def acted(shape: MeshShape, first: int, count: int, sampling: Sampling) -> np.ndarray:
        mesh = mesh_on_first_devices(shape)
        policy = InContextPolicy(
            model, params, mesh, SCALING, TARGET, count, 8, sampling=sampling, first_environment=first
        )
        policy.begin_trial()
        actions = []
        for seen in observation[:, first : first + count]:
            actions.append(np.asarray(policy.act(seen)))
            policy.receive(np.ones(count, np.float32), last=False)
        return np.stack(actions, axis=1)

    drawn = acted(MeshShape(ring=1), 0, 4, Sampling(1.0, seed=5))
    np.testing.assert_allclose(
        acted(MeshShape(data=2, ring=2), 0, 4, Sampling(1.0, seed=5)), drawn, atol=1e-4
    )
    shared = [acted(MeshShape(ring=1), first, 2, Sampling(1.0, seed=5)) for first in (0, 2)]
    np.testing.assert_allclose(np.concatenate(shared), drawn, atol=1e-4)
    likeliest = acted(MeshShape(ring=1), 0, 4, Sampling())
    for other in (acted(MeshShape(ring=1), 0, 4, Sampling(1.0, seed=6)), likeliest):
        assert np.abs(other - drawn).max() > 1e-2
    np.testing.assert_array_equal(acted(MeshShape(ring=1), 0, 4, Sampling(1e-6)), likeliest)


def test_starting_over_discards_everything():
    policy, _ = hidden_task_policy()
    policy.start_over(None)
    first = roll_out(policy).action
    policy.start_over(random_steps(batch=1, length=20, valid=17))
    behind_prompt = roll_out(policy).action
    policy.start_over(None)
    np.testing.assert_array_equal(roll_out(policy).action, first)
    assert np.abs(behind_prompt - first).max() > 1e-2


def test_copies_share_their_prompt_and_nothing_else():
    policy, _ = hidden_task_policy()
    policy.start_over(random_steps(batch=1, length=20, valid=17))
    other = policy.fresh_copy()
    first = roll_out(policy).action
    np.testing.assert_array_equal(roll_out(other).action, first)
    np.testing.assert_array_equal(roll_out(policy.fresh_copy()).action, first)
    assert other._prefix is policy._prefix


@cache
def first_actions(**options):
    """The first actions of a policy with a prompt, its cache of the prompt, and the progress of encoding."""
    policy, _ = make_policy(MeshShape(data=2, ring=2), 4, config=tiny_config(layers=1), **options)
    read: list[int] = []
    policy.start_over(random_steps(batch=1, length=20, valid=17), read.append)
    policy.begin_trial()
    return policy.act(np.ones((ENVIRONMENTS, OBSERVATION_DIM), np.float32)), policy._prefix, read


@pytest.mark.parametrize(
    ("options", "tolerance"), [({"prompt_chunk": 8}, 2e-6), ({"cache_dtype": "int8"}, 5e-3)], ids=str
)
def test_a_prompt_is_kept_once_and_may_come_in_chunks_or_in_fewer_bytes(options, tolerance):
    expected, _, read_at_once = first_actions()
    actions, prefix, read = first_actions(**options)
    assert read_at_once == [20]
    assert read == ([8, 16, 20] if "prompt_chunk" in options else [20])
    np.testing.assert_allclose(actions, expected, atol=tolerance)
    assert np.abs(np.diff(actions, axis=1)).max() > 0.01
    assert {entries.numbers.shape[0] for entries in (*prefix.keys, *prefix.values)} == {1}
    # Each device holds only its share of the one row.
    assert {shard.data.shape[2] for shard in prefix.keys[0].numbers.addressable_shards} == {40}


@pytest.mark.usefixtures("full_compiler")
@pytest.mark.parametrize("shape", [MeshShape(ring=1), MeshShape(ring=2)], ids=str)
def test_a_step_copies_no_cache(shape):
    """The keys and values of each layer are read and written in place."""
    policy, _ = make_policy(shape, 100)
    policy.begin_trial()
    step = policy._steps(position=0)
    programs = policy._programs
    with jax.set_mesh(mesh_on_first_devices(shape)):
        compiled = programs.act.lower(
            programs.weights, step, step, policy._cache, None, policy._sampling, policy._numbers, np.int32(0)
        )
        compiled = compiled.compile().as_text()
    slots = policy._cache.positions.shape[1] // shape.ring
    own = rf"f32\[{ENVIRONMENTS},2,{slots},8\]"
    assert re.search(rf"{own}\S* parameter\(", compiled)
    assert not re.search(rf"{own}\S* copy\(", compiled)


def test_the_bytes_of_a_context_are_known_before_it_is_made():
    prompt = random_steps(batch=1, length=24, valid=20)
    policy, _ = make_policy(MeshShape(data=2, ring=2), 10, prompt, cache_dtype="int8")
    planned = ContextBytes.planned(tiny_config(), ENVIRONMENTS, 10, 24, ring=2, cache_dtype="int8")
    assert policy.context_bytes == planned
    # Two layers of two heads of 8 numbers and a scale, keys and values; a position; fill marks and calls.
    assert planned.prompt == 24 * 4 * (2 * 2 * 2 * (8 + 4) + 4) + 3 * 4


def test_a_chunk_that_does_not_divide_over_the_ring_is_refused():
    prompt = random_steps(batch=1, length=8, valid=8)
    with pytest.raises(ConfigError, match="prompt_chunk 6 is not a positive multiple of the ring of 4"):
        make_policy(MeshShape(data=2, ring=4), 10, prompt, prompt_chunk=6)


def test_environments_must_divide_over_the_mesh():
    model = Model(tiny_config())
    with pytest.raises(ConfigError, match="3 environments do not divide over data x fsdp x stage = 2"):
        InContextPolicy(model, {}, make_mesh(MeshShape(data=2, ring=4)), SCALING, TARGET, 3, 10)
