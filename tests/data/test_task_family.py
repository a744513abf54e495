"""Chains of a task family: all tasks are drawn, and only the rewards reveal which one."""

from pathlib import Path

import jax
import numpy as np
import pytest

from agentic_ring.data.chain_loader import ChainConfig, ChainLoader, ChainPipeline
from agentic_ring.data.scaling import Scaling, measure_family_scaling
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.data.task_family import TaskFamilySampler, make_family_sampler, make_sampler
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.mesh import MeshShape, make_mesh
from tests.data.synthetic import two_task_store

TASKS = ("swingup", "swingup_sparse")
EPISODES, STEPS, MEMBERS = 20, 6, 3


def sampler(episodes: int = 40, length: int = 4, seed: int = 0, **changes) -> TaskFamilySampler:
    """Of two tasks whose best trajectories are each other's worst."""
    returns = {"one": np.arange(1.0, episodes + 1), "other": 10 * np.arange(1.0, episodes + 1)[::-1]}
    targets = {"one": 7.0, "other": 70.0}
    return TaskFamilySampler(
        changes.get("returns", returns), targets, np.ones(episodes, bool), length, 0.2, seed
    )


def test_chains_of_one_seed_draw_all_tasks_and_lengths_of_their_ends():
    plans = [sampler()(number) for number in range(200)]
    assert {plan.task for plan in plans} == {"one", "other"}
    assert {plan.leaders for plan in plans} == {1, 2, 3, 4}
    assert {plan.target for plan in plans if plan.task == "other"} == {70.0}
    assert plans == [sampler()(number) for number in range(200)]
    assert plans != [sampler(seed=1)(number) for number in range(200)]


def test_chains_end_with_the_best_of_their_task_behind_what_is_not():
    contrasts = 0
    for number in range(100):
        plan = sampler()(number, "one")
        assert plan.task == "one"
        assert list(plan.episodes) == sorted(plan.episodes)  # returns of "one" are the episodes' numbers
        earlier, best = plan.episodes[: -plan.leaders], plan.episodes[-plan.leaders :]
        assert min(best) >= 32
        assert max(earlier, default=0) < 32
        contrasts += sum(episode < 8 for episode in earlier)  # the best of "other"
    assert contrasts > 50


@pytest.mark.parametrize(
    ("returns", "error", "message"),
    [
        ({"one": np.arange(40.0)}, ConfigError, "name at least two"),
        ({"one": np.arange(40.0), "other": np.ones(40)}, DataError, "as good at other"),
    ],
)
def test_tasks_that_cannot_be_hidden_are_refused(returns, error, message):
    with pytest.raises(error, match=message):
        sampler(returns=returns)


@pytest.fixture
def store(tmp_path: Path):
    with TrajectoryStore.open(two_task_store(tmp_path / "s.h5", [STEPS] * EPISODES)) as opened:
        yield opened


def hidden_config(**changes) -> ChainConfig:
    return ChainConfig(TASKS[0], MEMBERS, action_repeat=1, layout="contiguous", hidden_tasks=TASKS, **changes)


def test_rewards_and_returns_to_go_are_the_drawn_tasks(store):
    config = hidden_config()
    scaling = measure_family_scaling(store, TASKS, 1, 0.95)
    loader = ChainLoader(store, config, scaling, ring=1)
    draw = make_family_sampler(store, config, scaling)
    for task in TASKS:
        plan = draw(3, task)
        target = np.quantile(store.returns(task), 0.95)
        fields = loader.load(plan, slice(0, loader.length))
        rewards = np.stack([store.rewards(episode, task) for episode in plan.episodes])
        np.testing.assert_allclose(fields["reward"], rewards.ravel() * STEPS / target, rtol=1e-5)
        collected = np.concatenate([np.zeros((MEMBERS, 1)), rewards.cumsum(axis=1)[:, :-1]], axis=1)
        np.testing.assert_allclose(
            fields["return_to_go"], (1 - collected / target).ravel(), rtol=1e-4, atol=1e-5
        )
        bearing = [False] * (MEMBERS - plan.leaders) + [True] * plan.leaders
        np.testing.assert_array_equal(fields["weight"], np.repeat(bearing, STEPS))


def test_the_first_step_of_a_batch_does_not_tell_the_task(store):
    config = hidden_config(seed=5)
    scaling = measure_family_scaling(store, TASKS, 1, 0.95)
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    draw = make_sampler(store, config, scaling)
    batch = next(ChainPipeline(ChainLoader(store, config, scaling, 1), draw, 16, mesh))
    tasks = [draw(number).task for number in range(16)]
    assert set(tasks) == set(TASKS)
    first = jax.tree.map(lambda field: np.asarray(field)[:, 0], batch.steps)
    for name in ("return_to_go", "timestep", "trajectory", "position"):
        assert len(set(getattr(first, name).tolist())) == 1, name
    # Observation and action are the trajectory's, whichever task it stands for.
    for row in range(16):
        steps = store.steps(draw(row).episodes[0], 0, 1, TASKS[0])
        np.testing.assert_allclose(first.observation[row], scaling.observation(steps.observation)[0])


def test_scales_make_tasks_alike(store):
    scaling = measure_family_scaling(store, TASKS, 2, 0.95)
    for task in TASKS:
        target = np.quantile(store.returns(task), 0.95)
        own = scaling.for_task(task)
        assert own.return_scale == target
        assert own.reward_scale == target / (STEPS // 2)
        assert own.observation_mean == scaling.observation_mean
    assert scaling.for_task(TASKS[0]) == scaling


def test_a_scaling_of_one_task_is_that_of_any():
    scaling = Scaling((0.0,), (1.0,), 1.0, 1.0)
    assert scaling.for_task("anything") is scaling


def test_a_task_that_nothing_is_good_at_is_refused(tmp_path):
    path = two_task_store(tmp_path / "s.h5", [STEPS] * 4, second=0.0)
    with TrajectoryStore.open(path) as store, pytest.raises(DataError, match="has no good trajectory"):
        measure_family_scaling(store, TASKS, 1, 0.95)
