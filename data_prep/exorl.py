"""Downloads ExoRL's episodes, validates them, and converts them to an HDF5 store.

    python -m data_prep.exorl --domain walker --collector rnd --dry-run     list the download's size
    python -m data_prep.exorl --domain walker --collector rnd --download    download, unpack, convert
    python -m data_prep.exorl --domain walker --collector rnd     {data}/exorl/walker/rnd/buffer -> store
    python -m data_prep.exorl --domain walker                     the same for our own `mix`

An interrupted download or conversion resumes when it is started again. A file that is not a valid episode
is skipped and listed, and the exit status is then 1.
"""

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from agentic_ring.terminal.cli import run
from data_prep.conversion import ConvertConfig, convert
from data_prep.episode_files import COLLECTORS, URL_BASE
from data_prep.exorl_download import archive_sizes, fetch_episodes


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


def print_sizes(config: ExorlConfig) -> None:
    """Prints the sizes of a domain's zips without downloading any."""
    collectors = (config.collector,) if config.collector in COLLECTORS else COLLECTORS
    sizes = archive_sizes(config.url_base, config.domain, collectors)
    for name, size in sizes.items():
        print(f"{config.domain}/{name}.zip  {'not on the server' if size is None else f'{size:,} bytes'}")
    print(f"total {sum(size or 0 for size in sizes.values()):,} bytes, and as many again unpacked")


def main(config: Annotated[ExorlConfig, tyro.conf.arg(name=""), tyro.conf.FlagCreatePairsOff]) -> int:
    """Converts ExoRL episode files to an HDF5 store, and downloads them first with --download.

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
        print(f"skipped {file}: {reason}", file=sys.stderr)
    if summary.skipped:
        print(f"skipped {len(summary.skipped)} files; repair or remove them and run again", file=sys.stderr)
    return 1 if summary.skipped else 0


if __name__ == "__main__":
    run(main)
