"""Download of ExoRL's archives: what is resumed, unpacked and refused."""

import hashlib
import stat
import zipfile

import numpy as np
import pytest

from agentic_ring.errors import DataError
from data_prep.exorl_download import download, http_client, look_up, unpack_episodes
from tests.data_prep.file_server import FileServer

CONTENT = np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def server():
    with FileServer() as server:
        server.files["/file"] = CONTENT
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


def test_what_the_server_lacks_is_told_from_what_cannot_be_reached(server):
    with http_client() as client:
        assert look_up(client, f"{server.url}/other") is None
        with pytest.raises(DataError, match=r"127\.0\.0\.1:9/x"):
            look_up(client, "http://127.0.0.1:9/x")


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
    assert {path.name: path.read_bytes() for path in buffer.iterdir()} == {
        "a.npz": b"1",
        "b.npz": b"2",
        "c.npz": b"3",
    }


@pytest.mark.parametrize("name", ["/etc/x.npz", "buffer/../../x.npz", "..\\x.npz", "C:\\x.npz"])
def test_path_outside_the_folder_spoils_the_whole_zip(tmp_path, name):
    archive = make_zip(tmp_path / "rnd.zip", {"buffer/a.npz": b"1", name: b"2"})
    with pytest.raises(DataError, match="outside"):
        unpack_episodes(archive, tmp_path / "in" / "buffer")
    assert [path.name for path in tmp_path.rglob("*")] == ["rnd.zip"]


def flip_content(archive):
    damaged = bytearray(archive.read_bytes())
    damaged[damaged.index(b"content")] ^= 1
    archive.write_bytes(damaged)


def hide_later_members(archive):
    """Writes that the first member's comment reaches to the end of the table of contents, and beyond."""
    make_zip(archive, {"a.npz": b"1", "b.npz": b"2"})
    damaged = bytearray(archive.read_bytes())
    place = damaged.index(b"PK\x01\x02") + 32
    damaged[place : place + 2] = b"\xff\xff"
    archive.write_bytes(damaged)


def empty_member(archive):
    """Writes zeros for the CRC and the stored length, which fit each other, in the table of contents."""
    damaged = bytearray(archive.read_bytes())
    place = damaged.index(b"PK\x01\x02") + 16
    damaged[place : place + 8] = bytes(8)
    archive.write_bytes(damaged)


def link(archive):
    member = zipfile.ZipInfo("buffer/a.npz")
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    make_zip(archive, {})
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr(member, "/etc/passwd")


@pytest.mark.slow
def test_members_beyond_the_count_of_a_small_zip_are_counted(tmp_path):
    archive = make_zip(tmp_path / "rnd.zip", {f"{number}.mp4": b"" for number in range(65_536)})
    with pytest.raises(DataError, match="65536 members"):
        unpack_episodes(archive, tmp_path / "buffer")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda archive: archive.write_text("hello"), "not a readable zip"),
        (lambda archive: archive.write_bytes(archive.read_bytes()[:-40]), "not a readable zip"),
        (flip_content, "CRC"),
        (empty_member, "a.npz has 0 bytes"),
        (hide_later_members, "has 1 members, its end 2"),
        (link, "a link"),
        (lambda archive: make_zip(archive, {"video/a.mp4": b"1"}), "no .npz"),
        (lambda archive: make_zip(archive, {"a/1.npz": b"1", "b/1.npz": b"2"}), "1.npz"),
    ],
    ids=[
        "text",
        "half of it",
        "content",
        "empty member",
        "hidden members",
        "link",
        "no episode",
        "same name",
    ],
)
def test_bad_zip_is_named(tmp_path, damage, reason):
    archive = make_zip(tmp_path / "rnd.zip", {"buffer/a.npz": b"content"})
    damage(archive)
    with pytest.raises(DataError, match=rf"rnd\.zip .*{reason}"):
        unpack_episodes(archive, tmp_path / "buffer")
    assert not list(tmp_path.glob("buffer/*"))
