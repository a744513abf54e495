"""ExoRL as it is published: a zip for each domain and collector, and how it gets to its place here.

    {base}/{domain}/{collector}.zip -> {data}/exorl/{domain}/{collector}/buffer/*.npz
                                       {data}/exorl/{domain}/{collector}/download.json

``download.json`` records where the episodes are from: address, bytes, SHA-256 and their number. It is
written last; the zip, which is as large as the episodes, is then removed.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from agentic_ring.errors import DataError, UnknownNameError
from agentic_ring.files import replacing
from agentic_ring.progress import progress
from data_prep.episodes.download import RemoteFile, download, http_client, look_up
from data_prep.episodes.episode_zip import unpack_episodes
from data_prep.folders import collector_folder

URL_BASE = "https://dl.fbaipublicfiles.com/exorl"
COLLECTORS = ("aps", "icm_apt", "diayn", "disagreement", "icm", "proto", "random", "rnd", "smm")


@dataclass(frozen=True)
class Provenance:
    """What ``download.json`` says of a collector's episodes."""

    url: str
    bytes: int
    sha256: str
    episodes: int


def archive_sizes(url_base: str, domain: str, collectors: tuple[str, ...]) -> dict[str, int | None]:
    """Bytes of each collector's zip, None where the server has none.

    Raises:
      DataError: the server cannot be reached.
    """
    with http_client() as client:
        found = {name: look_up(client, _url(url_base, domain, name)) for name in collectors}
    return {name: remote.size if remote else None for name, remote in found.items()}


def fetch_episodes(root: Path, url_base: str, domain: str, collector: str) -> Provenance:
    """Downloads and unpacks a collector's episodes, or what is still missing of them.

    Raises:
      UnknownNameError: ExoRL has no such collector.
      DataError: the download failed, or is not a zip of episodes; see ``unpack_episodes``.
    """
    if collector not in COLLECTORS:
        raise UnknownNameError("ExoRL collector", collector, COLLECTORS)
    folder = collector_folder(root, domain, collector)
    record = folder / "download.json"
    if record.exists():
        return _read_record(record)
    url = _url(url_base, domain, collector)
    with http_client() as client:
        remote = look_up(client, url)
        if remote is None:
            raise DataError(f"there is no {url}; ExoRL has the collectors {', '.join(COLLECTORS)}")
        archive = folder / f"{collector}.zip"
        digest = _download(client, remote, archive)
    episodes = unpack_episodes(archive, folder / "buffer")
    provenance = Provenance(url, remote.size, digest, episodes)
    with replacing(record) as beside:
        beside.write_text(json.dumps(asdict(provenance), indent=1) + "\n")
    archive.unlink()
    return provenance


def how_to_get_episodes(root: Path, domain: str, collector: str) -> str:
    """What to do when there are no episode files."""
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


def _read_record(path: Path) -> Provenance:
    try:
        return Provenance(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); remove it to download its episodes again") from None


def _url(base: str, domain: str, collector: str) -> str:
    return f"{base.rstrip('/')}/{domain}/{collector}.zip"
