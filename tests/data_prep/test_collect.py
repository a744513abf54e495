"""A collection: its folders, files and labels, and what stops and continues it."""

import hashlib
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import NOISE_ALGORITHMS, TrajectoryStore
from agentic_ring.errors import ConfigError
from data_prep.collect import PLANS, CollectConfig, collect
from data_prep.conversion import ConvertConfig, convert
from data_prep.episode_files import CollectionFolder, collector_folder, episode_file, read_episode
from data_prep.relabel import Relabeller

DOMAIN = DOMAINS["cartpole"]
SMALL = {"domain": "cartpole", "members": 2, "environments": 1, "seed": 3}
SIZE = {"episodes": 10, "action_repeat": 4}  # the noise suffices for learners to start at once


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PLANS, "cartpole", replace(PLANS["cartpole"], updates=2))
        return root, collect(CollectConfig(**SMALL, **SIZE, output=root))


def labels_of(folder):
    return [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]


def digests(root):
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix != ".h5"
    }


@pytest.mark.slow
def test_mix_keeps_what_saw_a_reward_apart_from_what_saw_none(mixed):
    root, summary = mixed
    reward_free, rewarded = summary.folders
    assert rewarded == collector_folder(root, "cartpole", "mix")
    assert reward_free == collector_folder(root, "cartpole", "mix_reward_free")
    free, seen = labels_of(reward_free), labels_of(rewarded)
    assert Counter(label["job"] for label in free) == {"random": 2, "ou": 2, "rnd": 4}
    assert Counter(label["job"] for label in seen) == {"td3": 6}
    assert all(label["task"] is None for label in free)
    assert {label["task"] for label in seen} == {"cartpole_swingup"}
    assert {label["learner_seed"] for label in seen} == {3000, 3001}
    assert {label["algorithm"] for label in free} <= {"random", "ou", "rnd"}
    assert summary.episodes == len(free) + len(seen) == 14
    relabeller = Relabeller(DOMAIN, ["swingup"])
    for folder in summary.folders:
        assert json.loads((folder / "collection.json").read_text())["label"] == "exorl-mini (ours)"
        assert not (folder / "resume").exists()
        assert {label["data"] for label in labels_of(folder)} == {"exorl-mini (ours)"}
        files = sorted((folder / "buffer").iterdir())
        assert [file.name for file in files] == [f"episode_{n:06d}_1000.npz" for n in range(len(files))]
        for file in files:
            episode = read_episode(episode_file(file), DOMAIN)
            relabeller.check_physics(episode)
            assert episode.action_repeat % 4 == 0
            np.testing.assert_array_equal(relabeller.rewards(episode)["swingup"], episode.reward[:, 0])


@pytest.mark.slow
def test_store_of_the_mix_holds_both_folders_with_their_labels(mixed):
    root, summary = mixed
    with TrajectoryStore.open(convert(ConvertConfig("cartpole", "mix", data=root)).store) as store:
        assert store.num_episodes == summary.episodes
        assert set(store.action_repeats.tolist()) == {4}
        expected = {
            f"{folder.name}/{label['file']}": label["algorithm"]
            for folder in summary.folders
            for label in labels_of(folder)
        }
        assert dict(zip(store.sources, store.algorithms, strict=True)) == expected
        noise = [algorithm in NOISE_ALGORITHMS for algorithm in store.algorithms]
        assert 4 <= sum(noise) < store.num_episodes / 2
    # Once it learns, a member without exploration noise acts by its policy: seldom at random.
    folder = summary.folders[1]
    last = labels_of(folder)[-1]
    assert (last["algorithm"], last["action_noise"]) == ("td3", 0.0)
    action = read_episode(episode_file(folder / "buffer" / last["file"]), DOMAIN).action[1::4, 0]
    random = np.random.default_rng(0).uniform(-1, 1, len(action))
    assert np.abs(np.diff(action)).mean() < np.abs(np.diff(random)).mean()


@pytest.mark.slow
def test_complete_collection_is_left_alone(mixed):
    root, summary = mixed
    before = digests(root)
    again = collect(CollectConfig(**SMALL, **SIZE, output=root))
    assert again.episodes == summary.episodes
    with pytest.raises(ConfigError, match=r"collected with .'seed': 3.*'seed': 4"):
        collect(CollectConfig(**SMALL | {"seed": 4}, **SIZE, output=root))
    assert digests(root) == before


def test_episodes_from_elsewhere_are_not_touched(tmp_path):
    buffer = collector_folder(tmp_path, "cartpole", "mini_ou") / "buffer"
    buffer.mkdir(parents=True)
    (buffer / "episode_000000_1000.npz").write_bytes(b"precious")
    with pytest.raises(ConfigError, match=r"episodes that data_prep.collect did not write"):
        collect(CollectConfig(**SMALL, collector="ou", episodes=2, output=tmp_path))
    assert (buffer / "episode_000000_1000.npz").read_bytes() == b"precious"


def test_noise_explores_with_the_plan_of_its_domain(tmp_path):
    size = {"episodes": 2, "members": 2, "environments": 1}
    summary = collect(CollectConfig("walker", "random", **size, output=tmp_path))
    assert summary.episodes == 2
    files = sorted(summary.folders[0].glob("buffer/*"))
    first, second = (read_episode(episode_file(file), DOMAINS["walker"]) for file in files)
    assert first.action_repeat == 4
    assert not np.array_equal(first.physics[0], second.physics[0])
    assert abs(first.action.mean()) < 0.1


@pytest.mark.slow
def test_interrupted_explorer_goes_on_in_other_processes_as_if_it_had_never_stopped(tmp_path, monkeypatch):
    """Learning starts in the third round of four, and the interruption comes after it."""

    def collected(name, processes):
        size = {"episodes": 8, "action_repeat": 4, "members": 1, "environments": 2, "processes": processes}
        return collect(CollectConfig("cartpole", "diayn", **size, output=tmp_path / name))

    whole = collected("whole", processes=1)
    assert {label["algorithm"] for label in labels_of(whole.folders[0])} == {"random", "diayn"}

    def interrupted(folder, job, done, *contents):
        if done == 4:
            raise KeyboardInterrupt
        add_round(folder, job, done, *contents)

    add_round = CollectionFolder.add_round
    monkeypatch.setattr(CollectionFolder, "add_round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collected("stopped", processes=1)
    monkeypatch.undo()
    stopped = collected("stopped", processes=5)  # more than environments are as many
    assert stopped.episodes == whole.episodes == 8
    assert digests(tmp_path / "stopped") == digests(tmp_path / "whole")
