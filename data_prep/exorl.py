"""Downloads ExoRL's episodes, validates them, and converts them to an HDF5 store.

    python -m data_prep.exorl --domain walker --collector rnd --dry-run     list the download's size
    python -m data_prep.exorl --domain walker --collector rnd --download    download, unpack, convert
    python -m data_prep.exorl --domain walker --collector rnd     {data}/exorl/walker/rnd/buffer -> store
    python -m data_prep.exorl --domain walker                     the same for our own `mix`

An interrupted download or conversion resumes when it is started again. A file that is not a valid episode
is skipped and listed, and the exit status is then 1. A download has these files beside ``buffer``:

    download.json             origin of the episodes: address, bytes, SHA-256, number; written last
    {collector}.zip           removed once it is unpacked
    {collector}.zip.part      the bytes received so far
    {collector}.zip.part.json the file they belong to: address, size and the server's tag of this version

A part of another version is discarded. A server without range requests sends the file from its beginning.
"""

import hashlib
import json
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated

import httpx
import tyro

from agentic_ring.errors import DataError, UnknownNameError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import read_json, write_json
from agentic_ring.terminal.cli import run
from agentic_ring.terminal.progress import progress, say
from data_prep.conversion import ConvertConfig, convert
from data_prep.episode_files import COLLECTORS, URL_BASE, archive_url, collector_folder

_BLOCK_BYTES = 1 << 20
_ZIP_ERRORS = zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, LookupError
"""What zipfile raises for damaged archives, beside OSError."""
_MOST_EPISODE_BYTES = 1 << 26
"""Limit for one unpacked file; episodes of the largest domain have less than a megabyte."""
_ATTEMPTS_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server, its size in bytes, and the server's tag of its version, if it sends one."""

    url: str
    size: int
    etag: str | None


def http_client() -> httpx.Client:
    """An HTTP client without compression, which would hide the size of a file."""
    return httpx.Client(follow_redirects=True, timeout=30, headers={"Accept-Encoding": "identity"})


def look_up(client: httpx.Client, url: str) -> RemoteFile | None:
    """Asks the server for a file's size and version; None if it has no such file.

    Raises:
      DataError: the server cannot be reached, refuses, or does not send the size.
    """
    try:
        response = client.head(url)
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        response.raise_for_status()
        return RemoteFile(url, int(response.headers["Content-Length"]), response.headers.get("ETag"))
    except (httpx.HTTPError, httpx.InvalidURL, KeyError, ValueError) as error:
        raise DataError(
            f"cannot ask for the size of {url} ({error}); check the address and the network"
        ) from error


def download(client: httpx.Client, remote: RemoteFile, path: Path, advance: Callable[[int], None]) -> str:
    """Downloads ``remote`` to ``path``, resuming an earlier call, and returns its SHA-256.

    Args:
      advance: called with the number of bytes received.

    Raises:
      DataError: the connection broke repeatedly, or the file does not have the announced size.
    """
    part, about = (path.with_name(path.name + ending) for ending in (".part", ".part.json"))
    if _size(path) == remote.size:
        return _digest(path)
    description = json.dumps(asdict(remote))
    if not about.exists() or about.read_bytes() != description.encode():
        part.unlink(missing_ok=True)
        with replacing(about) as beside:
            beside.write_text(description)
    failures = 0
    while (have := _size(part)) < remote.size:
        advance(have)
        try:
            _fetch_rest(client, remote, part, advance)
        except httpx.TransportError as error:
            failures = failures + 1 if _size(part) == have else 0
            if failures == _ATTEMPTS_WITHOUT_PROGRESS:
                raise DataError(
                    f"{remote.url} broke off after {_size(part):,} of {remote.size:,} bytes ({error}); run "
                    "the same command again to resume"
                ) from error
    if have > remote.size:
        part.unlink()
        raise DataError(
            f"{remote.url} sent {have:,} bytes, expected the {remote.size:,} it announced; run again"
        )
    advance(have)
    digest = _digest(part)
    part.replace(path)
    about.unlink()
    return digest


def _fetch_rest(client: httpx.Client, remote: RemoteFile, part: Path, advance: Callable[[int], None]) -> None:
    have = _size(part)
    headers = {"Range": f"bytes={have}-"} if have else {}
    if have and remote.etag:
        headers["If-Range"] = remote.etag  # another version is sent whole
    with client.stream("GET", remote.url, headers=headers) as response:
        goes_on = response.status_code == httpx.codes.PARTIAL_CONTENT
        if response.is_error or (
            goes_on and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        ):
            raise DataError(f"{remote.url} answered {response.status_code} to a range request; run again")
        with part.open("ab" if goes_on else "wb") as file:
            for block in response.iter_raw():  # as they arrive: an incomplete block would be lost
                file.write(block)
                advance(file.tell())
        if _size(part) < remote.size:
            raise httpx.RemoteProtocolError("the connection was closed early")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Provenance:
    """Contents of ``download.json``: the origin of a collector's episodes."""

    url: str
    bytes: int
    sha256: str
    episodes: int


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
    url = archive_url(url_base, domain, collector)
    with http_client() as client:
        remote = look_up(client, url)
        if remote is None:
            raise DataError(f"there is no {url}; ExoRL has the collectors {', '.join(COLLECTORS)}")
        archive = folder / f"{collector}.zip"
        with progress(f"downloading {url}", remote.size) as advance:
            digest = download(client, remote, archive, lambda done: advance(done, f"{done / 1e6:,.0f} MB"))
    episodes = unpack_episodes(archive, folder / "buffer")
    provenance = Provenance(url, remote.size, digest, episodes)
    write_json(record, asdict(provenance))
    archive.unlink()
    return provenance


