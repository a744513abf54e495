"""Decoding with the cache gives the same actions as encoding the whole context again."""

import re
from dataclasses import replace

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
    fresh_model,
    random_steps,
    tiny_config,
)

ENVIRONMENTS, TRIALS, TARGET = 4, 3, 6.0
PAIRED = replace(tiny_config(layers=1), paired_tokens=True, action_modes=3)
SCALING = Scaling((0.5,) * OBSERVATION_DIM, (2.0,) * OBSERVATION_DIM, reward_scale=2.0, return_scale=8.0)


def roll_out(policy: InContextPolicy, trials: int = TRIALS, target: float | None = TARGET) -> ChainSteps:
    """Acts on random observations and rewards; returns the steps as training would have them."""
    random, place = np.random.default_rng(1), np.arange(trials * MAX_TIMESTEP)
    observation = random.normal(size=(ENVIRONMENTS, len(place), OBSERVATION_DIM)).astype(np.float32)
    reward = random.uniform(0, 1, (ENVIRONMENTS, len(place))).astype(np.float32)
    last, actions = place % MAX_TIMESTEP == MAX_TIMESTEP - 1, []
    for step in place:
        if step % MAX_TIMESTEP == 0:
            policy.begin_trial()
        actions.append(np.asarray(policy.act(observation[:, step])))
        policy.receive(reward[:, step], bool(last[step]))
    counted = reward.astype(np.float64) * (target is not None)
    after = (target or 0.0) - counted.reshape(ENVIRONMENTS, trials, -1).cumsum(axis=2).reshape(reward.shape)
    labels = place % MAX_TIMESTEP, place // MAX_TIMESTEP, place
    return ChainSteps(
        (after + counted) / SCALING.return_scale,
        SCALING.observation(observation),
        np.stack(actions, axis=1),
        reward / SCALING.reward_scale,
        ((after <= 0) & last & (target is not None)).astype(np.float32),
        *(np.tile(label, (ENVIRONMENTS, 1)) for label in labels),
    )


def make_policy(shape: Mesh | MeshShape, decisions, prompt=None, config=None, target=TARGET, **options):
    """A policy with a fresh model on a mesh, and the same model encoding whole contexts."""
    model, params, encode = fresh_model(config or tiny_config(layers=1))
    mesh = shape if isinstance(shape, Mesh) else mesh_on_first_devices(shape)
    policy = InContextPolicy(model, params, mesh, SCALING, target, ENVIRONMENTS, decisions, prompt, **options)
    return policy, encode


OWN_AXES = ShardingRules(("rows",), ("outer", "inner"), embed=("outer",), heads=(), ffn=(), vocab=())


