"""ExoRL's archives from a server to the store: what is resumed, unpacked and refused.

The episodes are our own, in ExoRL's format and layout; the server can fail as real ones do.
"""

import hashlib
import json
import re
import stat
import zipfile

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import TrajectoryStore, store_path
from agentic_ring.errors import DataError, UnknownNameError
from data_prep.conversion import ConvertConfig, convert
from data_prep.episode_files import collector_folder, write_episode
from data_prep.exorl import ExorlConfig, download, http_client, look_up, main, unpack_episodes
from tests.data_prep.exploration import uniform_episodes
from tests.local_server import LocalServer, QuietHandler

CONTENT = np.random.default_rng(0).bytes(300_000)


class FileServer(LocalServer):
    """Files by path, and how they are served.

    Attributes:
      files: path -> bytes; may be changed while it runs.
      break_after: bytes after which a connection is cut; None for never.
      ranges: whether it can send the rest of a file.
      sent: for each GET, (path, first byte it was asked for).
    """

    def __init__(self):
        super().__init__(_Handler)
        self.files: dict[str, bytes] = {"/file": CONTENT}
        self.break_after: int | None = None
        self.ranges = True
        self.sent: list[tuple[str, int]] = []


class _Handler(QuietHandler):
    server: FileServer

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool):
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
        if body:
            served.sent.append((self.path, int(asked[1]) if asked else 0))
            end = len(content) if served.break_after is None else first + served.break_after
            self.wfile.write(content[first:end])


@pytest.fixture
def server():
    with FileServer() as server:
        yield server


def fetch(server, path, advance=lambda done: None):
    with http_client() as client:
        return download(client, look_up(client, f"{server.url}/file"), path, advance)


def test_broken_connections_are_taken_up_where_they_broke(server, tmp_path):
    server.break_after = 100_000
    path = tmp_path / "there" / "file"
    assert fetch(server, path) == fetch(server, path) == hashlib.sha256(CONTENT).hexdigest()
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == ["file"]
    assert [first for _, first in server.sent] == [0, 100_000, 200_000], (
        "the complete file is not fetched again"
    )


def test_next_run_goes_on_from_what_the_last_one_left(server, tmp_path):
    server.break_after = 120_000

    def stop(done):
        if done >= 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(server, tmp_path / "file", stop)
    left = (tmp_path / "file.part").stat().st_size
    assert left >= 100_000
    assert not (tmp_path / "file").exists()
    server.break_after = None
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.sent[-1] == ("/file", left)


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


