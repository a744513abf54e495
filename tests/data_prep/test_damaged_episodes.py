"""Episodes with flipped bits and false headers: refused, or read exactly; memory stays small."""

import io
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.trajectories import EPISODE_DTYPES, episode_widths
from agentic_ring.errors import DataError
from data_prep.episode_files import episode_file, read_episode

DOMAIN = DOMAINS["cartpole"]


def arrays() -> dict[str, np.ndarray]:
    """The arrays of an episode of two transitions."""
    random, dtypes = np.random.default_rng(0), EPISODE_DTYPES
    widths = episode_widths(DOMAIN).items()
    return {name: random.uniform(-1, 1, (3, width)).astype(dtypes[name]) for name, width in widths}


def archive(**instead: bytes) -> bytes:
    """The episode's file, with these contents instead of some arrays."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for name, array in arrays().items():
            content = io.BytesIO()
            np.save(content, array)
            opened.writestr(zipfile.ZipInfo(f"{name}.npy"), instead.get(name, content.getvalue()))
    return buffer.getvalue()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "episode_000000_2.npz"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_flipped_bit_is_refused_or_changes_nothing(path):
    content, expected = archive(), arrays()
    path.write_bytes(content)
    np.testing.assert_array_equal(read_episode(episode_file(path), DOMAIN).physics, expected["physics"])
    refused = 0
    bits = range(0, 8 * len(content), 13)
    for bit in bits:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = read_episode(episode_file(path), DOMAIN)
        except DataError:
            refused += 1
            continue
        for name, array in expected.items():
            assert getattr(found, name).tobytes() == array.tobytes(), (bit, name)
    assert refused > len(bits) / 2


HEADERS = {
    "a huge shape": "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 5), }",
    "a negative shape": "{'descr': '<f4', 'fortran_order': False, 'shape': (-3, -5), }",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (3, 5), }",
    "brackets": "(" * 3000,
    "an expression": "__import__('os')",
    "no literal": "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 5L), }\x00'",
    "another type": "{'descr': ['<f4'], 'fortran_order': 1, 'shape': 15, }",
    "nothing": "",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_a_false_header_of_an_array_is_refused(path, header):
    """With a correct CRC, as of a file that was made to harm."""
    text = header.encode() + b"\n"
    false = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(60)
    path.write_bytes(archive(observation=false))
    with pytest.raises(DataError, match=r"observation\.npy has"):
        read_episode(episode_file(path), DOMAIN)


@pytest.mark.parametrize("declared", [True, False])
def test_a_small_file_takes_little_memory(path, declared):
    """A file of 1 MB that unpacks to 200 MB, and says so or claims to be an episode."""
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    packed = b"".join([*(packer.compress(bytes(1 << 24)) for _ in range(12)), packer.flush()])
    size = 12 << 24 if declared else 188
    content = bytearray(archive(observation=packed))
    table = content.index(b"PK\x01\x02")
    for sizes, method in ((18, 8), (table + 20, table + 10)):
        content[sizes + 4 : sizes + 8] = size.to_bytes(4, "little")
        content[method : method + 2] = (8).to_bytes(2, "little")
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(DataError):
            read_episode(episode_file(path), DOMAIN)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
