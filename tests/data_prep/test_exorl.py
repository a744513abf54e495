"""From a server's zip to the store, on episodes of our own in ExoRL's format and layout."""

import hashlib
import json
import zipfile

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import TrajectoryStore, store_path
from agentic_ring.errors import DataError, UnknownNameError
from data_prep.conversion import ConvertConfig, convert
from data_prep.episode_files import collector_folder, write_episode
from data_prep.exorl import ExorlConfig, main
from tests.data_prep.exploration import uniform_episodes
from tests.data_prep.file_server import FileServer

SMALL_DOMAINS = ("point_mass_maze", "jaco")


@pytest.fixture(scope="module")
def zips(tmp_path_factory):
    """The zip of two episodes of each of the domains, as ExoRL lays it out, and the episodes."""
    made = {}
    for name in SMALL_DOMAINS:
        domain = DOMAINS[name]
        episodes = uniform_episodes(domain, domain.tasks[:1] * 2, action_repeat=10)
        folder = tmp_path_factory.mktemp(name)
        with zipfile.ZipFile(folder / "rnd.zip", "w") as archive:
            for number, episode in enumerate(episodes):
                path = write_episode(folder / "buffer", number, episode)
                archive.write(path, f"buffer/{path.name}")
            archive.writestr("video/0.mp4", b"")
        made[name] = (folder / "rnd.zip").read_bytes(), episodes
    return made


@pytest.fixture
def server(zips):
    with FileServer() as server:
        for name, (content, _) in zips.items():
            server.files[f"/{name}/rnd.zip"] = content
        yield server


def config(root, server, domain="jaco", **changes):
    return ExorlConfig(domain=domain, collector="rnd", data=root, url_base=server.url, **changes)


def test_download_ends_in_a_store_with_the_rewards_that_were_paid(tmp_path, server, zips, capsys):
    name = "jaco"
    server.break_after = 60_000
    assert main(config(tmp_path, server, name, download=True)) == 0
    content, episodes = zips[name]
    with TrajectoryStore.open(store_path(tmp_path, name, "rnd")) as store:
        store.verify()
        assert store.tasks == DOMAINS[name].tasks
        assert store.lengths.tolist() == [DOMAINS[name].episode_steps] * 2
        for stored, episode in zip(store.episodes(), episodes, strict=True):
            np.testing.assert_array_equal(stored.rewards[store.tasks[0]], episode.reward[:, 0])
            np.testing.assert_array_equal(stored.episode.physics, episode.physics)
    folder = collector_folder(tmp_path, name, "rnd")
    assert sorted(path.name for path in folder.iterdir()) == ["buffer", "download.json"]
    record = json.loads((folder / "download.json").read_text())
    assert record == {
        "url": f"{server.url}/{name}/rnd.zip",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "episodes": 2,
        "digest": record["digest"],
    }
    assert record["sha256"] in capsys.readouterr().out


def test_what_is_there_is_not_downloaded_again(tmp_path, server):
    for _ in range(2):
        assert main(config(tmp_path, server, download=True)) == 0
    assert [path for path, _ in server.sent] == ["/jaco/rnd.zip"]


def test_dry_run_lists_sizes_and_fetches_nothing(tmp_path, server, zips, capsys):
    assert main(config(tmp_path, server, dry_run=True)) == 0
    assert f"jaco/rnd.zip  {len(zips['jaco'][0]):,} bytes" in capsys.readouterr().out
    assert main(ExorlConfig("jaco", data=tmp_path, url_base=server.url, dry_run=True)) == 0
    listed = capsys.readouterr().out
    assert listed.count("\n") == 10
    assert "jaco/proto.zip  not on the server" in listed
    assert server.sent == []
    assert list(tmp_path.iterdir()) == []


def test_unknown_collector_and_missing_zip_are_named(tmp_path, server):
    with pytest.raises(UnknownNameError, match=r"'mix'.*proto"):
        main(ExorlConfig("jaco", "mix", data=tmp_path, url_base=server.url, download=True))
    with pytest.raises(DataError, match=r"there is no http.*/walker/rnd\.zip"):
        main(config(tmp_path, server, "walker", download=True))


def test_mazes_recorded_rewards_of_four_tasks_are_read(tmp_path, zips):
    _, (episode, _) = zips["point_mass_maze"]
    path = write_episode(collector_folder(tmp_path, "point_mass_maze", "rnd") / "buffer", 0, episode)
    with np.load(path) as file:
        arrays = dict(file)
    arrays["reward"] = np.repeat(arrays["reward"], 4, axis=1)
    np.savez_compressed(path, **arrays)
    summary = convert(ConvertConfig("point_mass_maze", "rnd", data=tmp_path))
    assert summary.skipped == ()
    with TrajectoryStore.open(summary.store) as store:
        np.testing.assert_array_equal(store.episode(0).episode.reward, episode.reward)
