import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentic_ring.files.atomic import remove_leftovers, replacing, replacing_folder


def test_a_file_is_replaced_whole_and_its_folder_made(tmp_path):
    path = tmp_path / "new" / "folder" / "file.txt"
    for text in ("first", "second"):
        with replacing(path) as beside:
            assert beside.parent == path.parent
            beside.write_text(text)
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as beside:
        beside.write_text("half of the n")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's always-full device")
def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left") as caught, replacing(path) as beside:
        beside.symlink_to("/dev/full")
        beside.write_text("new")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_replaced_whole_and_other_files_are_kept(tmp_path):
    folder = tmp_path / "new" / "model"
    for version in ("first", "second"):
        with replacing_folder(folder, obsolete=r"old-\d+") as beside:
            assert folder.exists() == (version == "second")
            for name in ("a", "b", f"old-{len(version)}"):
                (beside / name).write_text(version)
        (folder / "notes").mkdir(exist_ok=True)
        (folder / "notes" / "mine").write_text("kept")
    assert contents(folder) == {"a": "second", "b": "second", "old-6": "second", "notes/mine": "kept"}
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path, error):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_text("old")
    with pytest.raises(error), replacing_folder(folder) as beside:
        (beside / "a").write_text("new")
        raise error
    assert contents(tmp_path) == {"model/a": "old"}


@pytest.mark.parametrize("moment", ["the first rename", "the second rename"])
def test_a_process_killed_while_it_replaces_a_folder_leaves_no_mixture(tmp_path, moment):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_text("old")
    (folder / "b").write_text("old")
    renames = 1 if moment == "the first rename" else 2
    script = f"""
import os, pathlib, signal
from agentic_ring.files import atomic
whole, left = pathlib.Path.rename, {renames}
def rename(self, target):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, target)
pathlib.Path.rename = rename
with atomic.replacing_folder(pathlib.Path({str(folder)!r})) as beside:
    (beside / "a").write_text("new")
    (beside / "b").write_text("new")
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    assert contents(folder) == ({"a": "old", "b": "old"} if renames == 1 else {})
    assert len(list(tmp_path.iterdir())) > folder.exists()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == ([folder] if renames == 1 else [])


def test_only_leftovers_of_killed_processes_are_removed(tmp_path):
    kept = [tmp_path / name for name in ("data.partial", "partial", "a.12.partial.txt", "notes")]
    for path in (*kept, tmp_path / "a.12.partial"):
        path.write_text("x")
    (tmp_path / "below" / "model.7.partial").mkdir(parents=True)
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.rglob("*")) == sorted([*kept, tmp_path / "below"])


def test_leftovers_of_killed_processes_go_with_the_next_replacement(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    names = ("m.{}.partial", "m.old.{}.partial")
    for name in names:
        for process in (ended.pid, 1):
            (tmp_path / name.format(process)).mkdir()
    with replacing_folder(tmp_path / "m"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"m", *(name.format(1) for name in names)}