def make_zip(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_only_episodes_that_are_missing_or_differ_are_written(tmp_path):
    members = {"rnd/buffer/a.npz": b"1", "rnd/buffer/b.npz": b"2", "c.npz": b"3", "rnd/video/c.mp4": b"3"}
    archive, buffer = make_zip(tmp_path / "rnd.zip", members), tmp_path / "buffer"
    assert unpack_episodes(archive, buffer) == 3
    kept = (buffer / "a.npz").stat().st_mtime_ns
    (buffer / "b.npz").write_bytes(b"x")
    (buffer / "c.npz").unlink()
    assert unpack_episodes(archive, buffer) == 3
    assert (buffer / "a.npz").stat().st_mtime_ns == kept
    found = {path.name: path.read_bytes() for path in buffer.iterdir()}
    assert found == {"a.npz": b"1", "b.npz": b"2", "c.npz": b"3"}


def changed(position, replacement):
    """Replaces bytes of the archive, ``position`` after the first mark of its table of contents."""

    def damage(archive):
        damaged = bytearray(archive.read_bytes())
        place = damaged.index(b"PK\x01\x02") + position
        damaged[place : place + len(replacement)] = replacement
        archive.write_bytes(damaged)

    return damage


def hide_later_members(archive):
    """Writes that the first member's comment reaches to the end of the table of contents, and beyond."""
    make_zip(archive, {"a.npz": b"1", "b.npz": b"2"})
    changed(32, b"\xff\xff")(archive)


def flip_content(archive):
    archive.write_bytes(archive.read_bytes().replace(b"content", b"contend", 1))


def link(archive):
    member = zipfile.ZipInfo("buffer/a.npz")
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr(member, "/etc/passwd")


@pytest.mark.slow
def test_members_beyond_the_count_of_a_small_zip_are_counted(tmp_path):
    archive = make_zip(tmp_path / "rnd.zip", {f"{number}.mp4": b"" for number in range(65_536)})
    with pytest.raises(DataError, match="65536 members"):
        unpack_episodes(archive, tmp_path / "buffer")


OUTSIDE = ("/etc/x.npz", "buffer/../../x.npz", "..\\x.npz", "C:\\x.npz")
BAD_ZIPS = {
    "text": (lambda archive: archive.write_text("hello"), "not a readable zip"),
    "half of it": (lambda archive: archive.write_bytes(archive.read_bytes()[:-40]), "not a readable zip"),
    "content": (flip_content, "CRC"),
    # Zeros for the CRC and the stored length, which fit each other, in the table of contents.
    "empty member": (changed(16, bytes(8)), "a.npz has 0 bytes"),
    "hidden members": (hide_later_members, "has 1 members, its end 2"),
    "link": (link, "a link"),
    "encrypted": (changed(8, b"\x01"), "encrypted"),
    "large": (changed(24, b"\xff\xff\xff\x7f"), "at most 67,108,864"),
    "no episode": (lambda archive: make_zip(archive, {"video/a.mp4": b"1"}), "no .npz"),
    "same name": (lambda archive: make_zip(archive, {"a/1.npz": b"1", "b/1.npz": b"2"}), "1.npz"),
    **{
        name: (lambda archive, name=name: make_zip(archive, {"a.npz": b"1", name: b"2"}), "outside")
        for name in OUTSIDE
    },
}


@pytest.mark.parametrize(("damage", "reason"), BAD_ZIPS.values(), ids=BAD_ZIPS.keys())
def test_bad_zip_is_named(tmp_path, damage, reason):
    archive = make_zip(tmp_path / "rnd.zip", {"buffer/a.npz": b"content"})
    damage(archive)
    with pytest.raises(DataError, match=rf"rnd\.zip .*{reason}"):
        unpack_episodes(archive, tmp_path / "in" / "buffer")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["rnd.zip"]


@pytest.fixture(scope="module")
def episodes():
    return uniform_episodes(DOMAINS["jaco"], DOMAINS["jaco"].tasks[:1] * 2, action_repeat=10)


@pytest.fixture
def exorl_server(server, episodes, tmp_path_factory):
    """Has the zip of two episodes as ExoRL lays it out."""
    folder = tmp_path_factory.mktemp("zip")
    with zipfile.ZipFile(folder / "rnd.zip", "w") as archive:
        for number, episode in enumerate(episodes):
            path = write_episode(folder / "buffer", number, episode)
            archive.write(path, f"buffer/{path.name}")
        archive.writestr("video/0.mp4", b"")
    server.files["/jaco/rnd.zip"] = (folder / "rnd.zip").read_bytes()
    return server


def config(root, server, collector="rnd", domain="jaco", **changes):
    return ExorlConfig(domain, collector, data=root, url_base=server.url, **changes)


def test_download_ends_in_a_store_with_the_rewards_that_were_paid(tmp_path, exorl_server, episodes, capsys):
    content = exorl_server.files["/jaco/rnd.zip"]
    exorl_server.break_after = 60_000
    assert main(config(tmp_path, exorl_server, download=True)) == 0
    with TrajectoryStore.open(store_path(tmp_path, "jaco", "rnd")) as store:
        store.verify()
        assert store.tasks == DOMAINS["jaco"].tasks
        assert store.lengths.tolist() == [250] * 2
        for stored, episode in zip(store.episodes(), episodes, strict=True):
            np.testing.assert_array_equal(stored.rewards[store.tasks[0]], episode.reward[:, 0])
            np.testing.assert_array_equal(stored.episode.physics, episode.physics)
    folder = collector_folder(tmp_path, "jaco", "rnd")
    assert sorted(path.name for path in folder.iterdir()) == ["buffer", "download.json"]
    record = json.loads((folder / "download.json").read_text())
    assert record == {
        "url": f"{exorl_server.url}/jaco/rnd.zip",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "episodes": 2,
        "digest": record["digest"],
    }
    assert record["sha256"] in capsys.readouterr().out
    sent = len(exorl_server.sent)
    assert main(config(tmp_path, exorl_server, download=True)) == 0
    assert len(exorl_server.sent) == sent, "what is there is not downloaded again"


def test_dry_run_lists_sizes_and_fetches_nothing(tmp_path, exorl_server, capsys):
    assert main(config(tmp_path, exorl_server, dry_run=True)) == 0
    size = len(exorl_server.files["/jaco/rnd.zip"])
    assert f"jaco/rnd.zip  {size:,} bytes" in capsys.readouterr().out
    assert main(config(tmp_path, exorl_server, "mix", dry_run=True)) == 0
    listed = capsys.readouterr().out
    assert listed.count("\n") == 10
    assert "jaco/proto.zip  not on the server" in listed
    assert f"total {size:,} bytes" in listed
    assert exorl_server.sent == []
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_downloaded_is_named(tmp_path, server):
    with pytest.raises(UnknownNameError, match=r"'mix'.*proto"):
        main(config(tmp_path, server, "mix", download=True))
    with pytest.raises(DataError, match=r"there is no http.*/walker/rnd\.zip"):
        main(config(tmp_path, server, domain="walker", download=True))
    with http_client() as client, pytest.raises(DataError, match=r"127\.0\.0\.1:9/x"):
        look_up(client, "http://127.0.0.1:9/x")


def test_mazes_recorded_rewards_of_four_tasks_are_read(tmp_path):
    maze = DOMAINS["point_mass_maze"]
    [episode] = uniform_episodes(maze, maze.tasks[:1], action_repeat=10, decisions=10)
    path = write_episode(collector_folder(tmp_path, maze.name, "rnd") / "buffer", 0, episode)
    with np.load(path) as file:
        arrays = dict(file)
    arrays["reward"] = np.repeat(arrays["reward"], 4, axis=1)
    np.savez_compressed(path, **arrays)
    summary = convert(ConvertConfig(maze.name, "rnd", data=tmp_path))
    assert summary.skipped == ()
    with TrajectoryStore.open(summary.store) as store:
        np.testing.assert_array_equal(store.episode(0).episode.reward, episode.reward)
