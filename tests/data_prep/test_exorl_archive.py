import stat
import zipfile

import pytest

from agentic_ring.errors import DataError
from data_prep.exorl_download import unpack_episodes


def make_zip(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_episodes_are_unpacked_and_the_rest_is_left(tmp_path):
    archive = make_zip(
        tmp_path / "rnd.zip", {"rnd/buffer/a.npz": b"1", "rnd/buffer/b.npz": b"22", "rnd/video/c.mp4": b"3"}
    )
    assert unpack_episodes(archive, tmp_path / "buffer") == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "buffer").iterdir()} == {
        "a.npz": b"1",
        "b.npz": b"22",
    }


def test_second_run_writes_only_what_is_missing_or_differs(tmp_path):
    archive = make_zip(tmp_path / "rnd.zip", {"a.npz": b"1", "b.npz": b"2", "c.npz": b"3"})
    unpack_episodes(archive, tmp_path / "buffer")
    kept = (tmp_path / "buffer" / "a.npz").stat().st_mtime_ns
    (tmp_path / "buffer" / "b.npz").write_bytes(b"x")
    (tmp_path / "buffer" / "c.npz").unlink()
    unpack_episodes(archive, tmp_path / "buffer")
    assert (tmp_path / "buffer" / "a.npz").stat().st_mtime_ns == kept
    assert [path.read_bytes() for path in sorted((tmp_path / "buffer").iterdir())] == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    "name", ["../outside.npz", "/etc/outside.npz", "buffer/../../outside.npz", "..\\outside.npz", "C:\\x.npz"]
)
def test_path_outside_the_folder_spoils_the_whole_zip(tmp_path, name):
    archive = make_zip(tmp_path / "rnd.zip", {"buffer/a.npz": b"1", name: b"2"})
    with pytest.raises(DataError, match=r"rnd\.zip holds .*a path outside its folder"):
        unpack_episodes(archive, tmp_path / "in" / "buffer")
    assert [path.name for path in tmp_path.rglob("*")] == ["rnd.zip"]


def test_link_is_refused(tmp_path):
    link = zipfile.ZipInfo("buffer/a.npz")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive = tmp_path / "rnd.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match="a link"):
        unpack_episodes(archive, tmp_path / "buffer")


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
    with zipfile.ZipFile(archive) as opened:
        assert len(opened.infolist()) == 1


def empty_member(archive):
    """Writes zeros for the CRC and the stored length, which fit each other, in the table of contents."""
    damaged = bytearray(archive.read_bytes())
    place = damaged.index(b"PK\x01\x02") + 16
    damaged[place : place + 8] = bytes(8)
    archive.write_bytes(damaged)
    with zipfile.ZipFile(archive) as opened:
        assert opened.read("buffer/a.npz") == b""


@pytest.mark.slow
@pytest.mark.parametrize("members", [65_535, 65_536])
def test_members_beyond_the_count_of_a_small_zip_are_counted(tmp_path, members):
    archive = make_zip(tmp_path / "rnd.zip", {f"{number}.mp4": b"" for number in range(members)})
    with pytest.raises(DataError, match=rf"no .npz among its {members} members"):
        unpack_episodes(archive, tmp_path / "buffer")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda archive: archive.write_text("hello"), "not a readable zip"),
        (lambda archive: archive.write_bytes(archive.read_bytes()[:-40]), "not a readable zip"),
        (flip_content, "not a readable zip .*CRC"),
        (empty_member, "not a readable zip .*a.npz has 0 bytes, in the table of contents 7"),
        (hide_later_members, "not a readable zip .*has 1 members, its end 2"),
        (lambda archive: make_zip(archive, {"video/a.mp4": b"1"}), "no .npz among its 1 members"),
        (
            lambda archive: make_zip(archive, {"a/1.npz": b"1", "b/1.npz": b"2"}),
            "two files of the name 1.npz",
        ),
    ],
    ids=["text", "half of it", "other content", "empty member", "hidden members", "no episode", "same name"],
)
def test_bad_zip_is_named(tmp_path, damage, reason):
    archive = make_zip(tmp_path / "rnd.zip", {"buffer/a.npz": b"content"})
    damage(archive)
    with pytest.raises(DataError, match=rf"rnd\.zip .*{reason}"):
        unpack_episodes(archive, tmp_path / "buffer")
    assert not list(tmp_path.glob("buffer/*"))
