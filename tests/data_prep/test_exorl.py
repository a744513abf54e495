"""ExoRL's archives from a server to the store: what is resumed, unpacked and refused.

The episodes are our own, in ExoRL's format and layout; the server can fail as real ones do.
"""

import hashlib
import io
import json
import re
import stat
import zipfile
from functools import partial

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import TrajectoryStore, store_path
from agentic_ring.errors import DataError, UnknownNameError
from data_prep.episode_files import collector_folder, episode_file, read_episode, write_episode
from data_prep.exorl import ExorlConfig, download, http_client, look_up, main, unpack_episodes
from tests.data_prep.exploration import uniform_episodes
from tests.local_server import LocalServer, QuietHandler

CONTENT = np.random.default_rng(0).bytes(300_000)


class FileServer(LocalServer):
    """Serves files by path, which may be changed while it runs, as a server that may fail."""

    def __init__(self):
        super().__init__(_Handler)
        self.files = {"/file": CONTENT}
        self.break_after: int | None = None  # bytes after which a connection is cut
        self.ranges = True  # whether it can send the rest of a file
        self.sent: list[tuple[str, int]] = []  # of each GET, the path and the first byte it was asked for


class _Handler(QuietHandler):
    server: FileServer

    def do_GET(self):
        served = self.server
        content = served.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        etag = f'"{hash(content)}"'
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        resumed = asked and served.ranges and self.headers.get("If-Range", etag) == etag
        first = int(asked[1]) if resumed else 0
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("ETag", etag)
        self.end_headers()
        if self.command == "GET":
            served.sent.append((self.path, int(asked[1]) if asked else 0))
            end = len(content) if served.break_after is None else first + served.break_after
            self.wfile.write(content[first:end])

    do_HEAD = do_GET


@pytest.fixture
def server():
    with FileServer() as server:
        yield server


def fetch(server, path, advance=lambda done: None):
    with http_client() as client:
        return download(client, look_up(client, f"{server.url}/file"), path, advance)


def test_broken_downloads_are_taken_up_where_they_broke(server, tmp_path):
    server.break_after = 100_000
    path = tmp_path / "there" / "file"
    assert fetch(server, path) == fetch(server, path) == hashlib.sha256(CONTENT).hexdigest()
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["file"]
    assert [first for _, first in server.sent] == [0, 100_000, 200_000]  # the second fetch needs nothing

    def stop(done):
        if done >= 100_000:
            raise KeyboardInterrupt

    path.unlink()
    with pytest.raises(KeyboardInterrupt):
        fetch(server, path, stop)
    assert not path.exists()
    left = path.with_name("file.part").stat().st_size
    fetch(server, path)
    assert path.read_bytes() == CONTENT
    assert ("/file", left) in server.sent[3:]


@pytest.mark.parametrize("ranges", [True, False])
def test_part_that_cannot_be_continued_is_thrown_away(server, tmp_path, ranges):
    """As the file has another version, or the server sends no ranges."""
    server.ranges, server.break_after = ranges, 0
    with pytest.raises(DataError, match="0 of 300,000 bytes"):
        fetch(server, tmp_path / "file")
    assert len(server.sent) == 3
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    server.break_after = None
    server.files["/file"] = CONTENT[::-1] if ranges else CONTENT
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == server.files["/file"]


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def test_only_episodes_that_are_missing_or_differ_are_written(tmp_path):
    archive, buffer = tmp_path / "rnd.zip", tmp_path / "buffer"
    members = {"rnd/buffer/a.npz": b"1", "rnd/buffer/b.npz": b"2", "c.npz": b"3", "rnd/video/c.mp4": b"3"}
    archive.write_bytes(zipped(members))
    assert unpack_episodes(archive, buffer) == 3
    kept = (buffer / "a.npz").stat().st_mtime_ns
    (buffer / "b.npz").write_bytes(b"x")
    (buffer / "c.npz").unlink()
    assert unpack_episodes(archive, buffer) == 3
    assert (buffer / "a.npz").stat().st_mtime_ns == kept
    found = {path.name: path.read_bytes() for path in buffer.iterdir()}
    assert found == {"a.npz": b"1", "b.npz": b"2", "c.npz": b"3"}


GOOD = zipped({"buffer/a.npz": b"content"})
TWO = zipped({"a.npz": b"1", "b.npz": b"2"})
LINK = zipfile.ZipInfo("buffer/a.npz")
LINK.external_attr = (stat.S_IFLNK | 0o777) << 16


def changed(position, replacement, content=GOOD):
    """Replaces bytes ``position`` after the first mark of the table of contents."""
    place = content.index(b"PK\x01\x02") + position
    return content[:place] + replacement + content[place + len(replacement) :]


