import errno
import signal
import subprocess
from pathlib import Path

import pytest

from agentic_ring.files.atomic import remove_leftovers, replacing, replacing_folder
from tests.commands import run_python


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_leaves_the_old_file_or_folder_and_nothing_else(tmp_path, error):
    (tmp_path / "model").mkdir()
    old = {"file.txt": "old", "model/a": "old"}
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error), replacing(tmp_path / "file.txt") as beside:
        beside.write_text("half of the n")
        raise error
    with pytest.raises(error), replacing_folder(tmp_path / "model") as beside:
        (beside / "a").write_text("new")
        raise error
    assert contents(tmp_path) == old


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's always-full device")
def test_a_full_disk_names_the_file_and_leaves_the_old_one(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left") as caught, replacing(path) as beside:
        beside.symlink_to("/dev/full")
        beside.write_text("new")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert contents(tmp_path) == {"file.txt": "old"}


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


KILLED = """
import os, pathlib, signal, sys
from agentic_ring.files.atomic import replacing_folder
rename, left = pathlib.Path.rename, [signal.SIGKILL] + [0] * (int(sys.argv[2]) - 1)
pathlib.Path.rename = lambda self, target: (os.kill(os.getpid(), left.pop()), rename(self, target))[1]
with replacing_folder(pathlib.Path(sys.argv[1])) as beside:
    for name in "ab":
        (beside / name).write_text("new")
"""


@pytest.mark.parametrize("renames", [1, 2])
def test_a_process_killed_while_it_replaces_a_folder_leaves_no_mixture(tmp_path, renames):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in "ab":
        (folder / name).write_text("old")
    assert run_python("-c", KILLED, folder, renames).returncode == -signal.SIGKILL
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
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = ("m.{}.partial", "m.old.{}.partial")
    for name in names:
        for process in (ended.pid, 1):
            (tmp_path / name.format(process)).mkdir()
    with replacing_folder(tmp_path / "m"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"m", *(name.format(1) for name in names)}
