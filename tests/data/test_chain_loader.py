import json
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.data.chain_loader import ChainConfig, ChainLoader, ChainPipeline
from agentic_ring.data.hindsight_chains import ChainPlan, StratifiedSampler
from agentic_ring.data.store import Scaling, TrajectoryStore, measure_scaling
from agentic_ring.errors import DataError
from agentic_ring.mesh import MeshShape, make_mesh
from tests.data.synthetic import DOMAIN, TASK, random_store

UNSCALED = Scaling((0.0,) * DOMAIN.observation_dim, (1.0,) * DOMAIN.observation_dim, 1.0, 1.0)
config = partial(ChainConfig, TASK, action_repeat=1)


def whole(store: TrajectoryStore, plan: ChainPlan, **changes) -> dict[str, np.ndarray]:
    chains = config(len(plan.episodes), layout="contiguous", **changes)
    loader = ChainLoader(store, chains, UNSCALED, ring=1)
    return loader.load(plan, slice(0, loader.length))


def test_all_trajectories_of_a_chain_are_relabelled_to_the_best_return(tmp_path):
    with TrajectoryStore.open(random_store(tmp_path / "s.h5", [5, 3, 4])) as store:
        returns = store.returns(TASK)
        episodes = tuple(int(e) for e in np.argsort(returns))
        fields = whole(store, ChainPlan(episodes, returns.max()), loss_extent="all")
        start = 0
        for number, episode in enumerate(episodes):
            length = int(store.lengths[episode])
            own = slice(start, start + length)
            steps = store.steps(episode, 0, length, TASK)
            assert fields["return_to_go"][start] == np.float32(returns.max())
            np.testing.assert_array_equal(fields["timestep"][own], np.arange(length))
            assert (fields["trajectory"][own] == number).all()
            np.testing.assert_array_equal(fields["observation"][own], steps.observation)
            np.testing.assert_array_equal(fields["action"][own], steps.action)
            np.testing.assert_allclose(fields["reward"][own], steps.reward, rtol=1e-6)
            start += length
        np.testing.assert_array_equal(np.flatnonzero(fields["completion"]), [11])
        # Ragged trajectories stand without gaps; what is left of the capacity is padding without loss.
        np.testing.assert_array_equal(fields["position"], [*range(12), -1, -1, -1])
        np.testing.assert_array_equal(fields["weight"], [1.0] * 12 + [0.0] * 3)


def test_held_actions_become_decisions(tmp_path):
    with TrajectoryStore.open(random_store(tmp_path / "s.h5", [10, 8], action_repeat=4)) as store:
        fields = whole(store, ChainPlan((0, 1), 9.0), action_repeat=4)
        rewards = store.rewards(0, TASK)
        np.testing.assert_allclose(
            fields["reward"][:3], [rewards[:4].sum(), rewards[4:8].sum(), rewards[8:].sum()], rtol=1e-6
        )
        steps = store.steps(0, 0, 10, TASK)
        np.testing.assert_array_equal(fields["observation"][:3], steps.observation[[0, 4, 8]])
        np.testing.assert_array_equal(fields["action"][:3], steps.action[[0, 4, 8]])
        with pytest.raises(DataError, match="hold an action for 4 steps"):  # not for 8
            ChainLoader(store, config(2, action_repeat=8), UNSCALED, ring=1)


@pytest.mark.parametrize(
    ("extent", "demonstrations", "expected"),
    [("all", 1, [0, 1, 1]), ("leaders", 1, [0, 0, 1]), ("leaders", 3, [0, 1, 1])],
)
def test_noise_and_all_but_demonstrations_bear_no_loss(tmp_path, extent, demonstrations, expected):
    path = random_store(tmp_path / "s.h5", [3, 3, 3], algorithms=["ou", "rnd", "td3"])
    with TrajectoryStore.open(path) as store:
        fields = whole(store, ChainPlan((0, 1, 2), 3.0, demonstrations), loss_extent=extent)
        np.testing.assert_array_equal(fields["weight"], np.repeat(expected, 3))


@given(st.data())
def test_shards_of_any_ring_make_up_the_whole_chain(tmp_path_factory, data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=5))
    choices = ([1, 2], [1, 2, 4], ["zigzag", "contiguous"])
    repeat, ring, layout = (data.draw(st.sampled_from(each)) for each in choices)
    path = random_store(tmp_path_factory.mktemp("store") / "s.h5", lengths, action_repeat=repeat)
    with TrajectoryStore.open(path) as store:
        plan = ChainPlan(tuple(range(len(lengths))), 5.0)
        expected = whole(store, plan, action_repeat=repeat)
        chains = config(len(lengths), action_repeat=repeat, layout=layout)
        loader = ChainLoader(store, chains, UNSCALED, ring)
        block = loader.length // ring
        shards = [loader.load(plan, slice(i * block, (i + 1) * block)) for i in range(ring)]
        steps = int((expected["position"] >= 0).sum())
        for name in expected:
            joined = np.concatenate([shard[name] for shard in shards])[np.argsort(loader.order)]
            np.testing.assert_array_equal(joined[:steps], expected[name][:steps])


def test_batches_do_not_depend_on_the_mesh_and_go_on_from_a_state(tmp_path):
    with TrajectoryStore.open(random_store(tmp_path / "s.h5", [16, 16, 16, 16])) as store:

        def next_batches(shape: MeshShape, devices, state=None) -> list:
            mesh = make_mesh(shape, devices)
            loader = ChainLoader(store, config(2), UNSCALED, mesh.shape["ring"])
            sampler = StratifiedSampler(store.returns(TASK), store.learnable, 2, 0.5, seed=3)
            batches = ChainPipeline(loader, sampler, 4, mesh)
            if state is not None:
                batches.set_state(state)
            undo, made = np.argsort(loader.order), []
            for _ in range(3):
                states.append(json.loads(json.dumps(batches.get_state())))
                made.append(jax.tree.map(lambda x: np.asarray(x)[:, undo], next(batches)))
            return made

        states, devices = [], jax.devices()
        expected = next_batches(MeshShape(), devices[:1])
        ours = next_batches(MeshShape(data=2, fsdp=2, ring=2), devices)
        resumed = next_batches(MeshShape(), devices[:1], states[1])
        jax.tree.map(np.testing.assert_array_equal, ours + resumed[:2], expected + expected[1:])


def test_scaling_brings_observations_to_order_one(tmp_path):
    with TrajectoryStore.open(random_store(tmp_path / "s.h5", [300, 200])) as store:
        scaling = measure_scaling(store, TASK, action_repeat=1)
        steps = [store.steps(e, 0, int(n), TASK).observation for e, n in enumerate(store.lengths)]
        scaled = scaling.observation(np.concatenate(steps))
        np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(scaled.std(axis=0), 1, atol=1e-5)
        assert scaling.return_scale == store.returns(TASK).max()