def unpack_episodes(archive: Path, buffer: Path) -> int:
    """Unpacks every ``.npz`` of ``archive`` into the folder ``buffer`` and returns their number.

    Folders within the zip are ignored, other files (ExoRL's ``video``) are not unpacked. Episodes that exist
    already with the same contents are not written again.

    Raises:
      DataError: it is not a zip, is damaged or encrypted, holds no episode, or has a member that lies outside
        its folder, is a link, is too large, or has the name of another one. Then nothing is unpacked, except
        that the members before a damaged one are.
    """
    try:
        with _opened(archive) as opened:
            members = _episodes(archive, opened.infolist())
            with progress(f"unpacking {archive.name}", len(members)) as advance:
                for number, (name, member) in enumerate(members.items(), start=1):
                    path = buffer / name
                    if _size(path) != member.file_size or zlib.crc32(path.read_bytes()) != member.CRC:
                        _unpack(opened, member, path)
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
        members = opened.infolist()
        with archive.open("rb") as file:
            file.seek(opened.start_dir)
            entries = file.read().count(b"PK\x01\x02")
        if len(members) != entries:  # zipfile reads on behind one whose length is too large
            raise zipfile.BadZipFile(f"its table of contents has {entries} entries, {len(members)} readable")
        for member in members:
            opened.open(member).close()
    except OSError as error:
        raise DataError(f"{archive} is not a readable zip ({error}); download it again") from error
    return opened


def _episodes(archive: Path, members: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """The episode files by name; checks all members."""
    episodes: dict[str, zipfile.ZipInfo] = {}
    for member in members:
        path = PurePosixPath(member.filename.replace("\\", "/"))
        fault = ""
        if path.is_absolute() or ".." in path.parts or ":" in member.filename:
            fault = "a path outside its folder"
        elif stat.S_ISLNK(member.external_attr >> 16):
            fault = "a link"
        elif path.suffix != ".npz" or member.is_dir():
            continue
        elif not 0 < member.file_size <= _MOST_EPISODE_BYTES:
            fault = f"of {member.file_size:,} bytes; an episode has 1 to {_MOST_EPISODE_BYTES:,}"
        elif path.name in episodes:
            fault = "whose name another episode has"
        if fault:
            raise DataError(f"{archive} holds {member.filename!r}, {fault}: the zip is not used")
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


@dataclass(frozen=True)
class ExorlConfig(ConvertConfig):
    """Settings of a download and conversion.

    Attributes:
      download: Download the collector's zip from ExoRL's server and unpack it before the conversion.
      dry_run: List the sizes of the zips on the server (of all nine collectors unless --collector names one
        of ExoRL's) and stop.
      url_base: Address of the zips, {url_base}/{domain}/{collector}.zip.
    """

    download: bool = False
    dry_run: bool = False
    url_base: str = URL_BASE


def main(config: Annotated[ExorlConfig, tyro.conf.arg(name=""), tyro.conf.FlagCreatePairsOff]) -> int:
    """Converts ExoRL episode files to an HDF5 store, and downloads them first with --download."""
    if config.dry_run:
        total = 0
        with http_client() as client:
            for name in (config.collector,) if config.collector in COLLECTORS else COLLECTORS:
                remote = look_up(client, archive_url(config.url_base, config.domain, name))
                total += remote.size if remote else 0
                size = f"{remote.size:,} bytes" if remote else "not on the server"
                print(f"{config.domain}/{name}.zip  {size}")
        print(f"total {total:,} bytes, and as many again unpacked")
        return 0
    if config.download:
        fetched = fetch_episodes(config.root, config.url_base, config.domain, config.collector)
        print(f"{fetched.url}: {fetched.episodes} episodes, sha256 {fetched.sha256}")
    summary = convert(config)
    print(f"{summary.store}: {summary.episodes} episodes, {summary.added} of them new")
    for file, reason in summary.skipped:
        say(f"skipped {file}: {reason}")
    if summary.skipped:
        say(f"skipped {len(summary.skipped)} files; repair or remove them and run again")
    return 1 if summary.skipped else 0


if __name__ == "__main__":
    run(main)
