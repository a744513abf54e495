import json
import os
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import StoredEpisode, StoreDescription, write_store
from agentic_ring.errors import ConfigError, DataError, UnknownNameError
from data_prep.relabel import Relabeller
from tests.commands import exit_status
from tests.data_prep.exploration import uniform_episodes

pytest.importorskip("minari")
import minari

from data_prep.minari_io import export_store, import_dataset, main

DOMAIN = DOMAINS["jaco"]
DATASET = "exorl/jaco/mini_random-v0"


@pytest.fixture(scope="module")
def stored():
    episodes = uniform_episodes(DOMAIN, ("reach_top_left", "reach_bottom_right"), action_repeat=5)
    relabeller = Relabeller(DOMAIN, DOMAIN.tasks)
    return [
        StoredEpisode(episode, relabeller.rewards(episode), algorithm, 5, f"mini/{number}.npz")
        for number, (episode, algorithm) in enumerate(zip(episodes, ("rnd", "ou"), strict=True))
    ]


@pytest.fixture
def store(stored, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    path = tmp_path / "jaco.h5"
    write_store(path, StoreDescription(DOMAIN, "mini_random", DOMAIN.tasks), stored)
    return path


def test_minari_opens_the_dataset(store, stored):
    export_store(store, DATASET, task="reach_bottom_right")
    assert DATASET in minari.list_local_datasets()
    dataset = minari.load_dataset(DATASET)
    assert (dataset.total_episodes, dataset.total_steps) == (2, 500)
    assert dataset.observation_space.shape == (42,)
    card = (Path(os.environ["MINARI_DATASETS_PATH"]) / DATASET / "README.md").read_text()
    assert "# jaco, collected by mini_random: 2 episodes" in card
    for got, expected in zip(dataset.iterate_episodes(), stored, strict=True):
        episode = expected.episode
        np.testing.assert_array_equal(got.observations, episode.observation)
        np.testing.assert_array_equal(got.actions, episode.action[1:])
        np.testing.assert_array_equal(got.rewards, expected.rewards["reach_bottom_right"][1:])
        np.testing.assert_array_equal(got.infos["physics"], episode.physics)
        assert not got.terminations.any()
        assert got.truncations.tolist() == [False] * 249 + [True]


def test_export_that_was_stopped_leaves_no_dataset_and_is_taken_up(store, stored, tmp_path):
    odd = tmp_path / "odd.h5"
    action = stored[1].episode.action.copy()
    action[0] = 1
    broken = replace(stored[1], episode=replace(stored[1].episode, action=action), source="odd")
    write_store(odd, StoreDescription(DOMAIN, "mini_random", DOMAIN.tasks), [stored[0], broken])
    with pytest.raises(DataError, match="odd has an action in its reset row"):
        export_store(odd, DATASET)
    assert minari.list_local_datasets() == {}
    assert export_store(store, DATASET) == 2
    with pytest.raises(ConfigError, match="exists"):
        export_store(store, DATASET)


def test_bad_names_are_named(store, tmp_path):
    with pytest.raises(UnknownNameError, match=r"'swingup'.*reach_top_left"):
        export_store(store, DATASET, task="swingup")
    with pytest.raises(ConfigError, match=r"'exorl jaco' is not a dataset id"):
        export_store(store, "exorl jaco")
    with pytest.raises(DataError, match=r"there is no dataset exorl/other-v0"):
        import_dataset("exorl/other-v0", tmp_path / "x.h5")


CHANGES = {
    "rewards": (lambda array: array + 1, "reach_top_left"),
    "infos/physics": (None, "episode 1: it lacks 'physics'"),
    "observations": (lambda array: array * np.nan, "observation is not finite"),
    "infos/task_rewards/reach_top_right": (lambda array: array[:3], "reach_top_right"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_dataset_that_was_changed_is_refused(store, tmp_path, name):
    change, message = CHANGES[name]
    export_store(store, DATASET)
    with h5py.File(tmp_path / "minari" / DATASET / "data" / "main_data.hdf5", "a") as file:
        group = file["episode_1"]
        array = group[name][()]
        del group[name]
        if change is not None:
            group[name] = change(array)
    with pytest.raises(DataError, match=message):
        import_dataset(DATASET, tmp_path / "again.h5")
    assert not (tmp_path / "again.h5").exists()


def test_dataset_of_others_is_refused(store, tmp_path):
    export_store(store, DATASET)
    path = tmp_path / "minari" / DATASET / "data" / "metadata.json"
    metadata = json.loads(path.read_text())
    del metadata["agentic_ring"]
    path.write_text(json.dumps(metadata))
    with pytest.raises(DataError, match="only datasets that `export` wrote"):
        import_dataset(DATASET, tmp_path / "again.h5")


def test_command_line_goes_both_ways(store, tmp_path, capsys):
    again = tmp_path / "again.h5"
    assert exit_status(main, "export", "--store", store, "--dataset", DATASET) == 0
    assert exit_status(main, "import", "--dataset", DATASET, "--store", again) == 0
    assert capsys.readouterr().out.count("2 episodes") == 2
    assert again.read_bytes() == store.read_bytes()
