"""A collection: its folders, files and labels, and what stops and continues it."""

import json
import multiprocessing
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS, flatten_observation, load_environment, parse_task
from agentic_ring.data.recorded_environments import VectorEnvironments, open_environments
from agentic_ring.data.rewards.tasks import task_reward
from agentic_ring.data.store import NOISE_ALGORITHMS, TrajectoryStore
from agentic_ring.data.trajectories import detect_action_repeat
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.training.td3 import TD3Config
from data_prep.collect import _POPULATIONS, PLANS, CollectConfig, Collection, collect
from data_prep.conversion import ConvertConfig, convert
from data_prep.episode_files import (
    CollectionFolder,
    collector_folder,
    episode_file,
    read_episode,
    read_labels,
)
from data_prep.population import LEARNED
from data_prep.relabel import Relabeller
from data_prep.stores import prepare_store

DOMAIN = DOMAINS["cartpole"]


def contents(root):
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".h5")
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_mix_keeps_what_saw_a_reward_apart_from_what_saw_none(tmp_path, monkeypatch):
    monkeypatch.setitem(PLANS, "cartpole", replace(PLANS["cartpole"], updates=2))
    monkeypatch.setattr("data_prep.collect.TD3Config", partial(TD3Config, hidden=32, batch=32))
    # The noise suffices for learners to start at once.
    size = {"episodes": 10, "action_repeat": 4, "members": 2, "environments": 1}
    asked = CollectConfig("cartpole", **size, seed=3, output=tmp_path)
    collection = collect(asked)
    folders = [collector_folder(tmp_path, "cartpole", name) for name in ("mix_reward_free", "mix")]
    assert [folder.path for folder in collection.folders.values()] == folders
    lines = ((folder / "episodes.jsonl").read_text().splitlines() for folder in folders)
    free, seen = ([json.loads(line) for line in each] for each in lines)
    assert Counter(label["job"] for label in free) == {"random": 2, "ou": 2, "rnd": 4}
    assert Counter(label["job"] for label in seen) == {"td3": 6}
    assert {label["task"] for label in free} == {None}
    assert {label["task"] for label in seen} == {"cartpole_swingup"}
    assert {label["learner_seed"] for label in seen} == {3000, 3001}
    assert collection.finished() == len(free) + len(seen) == 14
    relabeller = Relabeller(DOMAIN, ["swingup"])
    for folder in folders:
        assert json.loads((folder / "collection.json").read_text())["label"] == "exorl-mini (ours)"
        assert not (folder / "resume").exists()
        files = sorted((folder / "buffer").iterdir())
        assert [file.name for file in files] == [f"episode_{n:06d}_1000.npz" for n in range(len(files))]
        for file in files:
            episode = read_episode(episode_file(file), DOMAIN)
            relabeller.check_physics(episode)
            np.testing.assert_array_equal(relabeller.rewards(episode)["swingup"], episode.reward[:, 0])
    assert (seen[-1]["algorithm"], seen[-1]["action_noise"]) == ("td3", 0.0)
    with TrajectoryStore.open(convert(ConvertConfig("cartpole", "mix", data=tmp_path)).store) as store:
        assert set(store.action_repeats.tolist()) == {4}
        expected = {f"mix_reward_free/{label['file']}": label["algorithm"] for label in free}
        expected |= {f"mix/{label['file']}": label["algorithm"] for label in seen}
        assert dict(zip(store.sources, store.algorithms, strict=True)) == expected
        noise = [algorithm in NOISE_ALGORITHMS for algorithm in store.algorithms]
        assert 4 <= sum(noise) < store.num_episodes / 2
    before = contents(tmp_path)
    assert collect(asked).finished() == 14
    with pytest.raises(ConfigError, match=r"collected with .'seed': 3.*'seed': 4"):
        collect(replace(asked, seed=4))
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_family_that_was_stopped_and_started_again_writes_the_same_files(tmp_path, monkeypatch):
    plan = replace(PLANS["cartpole"], family_episodes=24)  # three rounds, of which the first explores
    monkeypatch.setitem(PLANS, "cartpole", plan)
    monkeypatch.setitem(_POPULATIONS, "family", 2)
    monkeypatch.setattr("data_prep.collect._NARROW", TD3Config(hidden=32, batch=32))
    monkeypatch.setattr("data_prep.stores.usable_cores", lambda: 1)
    with TrajectoryStore.open(prepare_store(DOMAIN, tmp_path / "whole", None, own="family")) as store:
        assert Counter(store.algorithms) == {"random": 8, "td3": 16}
    add_round = CollectionFolder.add_round

    def stopped(folder, job, done, *rest):
        if done == 3:
            raise KeyboardInterrupt
        add_round(folder, job, done, *rest)

    asked = CollectConfig("cartpole", "family", output=tmp_path / "parts")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CollectionFolder, "add_round", stopped)
        collect(asked)
    # Another default number does not change a collection that has begun.
    monkeypatch.setitem(PLANS, "cartpole", replace(plan, family_episodes=8))
    prepare_store(DOMAIN, tmp_path / "parts", None, own="family")
    assert contents(tmp_path / "parts" / "exorl") == contents(tmp_path / "whole" / "exorl")
    folder = collector_folder(tmp_path / "parts", "cartpole", "mini_family")
    noise = [(label.task, label.action_noise) for label in read_labels(folder)]
    assert noise == 3 * [(name, scale) for name in LEARNED["cartpole"] for scale in (0.0, 0.3)]


