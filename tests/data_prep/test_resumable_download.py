import hashlib

import numpy as np
import pytest

from agentic_ring.errors import DataError
from data_prep.exorl_download import download, http_client, look_up
from tests.data_prep.file_server import FileServer

CONTENT = np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def server():
    with FileServer() as server:
        server.files["/file"] = CONTENT
        yield server


def fetch(server, path):
    with http_client() as client:
        remote = look_up(client, f"{server.url}/file")
        return download(client, remote, path, lambda done: None)


def test_file_arrives_with_its_digest(server, tmp_path):
    digest = fetch(server, tmp_path / "there" / "file")
    assert (tmp_path / "there" / "file").read_bytes() == CONTENT
    assert digest == hashlib.sha256(CONTENT).hexdigest()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]


def test_broken_connections_are_taken_up_where_they_broke(server, tmp_path):
    server.break_after = 100_000
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [first for _, first in server.sent] == [0, 100_000, 200_000]


def test_next_run_goes_on_from_what_the_last_one_left(server, tmp_path):
    server.break_after = 120_000

    def stop(done):
        if done >= 100_000:
            raise KeyboardInterrupt

    with http_client() as client:
        remote = look_up(client, f"{server.url}/file")
        with pytest.raises(KeyboardInterrupt):
            download(client, remote, tmp_path / "file", stop)
    left = (tmp_path / "file.part").stat().st_size
    assert left >= 100_000
    assert not (tmp_path / "file").exists()
    server.break_after = None
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.sent[-1] == ("/file", left)


def test_part_of_another_version_is_thrown_away(server, tmp_path):
    server.break_after = 0
    with pytest.raises(DataError):
        fetch(server, tmp_path / "file")
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    server.break_after = None
    server.files["/file"] = CONTENT[::-1]
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT[::-1]


def test_server_without_ranges_sends_it_all_again(server, tmp_path):
    server.ranges = False
    server.break_after = 0
    with pytest.raises(DataError):
        fetch(server, tmp_path / "file")
    (tmp_path / "file.part").write_bytes(b"x" * 1000)
    server.break_after = None
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_connection_that_always_breaks_is_given_up(server, tmp_path):
    server.break_after = 0
    with pytest.raises(DataError, match=r"broke off after 0 of 300,000 bytes.*same command again"):
        fetch(server, tmp_path / "file")
    assert len(server.sent) == 3


def test_complete_file_is_not_fetched_again(server, tmp_path):
    assert fetch(server, tmp_path / "file") == fetch(server, tmp_path / "file")
    assert len(server.sent) == 1


def test_what_the_server_lacks_is_told_from_what_cannot_be_reached(server):
    with http_client() as client:
        assert look_up(client, f"{server.url}/other") is None
        with pytest.raises(DataError, match=r"cannot ask for the size of http://127\.0\.0\.1:9/x"):
            look_up(client, "http://127.0.0.1:9/x")
