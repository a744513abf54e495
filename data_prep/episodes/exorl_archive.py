"""Downloads and unpacks ExoRL's published archives, one zip per domain and collector.

    {base}/{domain}/{collector}.zip -> {data}/exorl/{domain}/{collector}/buffer/*.npz
                                       {data}/exorl/{domain}/{collector}/download.json

``download.json`` records the origin of the episodes: address, bytes, SHA-256 and their number. It is written
last; the zip, which is as large as the episodes, is then removed.
"""

import shutil
import stat
import struct
import zipfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

import httpx

from agentic_ring.errors import DataError, UnknownNameError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import read_json, write_json
from agentic_ring.terminal.progress import progress
from data_prep.episodes.resumable_download import RemoteFile, download, http_client, look_up
from data_prep.folders import collector_folder

_BLOCK_BYTES = 1 << 20
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
)
"""What zipfile raises for damaged archives, beside OSError."""
_MOST_EPISODE_BYTES = 1 << 26
"""Limit for one unpacked file; episodes of the largest domain have less than a megabyte."""
_END_BYTES = 56 + 20 + 22 + (1 << 16)
"""The end record of a large zip, its locator, and the end record of any zip with the longest comment."""
URL_BASE = "https://dl.fbaipublicfiles.com/exorl"
COLLECTORS = ("aps", "icm_apt", "diayn", "disagreement", "icm", "proto", "random", "rnd", "smm")


@dataclass(frozen=True)
class Provenance:
    """Contents of ``download.json``: the origin of a collector's episodes."""

    url: str
    bytes: int
    sha256: str
    episodes: int


def archive_sizes(url_base: str, domain: str, collectors: tuple[str, ...]) -> dict[str, int | None]:
    """The size of each collector's zip in bytes; None if the server has no such zip.

    Raises:
      DataError: the server cannot be reached.
    """
    with http_client() as client:
        found = {name: look_up(client, _url(url_base, domain, name)) for name in collectors}
    return {name: remote.size if remote else None for name, remote in found.items()}


def fetch_episodes(root: Path, url_base: str, domain: str, collector: str) -> Provenance:
    """Downloads and unpacks a collector's episodes, resuming an earlier download.

    Raises:
      UnknownNameError: ExoRL has no such collector.
      DataError: the download failed, or is not a zip of episodes (``unpack_episodes``).
    """
    if collector not in COLLECTORS:
        raise UnknownNameError("ExoRL collector", collector, COLLECTORS)
    folder = collector_folder(root, domain, collector)
    record = folder / "download.json"
    if record.exists():
        return read_json(record, Provenance, "remove it to download its episodes again")
    url = _url(url_base, domain, collector)
    with http_client() as client:
        remote = look_up(client, url)
        if remote is None:
            raise DataError(f"there is no {url}; ExoRL has the collectors {', '.join(COLLECTORS)}")
        archive = folder / f"{collector}.zip"
        digest = _download(client, remote, archive)
    episodes = unpack_episodes(archive, folder / "buffer")
    provenance = Provenance(url, remote.size, digest, episodes)
    write_json(record, asdict(provenance))
    archive.unlink()
    return provenance


def how_to_get_episodes(root: Path, domain: str, collector: str) -> str:
    """The message for a collector without episode files: how to download or collect them."""
    return (
        f"there are no episode files in {collector_folder(root, domain, collector) / 'buffer'}. To use "
        "ExoRL's, add --download to\n"
        f"  python -m data_prep.exorl --domain {domain} --collector {collector}\n"
        f"or fetch {_url(URL_BASE, domain, collector)}\n"
        f"and unpack it so that its buffer/*.npz lie there; collectors: {', '.join(COLLECTORS)} (walker "
        "about 2.6 GB each). To make your own instead:\n"
        f"  python -m data_prep.collect --domain {domain}"
    )


def _download(client: httpx.Client, remote: RemoteFile, archive: Path) -> str:
    with progress(f"downloading {remote.url}", remote.size) as advance:
        return download(client, remote, archive, lambda done: advance(done, f"{done / 1e6:,.0f} MB"))


def _url(base: str, domain: str, collector: str) -> str:
    return f"{base.rstrip('/')}/{domain}/{collector}.zip"