@pytest.mark.parametrize(
    ("shape", "rows", "length", "valid", "prompt_chunk"),
    [
        (MeshShape(ring=1), ENVIRONMENTS, 122, 119, None),
        ("own axes", 1, 8, 8, 4),
        pytest.param(MeshShape(ring=8), 1, 24, 21, None, marks=pytest.mark.slow),
        pytest.param(MeshShape(data=2, ring=2, tensor=2), 0, 0, 0, None, marks=pytest.mark.slow),
        pytest.param(MeshShape(fsdp=2, ring=2), ENVIRONMENTS, 122, 119, 60, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_cached_decoding_equals_encoding_the_whole_context(shape, rows, length, valid, prompt_chunk):
    """After a prompt that all environments share, one for each of them, or none."""
    layers = 2 if prompt_chunk is None and rows < ENVIRONMENTS else 1
    prompt = random_steps(rows, length, valid) if rows else None
    config = tiny_config(layers=layers)
    if shape == "own axes":
        shape = jax.make_mesh((2, 2, 2), ("rows", "outer", "inner"), (AxisType.Auto,) * 3)
        config = tiny_config(layers=layers, rules=OWN_AXES)
    policy, encode = make_policy(shape, TRIALS * MAX_TIMESTEP, prompt, config, prompt_chunk=prompt_chunk)
    first = roll_out(policy).action
    assert first.shape == (ENVIRONMENTS, TRIALS * MAX_TIMESTEP, ACTION_DIM)
    # The context matters: actions of a model that forgot the first trial would differ by far more.
    assert np.abs(np.diff(first, axis=1)).max() > 1e-2
    with pytest.raises(ConfigError, match="made for 48 decisions"):
        policy.act(np.zeros((ENVIRONMENTS, OBSERVATION_DIM), np.float32))
    policy.discard_trials()
    steps = roll_out(policy)
    np.testing.assert_array_equal(steps.action, first)
    if prompt is not None:
        steps.position[:] += valid
        before = jax.tree.map(lambda x: np.repeat(x[:, :valid], ENVIRONMENTS // rows, axis=0), prompt)
        steps = ChainSteps.joined([before, steps])
    np.testing.assert_allclose(first, encode(steps)[:, valid:], atol=1e-4)


@pytest.mark.parametrize(("hold", "target"), [(2, TARGET), (8, None)])
def test_a_held_action_is_chosen_with_all_steps_in_context(hold, target):
    policy, encode = make_policy(MeshShape(ring=2), TRIALS * MAX_TIMESTEP + 1, target=target, hold=hold)
    steps = roll_out(policy, target=target)
    assert steps.return_to_go.any() == steps.completion.any() == (target is not None)
    chosen = steps.timestep[0] % hold == 0
    np.testing.assert_array_equal(steps.action[:, 1:][:, ~chosen[1:]], steps.action[:, :-1][:, ~chosen[1:]])
    expected = encode(steps)
    np.testing.assert_allclose(steps.action[:, chosen], expected[:, chosen], atol=1e-4)
    assert np.abs(steps.action - expected)[:, ~chosen].max() > 0.01
    # A trial must not end within a held action.
    policy.begin_trial()
    policy.act(np.zeros((ENVIRONMENTS, OBSERVATION_DIM), np.float32))
    policy.receive(np.zeros(ENVIRONMENTS, np.float32), last=True)
    with pytest.raises(ConfigError, match=f"had 1 steps, and actions are held for {hold}"):
        policy.begin_trial()


def test_paired_tokens_are_decoded_as_they_are_encoded_and_starting_over_discards_everything():
    policy, encode = make_policy(MeshShape(ring=1), TRIALS * MAX_TIMESTEP, config=PAIRED)
    steps = roll_out(policy)
    np.testing.assert_allclose(steps.action, encode(steps), atol=1e-4)
    policy.start_over(random_steps(batch=1, length=20, valid=17))
    behind_prompt = roll_out(policy).action
    assert np.abs(behind_prompt - steps.action).max() > 1e-2
    # Copies share their prompt and nothing else.
    other = policy.fresh_copy()
    assert other._prefix is policy._prefix
    np.testing.assert_array_equal(roll_out(other).action, behind_prompt)
    policy.start_over(None)
    np.testing.assert_array_equal(roll_out(policy).action, steps.action)
    # Prompts that fit neither one environment nor all.
    for lengths in ([8, 8, 8], [8, 8, 7, 8]):
        with pytest.raises(ConfigError, match=f"has {len(lengths)} rows of {re.escape(str(lengths))}"):
            policy.start_over(random_steps(len(lengths), 8, np.array(lengths)[:, None]))


@pytest.mark.parametrize(
    "shape", [MeshShape(ring=1), pytest.param(MeshShape(fsdp=2, ring=2), marks=pytest.mark.slow)], ids=str
)
def test_a_cache_that_grows_keeps_its_tokens(shape):
    trials = 9 * shape.ring
    policy, encode = make_policy(shape, trials * MAX_TIMESTEP)
    slots = policy._cache.positions.shape[1]
    steps = roll_out(policy, trials)
    assert policy._cache.positions.shape[1] > slots
    np.testing.assert_allclose(steps.action, encode(steps), atol=1e-4)


def test_draws_depend_on_seed_environment_and_decision_only():
    """Not on the mesh, nor on which policies share the environments."""
    model, params, _ = fresh_model(PAIRED)
    random = np.random.default_rng(3)
    observation = random.normal(size=(8, ENVIRONMENTS, OBSERVATION_DIM)).astype(np.float32)

    def policy(shape: MeshShape, count: int):
        mesh, sampling = mesh_on_first_devices(shape), Sampling(1.0, seed=5)
        return InContextPolicy(model, params, mesh, SCALING, TARGET, count, 8, sampling=sampling)

    def acted(policy: InContextPolicy, first: int = 0) -> np.ndarray:
        count = policy.num_environments
        policy.begin_trial()
        actions = []
        for seen in observation[:, first : first + count]:
            actions.append(np.asarray(policy.act(seen)))
            policy.receive(np.ones(count, np.float32), last=False)
        return np.stack(actions, axis=1)

    drawn, half = acted(policy(MeshShape(data=2, ring=2), 4)), policy(MeshShape(ring=1), 2)
    shared = acted(half), acted(half.fresh_copy(2), 2)
    np.testing.assert_allclose(np.concatenate(shared), drawn, atol=1e-4)
    other = half.fresh_copy()
    other._sampling = jax.device_put(Sampling(1.0, seed=6).values, other._sampling.seed.sharding)
    assert np.abs(acted(other) - shared[0]).max() > 1e-2


def test_a_prompt_is_kept_once_and_may_come_in_chunks_or_in_fewer_bytes():
    def first_actions(policy: InContextPolicy, progress: list[int], chunk: int | None = None) -> np.ndarray:
        policy._prompt_chunk = chunk
        read: list[int] = []
        policy.start_over(random_steps(batch=1, length=20, valid=17), read.append)
        assert read == progress
        prefix = policy._prefix
        assert {entries.numbers.shape[0] for entries in (*prefix.keys, *prefix.values)} == {1}
        # Each device holds only its share of the one row.
        assert {shard.data.shape[2] for shard in prefix.keys[0].numbers.addressable_shards} == {40}
        policy.begin_trial()
        return np.asarray(policy.act(np.ones((ENVIRONMENTS, OBSERVATION_DIM), np.float32)))

    policy, small = (
        make_policy(MeshShape(data=2, ring=2), 4, cache_dtype=each)[0] for each in (None, "int8")
    )
    expected = first_actions(policy, [20])
    assert np.abs(np.diff(expected, axis=1)).max() > 0.01
    np.testing.assert_allclose(first_actions(policy, [8, 16, 20], chunk=8), expected, atol=2e-6)
    np.testing.assert_allclose(first_actions(small, [20]), expected, atol=5e-3)
    planned = ContextBytes.planned(small._config, ENVIRONMENTS, 4, 20, ring=2, cache_dtype="int8")
    assert small.context_bytes == planned


@pytest.mark.usefixtures("full_compiler")
@pytest.mark.parametrize(("shape", "layers"), [(MeshShape(ring=1), 1), (MeshShape(ring=2), 2)], ids=str)
def test_a_step_copies_no_cache(shape, layers):
    policy, _ = make_policy(shape, 100, config=tiny_config(layers=layers))
    policy.begin_trial()
    programs, step = policy._programs, policy._steps(position=0)
    state = programs.weights, step, step, policy._cache, None
    with jax.set_mesh(mesh_on_first_devices(shape)):
        lowered = programs.act.lower(*state, policy._sampling, policy._numbers, np.int32(0))
    compiled = lowered.compile().as_text()
    own = rf"f32\[{ENVIRONMENTS},2,{policy._cache.positions.shape[1] // shape.ring},8\]"
    assert re.search(rf"{own}\S* parameter\(", compiled)
    assert not re.search(rf"{own}\S* copy\(", compiled)


def test_sizes_that_do_not_divide_over_the_mesh_are_refused():
    mesh = make_mesh(MeshShape(data=2, ring=4))
    for environments, chunk, named in (
        (4, 6, "prompt_chunk 6 is not a positive multiple of the ring of 4"),
        (4, 0, "prompt_chunk 0 is not"),
        (3, None, "3 environments do not divide over data x fsdp x stage = 2"),
    ):
        with pytest.raises(ConfigError, match=named):
            InContextPolicy(Model(tiny_config()), {}, mesh, SCALING, TARGET, environments, 10, None, chunk)
