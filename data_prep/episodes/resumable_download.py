"""Fetches one large file over HTTP, so that a download that broke off goes on where it was.

    {name}.part         what has arrived
    {name}.part.json    what it is part of: address, size and the server's tag of this version

A part of another version is thrown away. Servers that know no ranges send the file from its beginning.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from agentic_ring.errors import DataError
from agentic_ring.files import replacing

_ATTEMPTS_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server.

    Attributes:
      size: bytes.
      etag: the server's name for this version of the file, if it gives one.
    """

    url: str
    size: int
    etag: str | None


def http_client() -> httpx.Client:
    """A client that takes bytes as they are and gives up on a silent server after half a minute."""
    return httpx.Client(follow_redirects=True, timeout=30, headers={"Accept-Encoding": "identity"})


def look_up(client: httpx.Client, url: str) -> RemoteFile | None:
    """What the server says of a file, without fetching it; None if it has no such file.

    Raises:
      DataError: the server cannot be reached, refuses, or does not tell the size.
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
    """Fetches ``remote`` to ``path``, going on from what an earlier call left, and returns its SHA-256.

    Args:
      advance: called with the number of bytes that are there.

    Raises:
      DataError: the connection broke again and again, or the file is not of the size that was promised.
    """
    part, about = (path.with_name(path.name + ending) for ending in (".part", ".part.json"))
    if _size(path) == remote.size:
        return _digest(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    description = json.dumps(asdict(remote))
    if not about.exists() or about.read_text() != description:
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
                    "the same command again to go on from there"
                ) from error
    if have > remote.size:
        part.unlink()
        raise DataError(f"{remote.url} sent {have:,} bytes, not the {remote.size:,} it promised; run again")
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
            raise DataError(
                f"{remote.url} answered {response.status_code} to a request for its rest; run again"
            )
        with part.open("ab" if goes_on else "wb") as file:
            for block in response.iter_raw():  # as they arrive: a block half filled would be lost
                file.write(block)
                advance(file.tell())
        if _size(part) < remote.size:
            raise httpx.RemoteProtocolError("the connection was closed early")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
