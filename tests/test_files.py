import errno
from pathlib import Path

import pytest

from agentic_ring.files import replacing


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