@pytest.mark.parametrize("given", [{"tasks": ("swingup",)}, {"members": 2}])
def test_the_members_of_a_family_cannot_be_chosen(given):
    with pytest.raises(ConfigError, match=rf"{next(iter(given))}.*is given.*leave it out"):
        CollectConfig("cartpole", "family", **given)


def test_a_long_collection_learns_tasks_beside_the_family():
    (job,) = Collection(CollectConfig("walker", "long")).jobs
    assert list(job.rewards)[: len(LEARNED["walker"])] == list(LEARNED["walker"])
    assert list(job.rewards)[-4:] == [f"walker_{name}" for name in ("run", "walk", "flip", "run_backward")]
    assert (job.folder, len(job.tasks), job.rounds) == ("mini_long", 26, 308)
    with pytest.raises(ConfigError, match="long are known for jaco; use family"):
        CollectConfig("jaco", "long")


def test_episodes_from_elsewhere_are_not_touched(tmp_path):
    buffer = collector_folder(tmp_path, "cartpole", "mini_ou") / "buffer"
    buffer.mkdir(parents=True)
    (buffer / "episode_000000_1000.npz").write_bytes(b"precious")
    with pytest.raises(ConfigError, match=r"episodes that data_prep.collect did not write"):
        collect(CollectConfig("cartpole", "ou", output=tmp_path))
    assert (buffer / "episode_000000_1000.npz").read_bytes() == b"precious"


def test_noise_explores_with_the_plan_of_its_domain(tmp_path):
    size = {"episodes": 2, "members": 2, "environments": 1}
    collection = collect(CollectConfig("walker", "random", **size, output=tmp_path))
    files = sorted(collection.folders["mini_random"].buffer.iterdir())
    first, second = (read_episode(episode_file(file), DOMAINS["walker"]) for file in files)
    assert detect_action_repeat(first.action[1:]) == 4
    assert not np.array_equal(first.physics[0], second.physics[0])


def test_episodes_are_those_of_dm_control_without_action_repeat_each_of_its_own_task():
    tasks, action_repeat = [parse_task("walker_walk"), parse_task("walker_run")], 7  # of 1000 steps
    domain = tasks[0].domain
    environments = VectorEnvironments(domain, tasks, [*map(task_reward, tasks[::-1])], action_repeat)
    generator = np.random.default_rng(0)
    actions = generator.uniform(-1.5, 1.5, (environments.decisions, 2, domain.action_dim))
    first = environments.reset([7, 8])
    following, rewards = zip(*map(environments.step, actions), strict=True)
    observations = np.stack([first, *following])
    decided = np.append(np.arange(0, 1000, action_repeat), 1000)
    for number, (seed, episode) in enumerate(zip([7, 8], environments.episodes(), strict=True)):
        assert (len(episode), detect_action_repeat(episode.action[1:])) == (1000, action_repeat)
        environment = load_environment(tasks[number], seed)
        held = np.clip(actions[:, number], -1, 1).astype(np.float32).repeat(action_repeat, axis=0)[:1000]
        time_step = environment.reset()
        seen, physics = [flatten_observation(time_step.observation)], [environment.physics.get_state().copy()]
        paid = [0.0]
        for action in held:
            time_step = environment.step(action)
            paid.append(np.float32(time_step.reward))
            seen.append(flatten_observation(time_step.observation))
            physics.append(environment.physics.get_state().copy())
        assert time_step.last()
        expected = seen, [np.zeros_like(held[0]), *held], np.c_[paid], np.ones((1001, 1)), physics
        names = "observation", "action", "reward", "discount", "physics"
        for name, array in zip(names, expected, strict=True):
            np.testing.assert_array_equal(getattr(episode, name), array)
        np.testing.assert_array_equal(observations[:, number], episode.observation[decided])
        sums = np.add.reduceat(np.float64(paid[1:]), decided[:-1]).astype(np.float32)
        np.testing.assert_array_equal(np.stack(rewards)[:, number, 1 - number], sums)


def test_processes_step_as_one_does_and_the_death_of_one_is_reported():
    task = parse_task("cartpole_swingup")
    settings = DOMAIN, [task] * 2, [task_reward(task), *LEARNED["cartpole"].values()], 100
    before = set(multiprocessing.active_children())
    with (
        pytest.raises(DataError, match=r"one of the 2 processes that step environments died.*--processes"),
        open_environments(*settings, 1) as one,
        open_environments(*settings, 5) as several,  # more than environments are as many
    ):
        np.testing.assert_array_equal(one.reset([1, 2]), several.reset([1, 2]))
        for mine, theirs in zip(one.step(np.ones((2, 1))), several.step(np.ones((2, 1))), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        for mine, theirs in zip(one.episodes(), several.episodes(), strict=True):
            np.testing.assert_array_equal(mine.physics, theirs.physics)
        first, _ = set(multiprocessing.active_children()) - before
        first.kill()
        first.join()
        several.reset([1, 2])
    assert set(multiprocessing.active_children()) <= before
