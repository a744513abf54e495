"""Downloads one large file over HTTP and resumes an interrupted download.

    {name}.part         the bytes received so far
    {name}.part.json    the file they belong to: address, size and the server's tag of this version

A part of another version is discarded. A server without range requests sends the file from its beginning.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from agentic_ring.errors import DataError
from agentic_ring.files.atomic import replacing

_ATTEMPTS_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server.

    Attributes:
      size: bytes.
      etag: the server's tag of this version of the file, if it sends one.
    """

    url: str
    size: int
    etag: str | None


def http_client() -> httpx.Client:
    """An HTTP client without compression and with a timeout of 30 seconds."""
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
    part.parent.mkdir(parents=True, exist_ok=True)
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