def unpack_episodes(archive: Path, buffer: Path) -> int:
    """Unpacks every ``.npz`` of ``archive`` into the folder ``buffer`` and returns their number.

    Folders within the zip are ignored, other files (ExoRL's ``video``) are not unpacked. Episodes that exist
    already with the same contents are not written again.

    Raises:
      DataError: it is not a zip, is damaged, holds no episode, or has a member that lies outside its folder,
        is a link, is encrypted, is too large, or has the name of another one. Then nothing is unpacked,
        except that the members before a damaged one are.
    """
    try:
        with _opened(archive) as opened:
            members = _episodes(archive, opened.infolist())
            with progress(f"unpacking {archive.name}", len(members)) as advance:
                for number, (name, member) in enumerate(members.items(), start=1):
                    if not _is_there(buffer / name, member):
                        _unpack(opened, member, buffer / name)
                    advance(number, "")
    except (DataError, OSError):
        raise
    except _ZIP_ERRORS as error:
        raise DataError(
            f"{archive} is not a readable zip ({error}); remove it and download it again"
        ) from error
    return len(members)


def _opened(archive: Path) -> zipfile.ZipFile:
    """Opens a zip whose table of contents is whole and agrees with each member's header."""
    try:
        opened = zipfile.ZipFile(archive)
        members, expected = opened.infolist(), _member_count(archive)
        if len(members) != expected:
            raise zipfile.BadZipFile(f"its table of contents has {len(members)} members, its end {expected}")
        for member in members:
            if not member.flag_bits & 1:
                opened.open(member).close()
    except OSError as error:
        raise DataError(f"{archive} is not a readable zip ({error}); download it again") from error
    return opened


def _member_count(archive: Path) -> int:
    """The number of members in the end record of a zip that zipfile can open.

    zipfile does not compare it: a length in the table of contents that is too large hides all later members.
    """
    with archive.open("rb") as file:
        file.seek(max(0, archive.stat().st_size - _END_BYTES))
        tail = file.read()
    end = tail.rfind(b"PK\x05\x06")
    count = int.from_bytes(tail[end + 10 : end + 12], "little")
    if tail[end - 20 : end - 16] != b"PK\x06\x07":
        return count
    end64 = end - 20 - 56  # of a large zip; its locator lies between
    return int.from_bytes(tail[end64 + 32 : end64 + 40], "little")


def _episodes(archive: Path, members: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """The episode files by name; checks all members."""
    episodes: dict[str, zipfile.ZipInfo] = {}
    for member in members:
        path = PurePosixPath(member.filename.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in member.filename:
            raise DataError(
                f"{archive} holds {member.filename!r}, a path outside its folder; the zip is not used"
            )
        if stat.S_ISLNK(member.external_attr >> 16):
            raise DataError(f"{archive} holds {member.filename!r}, a link; the zip is not used")
        if path.suffix != ".npz" or member.is_dir():
            continue
        if member.flag_bits & 1:
            raise DataError(f"{archive} is encrypted ({member.filename!r}); decrypt it first")
        if member.file_size > _MOST_EPISODE_BYTES:
            raise DataError(
                f"{archive} holds {member.filename!r} of {member.file_size:,} bytes; an episode has at most "
                f"{_MOST_EPISODE_BYTES:,}, so the zip is not used"
            )
        if path.name in episodes:
            raise DataError(f"{archive} holds two files of the name {path.name}; the zip is not used")
        episodes[path.name] = member
    if not episodes:
        raise DataError(f"{archive} holds no .npz among its {len(members)} members, so no episodes")
    return episodes


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> None:
    with replacing(path) as beside, beside.open("wb") as file, archive.open(member) as source:
        shutil.copyfileobj(source, file, _BLOCK_BYTES)  # zipfile compares the CRC at the end, not the length
        if file.tell() != member.file_size:
            raise zipfile.BadZipFile(
                f"{member.filename} has {file.tell()} bytes, in the table of contents {member.file_size}"
            )


def _is_there(path: Path, member: zipfile.ZipInfo) -> bool:
    if not path.exists() or path.stat().st_size != member.file_size:
        return False
    return zlib.crc32(path.read_bytes()) == member.CRC
