"""Stores exported to Minari and Parquet: other programs read every value."""

import importlib
import re
import sys
from dataclasses import replace

import h5py
import numpy as np
import pyarrow.compute
import pytest
from pyarrow import parquet

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import StoredEpisode, StoreDescription, TrajectoryStore, write_store
from agentic_ring.errors import ConfigError, DataError, MissingExtraError, UnknownNameError
from data_prep import minari_io, publish
from data_prep.data_card import data_card
from data_prep.minari_io import export_store, import_dataset
from data_prep.relabel import Relabeller
from tests.commands import exit_status
from tests.data.synthetic import TASK, random_store
from tests.data_prep.exploration import uniform_episodes

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
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    path = tmp_path / "jaco.h5"
    write_store(path, StoreDescription(DOMAIN, "mini_random", DOMAIN.tasks), stored)
    return path


def test_minari_opens_the_dataset_and_an_import_restores_the_store(store, stored, tmp_path, capsys):
    import minari

    task, again = "reach_bottom_right", tmp_path / "again.h5"
    assert exit_status(minari_io.main, "export", "--store", store, "--dataset", DATASET, "--task", task) == 0
    assert exit_status(minari_io.main, "import", "--store", again, "--dataset", DATASET) == 0
    assert capsys.readouterr().out.count("2 episodes") == 2
    assert again.read_bytes() == store.read_bytes()
    assert DATASET in minari.list_local_datasets()
    dataset = minari.load_dataset(DATASET)
    assert (dataset.total_episodes, dataset.total_steps) == (2, 500)
    assert "# jaco, collected by mini_random" in (tmp_path / "minari" / DATASET / "README.md").read_text()
    for got, expected in zip(dataset.iterate_episodes(), stored, strict=True):
        episode = expected.episode
        np.testing.assert_array_equal(got.observations, episode.observation)
        np.testing.assert_array_equal(got.actions, episode.action[1:])
        np.testing.assert_array_equal(got.rewards, expected.rewards[task][1:])
        np.testing.assert_array_equal(got.infos["physics"], episode.physics)
        assert not got.terminations.any()
        assert got.truncations.tolist() == [False] * 249 + [True]


def test_export_that_fails_leaves_no_dataset_and_is_taken_up(store, stored, tmp_path):
    odd = tmp_path / "odd.h5"
    episode = replace(stored[1].episode, action=np.ones_like(stored[1].episode.action))
    broken = replace(stored[1], episode=episode, source="odd")
    write_store(odd, StoreDescription(DOMAIN, "mini_random", DOMAIN.tasks), [stored[0], broken])
    with pytest.raises(DataError, match="odd has an action in its reset row"):
        export_store(odd, DATASET)
    with pytest.raises(UnknownNameError, match=r"'swingup'.*reach_top_left"):
        export_store(store, DATASET, task="swingup")
    with pytest.raises(ConfigError, match=r"'exorl jaco' is not a dataset id"):
        export_store(store, "exorl jaco")
    with pytest.raises(DataError, match=r"there is no dataset exorl/other-v0"):
        import_dataset("exorl/other-v0", tmp_path / "x.h5")
    assert pytest.importorskip("minari").list_local_datasets() == {}
    assert export_store(store, DATASET) == 2
    with pytest.raises(ConfigError, match="exists"):
        export_store(store, DATASET)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rewards", lambda array: array + 1, "reach_top_left"),
        ("infos/physics", None, "episode 1: it lacks 'physics'"),
        ("observations", lambda array: array * np.nan, "observation is not finite"),
        ("infos/task_rewards/reach_top_right", lambda array: array[:3], "reach_top_right"),
        ("metadata.json", None, "only datasets that `export` wrote"),
    ],
)
def test_dataset_that_was_changed_is_refused(store, tmp_path, name, change, message):
    export_store(store, DATASET)
    folder = tmp_path / "minari" / DATASET / "data"
    if name == "metadata.json":
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace('"agentic_ring"', '"another"'))
    else:
        with h5py.File(folder / "main_data.hdf5", "a") as file:
            path = f"episode_1/{name}"
            array = file[path][()]
            del file[path]
            if change is not None:
                file[path] = change(array)
    with pytest.raises(DataError, match=message):
        import_dataset(DATASET, tmp_path / "again.h5")
    assert not (tmp_path / "again.h5").exists()


def test_pyarrow_reads_what_was_stored(tmp_path, capsys):
    store = random_store(tmp_path / "cartpole-mix.h5", [20, 30, 10], algorithms=["td3", "ou", "td3"])
    folder = tmp_path / "published"
    assert exit_status(publish.main, "--store", store, "--output", folder) == 0
    assert capsys.readouterr().out == f"{folder}: 3 episodes\n"
    table = parquet.read_table(folder / "data")
    assert table.num_rows == 20 + 30 + 10 + 3
    with TrajectoryStore.open(store) as opened:
        for number, stored in enumerate(opened.episodes()):
            episode, rows = stored.episode, table.filter(pyarrow.compute.field("episode") == number)
            assert rows["step"].to_pylist() == list(range(len(episode) + 1))
            for name in ("observation", "action", "physics"):
                stored_type = rows.schema.field(name).type.value_type.to_pandas_dtype()
                assert stored_type == getattr(episode, name).dtype
                np.testing.assert_array_equal(rows[name].to_pylist(), getattr(episode, name))
            columns = {f"reward_{TASK}": stored.rewards[TASK], "recorded_reward": episode.reward[:, 0]}
            for name, array in (columns | {"discount": episode.discount[:, 0]}).items():
                np.testing.assert_array_equal(rows[name], array)
            for name in ("algorithm", "source"):
                assert set(rows[name].to_pylist()) == {getattr(stored, name)}
        returns = opened.returns(TASK)
        opened.collector = "rnd"
        exorl_card = data_card(opened)
    card = (folder / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", card, re.MULTILINE) == table.column_names
    assert "license: apache-2.0\n" in card
    assert "not ExoRL's data" in card
    assert "license: other\n" in exorl_card
    for algorithm, paid in (("ou", returns[[1]]), ("td3", returns[[0, 2]])):
        summary = f"{np.median(paid):.1f} ({paid.min():.1f} to {paid.max():.1f})"
        assert f"| {algorithm} | {len(paid)} | {summary} |\n" in card
    assert exit_status(publish.main, "--store", store, "--output", folder) == 1
    assert "exists; name a new folder" in capsys.readouterr().err


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    for package in ("minari", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)  # imports then behave as if it were missing
    with pytest.raises(MissingExtraError, match=r"agentic_ring\[minari\]"):
        minari_io.main(minari_io.Import("exorl/walker/rnd-v0", tmp_path / "store.h5"))
    monkeypatch.delitem(sys.modules, "data_prep.publish")
    with pytest.raises(MissingExtraError, match=r"agentic_ring\[parquet\]"):
        importlib.import_module("data_prep.publish")
