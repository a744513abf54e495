"""Brings ExoRL's episodes here, validates them, and converts them to the HDF5 store.

    python -m data_prep.exorl --domain walker --collector rnd --dry-run     how large the download is
    python -m data_prep.exorl --domain walker --collector rnd --download    fetch, unpack, convert
    python -m data_prep.exorl --domain walker --collector rnd     {data}/exorl/walker/rnd/buffer -> store
    python -m data_prep.exorl --domain walker                     the same for our own `mix`

A stopped run goes on where it was, the download as well. A file that is not a valid episode is left
out and listed, and the exit status is then 1.
"""

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from agentic_ring.cli import run
from data_prep.episodes.conversion import ConvertConfig, convert
from data_prep.episodes.exorl_archive import COLLECTORS, URL_BASE, archive_sizes, fetch_episodes


@dataclass(frozen=True)
class ExorlConfig(ConvertConfig):
    """What to bring and convert.

    Attributes:
      download: fetch the collector's zip from ExoRL's server and unpack it first, or go on doing so.
      dry_run: only list what there is to download, of the collector or, with our own, of all nine.
      url_base: where the zips are, {url_base}/{domain}/{collector}.zip.
    """

    download: bool = False
    dry_run: bool = False
    url_base: str = URL_BASE


def print_sizes(config: ExorlConfig) -> None:
    """Lists the zips of a domain with their sizes; fetches none."""
    collectors = (config.collector,) if config.collector in COLLECTORS else COLLECTORS
    sizes = archive_sizes(config.url_base, config.domain, collectors)
    for name, size in sizes.items():
        print(f"{config.domain}/{name}.zip  {'not on the server' if size is None else f'{size:,} bytes'}")
    print(f"together {sum(size or 0 for size in sizes.values()):,} bytes, and as many again unpacked")


def main(config: Annotated[ExorlConfig, tyro.conf.arg(name=""), tyro.conf.FlagCreatePairsOff]) -> int:
    """Downloads ExoRL's episodes if asked to, and converts episode files to the HDF5 store.

    Raises:
      DataError: there are no episodes, or the download failed.
      UnknownNameError: there is no such collector.
    """
    if config.dry_run:
        print_sizes(config)
        return 0
    if config.download:
        fetched = fetch_episodes(config.root, config.url_base, config.domain, config.collector)
        print(f"{fetched.url}: {fetched.episodes} episodes, sha256 {fetched.sha256}")
    summary = convert(config)
    print(f"{summary.store}: {summary.episodes} episodes, {summary.added} of them new")
    for file, reason in summary.skipped:
        print(f"left out {file}: {reason}", file=sys.stderr)
    if summary.skipped:
        print(f"left out {len(summary.skipped)} files; mend or remove them and run again", file=sys.stderr)
    return 1 if summary.skipped else 0


if __name__ == "__main__":
    run(main)
