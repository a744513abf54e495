"""Episodes with flipped bits and false headers: refused, or read exactly; memory stays small."""

import io
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.trajectories import EPISODE_DTYPES, Episode, episode_widths
from agentic_ring.errors import DataError
from data_prep.episode_files import episode_file, read_episode

DOMAIN = DOMAINS["cartpole"]


def tiny_episode() -> Episode:
    random = np.random.default_rng(0)
    arrays = {
        name: random.uniform(-1, 1, (3, width)).astype(EPISODE_DTYPES[name])
        for name, width in episode_widths(DOMAIN).items()
    }
    return Episode(**arrays)


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as opened:
        for name, content in members.items():
            opened.writestr(zipfile.ZipInfo(name), content, compression)
    return buffer.getvalue()


def member(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0))
    return buffer.getvalue()


def members() -> dict[str, bytes]:
    return {f"{name}.npy": member(array) for name, array in vars(tiny_episode()).items()}


def header_bytes(content: bytes) -> list[int]:
    """Places of everything but the arrays' values: headers of zip and arrays, table of contents."""
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        infos = opened.infolist()
        table = opened.start_dir
    places = list(range(table, len(content)))
    for info in infos:
        local = 30 + len(info.filename)
        places += range(info.header_offset, info.header_offset + local + 128)
    return sorted(places)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 11], ids=["every bit", "a part"])
def test_a_flipped_bit_of_a_header_is_refused_or_changes_nothing(tmp_path, stride):
    path = tmp_path / "episode_000000_2.npz"
    content, expected = archive(members()), tiny_episode()
    path.write_bytes(content)
    np.testing.assert_array_equal(read_episode(episode_file(path), DOMAIN).physics, expected.physics)
    refused = 0
    bits = [8 * place + bit for place in header_bytes(content) for bit in range(8)][::stride]
    for bit in bits:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            found = read_episode(episode_file(path), DOMAIN)
        except DataError:
            refused += 1
            continue
        for name, array in vars(expected).items():
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
def test_a_false_header_of_an_array_is_refused(tmp_path, header):
    """With a correct CRC, as of a file that was made to harm."""
    text = header.encode() + b"\n"
    false = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(60)
    path = tmp_path / "episode_000000_2.npz"
    path.write_bytes(archive(members() | {"observation.npy": false}))
    with pytest.raises(DataError, match=r"observation\.npy has"):
        read_episode(episode_file(path), DOMAIN)


@pytest.mark.parametrize("declared", [True, False])
def test_a_small_file_takes_little_memory(tmp_path, declared):
    """A file of 1 MB that unpacks to 200 MB, and says so or claims to be an episode."""
    path = tmp_path / "episode_000000_2.npz"
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    packed = b"".join([*(packer.compress(bytes(1 << 24)) for _ in range(12)), packer.flush()])
    size = 12 << 24 if declared else 188
    content = bytearray(archive({"observation.npy": packed}))
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
