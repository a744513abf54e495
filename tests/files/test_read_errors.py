"""A file that another process uses, or that the machine cannot open, is not called damaged."""

import fcntl
import resource
from contextlib import contextmanager

import numpy as np
import pytest

from agentic_ring.data.text.packing import PackedDescription, PackedRow, PackedRows, packed_writer
from agentic_ring.errors import DataError, StoreError
from agentic_ring.files.json_files import read_json
from agentic_ring.files.npz_files import read_npz
from agentic_ring.files.read_errors import remedy_for


@contextmanager
def no_file_left():
    """Lets this process open no further file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_rows_that_another_process_writes_are_kept(tmp_path):
    path = tmp_path / "train.h5"
    with packed_writer(path, PackedDescription("x", 300, "plain"), 8) as add:
        add(PackedRow(np.ones(8, np.int32), np.ones(8, bool), *np.zeros((2, 8), np.int32)))
    with path.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match=r"another process writes it; run again once that has ended$"):
            PackedRows.open(path)
    PackedRows.open(path).close()


def test_too_many_open_files_are_no_damage(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with no_file_left(), pytest.raises(DataError, match="raise the limit") as of_json:
        read_json(tmp_path / "a.json", dict[str, int], "delete it")
    with no_file_left(), pytest.raises(DataError) as of_npz:
        read_npz(tmp_path / "a.npz", 100)
    assert "delete" not in str(of_json.value)
    assert "raise the limit" in remedy_for(of_npz.value, "delete it")
    (tmp_path / "a.npz").write_bytes(b"PK")
    with pytest.raises(DataError) as of_npz:
        read_npz(tmp_path / "a.npz", 100)
    assert remedy_for(of_npz.value, "delete it") == "delete it"