BAD_ZIPS = {
    "content": (GOOD.replace(b"content", b"contend"), "CRC"),
    # Zeros for the CRC and the stored length, which fit each other, in the table of contents.
    "empty member": (changed(16, bytes(8)), "a.npz has 0 bytes"),
    # The first member's comment reaches to the end of the table of contents, and beyond.
    "hidden member": (changed(32, b"\xff\xff", TWO), "has 2 entries, 1 readable"),
    "link": (zipped({LINK: "/etc/passwd"}), "a link"),
    "encrypted": (changed(8, b"\x01"), "encrypted"),
    "large": (changed(24, b"\xff\xff\xff\x7f"), "has 1 to 67,108,864"),
    "empty": (zipped({"a.npz": b""}), "of 0 bytes"),
    "no episode": (zipped({"video/a.mp4": b"1"}), "no .npz"),
    "same name": (zipped({"a/1.npz": b"1", "b/1.npz": b"2"}), "1.npz"),
}
for outside in ("/etc/x.npz", "buffer/../../x.npz", "..\\x.npz", "C:\\x.npz"):
    BAD_ZIPS[outside] = (zipped({"a.npz": b"1", outside: b"2"}), "outside")


@pytest.mark.parametrize(("content", "reason"), BAD_ZIPS.values(), ids=BAD_ZIPS.keys())
def test_bad_zip_is_named(tmp_path, content, reason):
    archive = tmp_path / "rnd.zip"
    archive.write_bytes(content)
    with pytest.raises(DataError, match=rf"rnd\.zip .*{reason}"):
        unpack_episodes(archive, tmp_path / "in" / "buffer")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["rnd.zip"]


def test_download_ends_in_a_store_with_the_rewards_that_were_paid(tmp_path, server, capsys):
    jaco, data = DOMAINS["jaco"], tmp_path / "data"
    episodes = uniform_episodes(jaco, jaco.tasks[:1] * 2, action_repeat=10)
    paths = [write_episode(tmp_path, number, episode) for number, episode in enumerate(episodes)]
    members = {f"buffer/{path.name}": path.read_bytes() for path in paths}
    content = server.files["/jaco/rnd.zip"] = zipped(members | {"video/0.mp4": b""})
    config = partial(ExorlConfig, "jaco", data=data, url_base=server.url)
    assert main(config("rnd", dry_run=True)) == main(config("mix", dry_run=True)) == 0
    one, total, *listed = capsys.readouterr().out.splitlines()
    assert one == f"jaco/rnd.zip  {len(content):,} bytes"
    assert total.startswith(f"total {len(content):,} bytes")
    assert {"jaco/proto.zip  not on the server", one, total} <= set(listed)
    assert server.sent == []
    assert not data.exists()

    server.break_after = 60_000
    assert main(config("rnd", download=True)) == 0
    with TrajectoryStore.open(store_path(data, "jaco", "rnd")) as store:
        store.verify()
        assert store.tasks == jaco.tasks
        for stored, episode in zip(store.episodes(), episodes, strict=True):
            np.testing.assert_array_equal(stored.rewards[store.tasks[0]], episode.reward[:, 0])
            np.testing.assert_array_equal(stored.episode.physics, episode.physics)
    folder = collector_folder(data, "jaco", "rnd")
    assert sorted(path.name for path in folder.iterdir()) == ["buffer", "download.json"]
    digest = json.loads((folder / "download.json").read_text())["sha256"]
    assert digest == hashlib.sha256(content).hexdigest()
    assert f"{server.url}/jaco/rnd.zip: 2 episodes, sha256 {digest}" in capsys.readouterr().out
    sent = len(server.sent)
    assert main(config("rnd", download=True)) == 0
    assert len(server.sent) == sent, "what is there is not downloaded again"

    with pytest.raises(UnknownNameError, match=r"'mix'.*proto"):
        main(config("mix", download=True))
    with pytest.raises(DataError, match=r"there is no http.*/jaco/proto\.zip"):
        main(config("proto", download=True))
    with http_client() as client, pytest.raises(DataError, match=r"127\.0\.0\.1:9/x"):
        look_up(client, "http://127.0.0.1:9/x")


def test_mazes_recorded_rewards_of_four_tasks_are_read(tmp_path):
    maze = DOMAINS["point_mass_maze"]
    [episode] = uniform_episodes(maze, maze.tasks[:1], action_repeat=10, decisions=10)
    path = write_episode(tmp_path, 0, episode)
    with np.load(path) as file:
        np.savez_compressed(path, **{**file, "reward": np.repeat(file["reward"], 4, axis=1)})
    np.testing.assert_array_equal(read_episode(episode_file(path), maze).reward, episode.reward)
