"""Validates ExoRL episode files and converts them to the HDF5 store, with the rewards of every task.

    python -m data_prep.exorl --domain walker --collector rnd     {data}/exorl/walker/rnd/buffer -> store
    python -m data_prep.exorl --domain walker                     the same for our own `mix`

ExoRL's data (denisyarats/exorl) are not downloaded by this program; without them it says where they
are and where they go. A file that is not a valid episode is left out and listed, and the exit status
is then 1. Conversion goes in parts, each complete and beside the store, so that a run that was
stopped goes on where it was; at the end all parts become one store, which takes the place of the old
one in a single rename. Episodes that the old store holds stay, new files are added.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from agentic_ring.cli import run
from agentic_ring.data.store import StoredEpisode, TrajectoryStore
from agentic_ring.data.store_writer import StoreDescription, merge_stores, write_store
from agentic_ring.data.tasks import domain_named
from agentic_ring.data.trajectories import Episode, is_held
from agentic_ring.errors import ConfigError, DataError, StoreError, UnknownNameError
from agentic_ring.progress import Advance, progress
from data_prep.episode_files import EpisodeFile, episode_file, read_episode
from data_prep.folders import REWARD_FREE_SUFFIX, collector_folder, data_root, store_path
from data_prep.relabel import Relabeller

EXORL_COLLECTORS = ("aps", "icm_apt", "diayn", "disagreement", "icm", "proto", "random", "rnd", "smm")
OWN_COLLECTOR = "mix"
"""What ``data_prep.collect`` makes unless told otherwise."""


@dataclass(frozen=True)
class ConvertConfig:
    """What to convert.

    Attributes:
      domain: walker, cheetah or cartpole.
      collector: folder below exorl/{domain}: ExoRL's collector, or one of data_prep.collect.
      max_episodes: take this many, spread evenly over the order of collection: the first ones alone
        would be the earliest and poorest exploration. All if not given.
      part_episodes: episodes converted between two points that an interrupted run can go on from.
      exorl_compat: relabel with zeroed control, as ExoRL's own code does.
      data: data folder; $AGENTIC_RING_DATA or ./data if not given.
    """

    domain: str = "walker"
    collector: str = "mix"
    max_episodes: int | None = None
    part_episodes: int = 128
    exorl_compat: bool = False
    data: Path | None = None

    def __post_init__(self) -> None:
        domain_named(self.domain)
        for name in ("max_episodes", "part_episodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class ConversionSummary:
    """What came of it.

    Attributes:
      store: path of the store.
      episodes: number it holds now.
      added: how many of them are new.
      skipped: (file, reason) of each that was left out.
    """

    store: Path
    episodes: int
    added: int
    skipped: tuple[tuple[Path, str], ...]


@dataclass(frozen=True)
class _Source:
    """A file, its name in the store, and its label if the collection wrote one."""

    file: Path
    name: str
    label: dict[str, Any] | None


def convert(config: ConvertConfig) -> ConversionSummary:
    """Brings the store up to date with the episode files; see the module.

    Raises:
      DataError: there are no episode files, or none is valid.
      StoreError: the store, or a part of one, is damaged or of another version.
    """
    domain = domain_named(config.domain)
    root = config.data or data_root()
    path = store_path(root, domain.name, config.collector)
    parts = path.with_name(f"{path.name}.parts")
    description = StoreDescription(domain, config.collector, domain.tasks)
    sources, skipped = _find_sources(root, config)
    with ExitStack() as stack:
        stores: list[TrajectoryStore] = []
        converted: set[str] = set()
        for existing in _existing(path, parts):
            store = _open_verified(stack, existing, description)
            # A run that was stopped between the last rename and tidying up left parts already merged.
            if not converted.issuperset(store.sources):
                stores.append(store)
                converted.update(store.sources)
        before = stores[0].num_episodes if path.exists() else 0
        todo = [source for source in sources if source.name not in converted]
        relabeller = Relabeller(domain, domain.tasks, control=not config.exorl_compat)
        with progress(f"converting {path.stem}", len(todo)) as advance:
            episodes = _read_all(todo, relabeller, config, skipped, advance)
            written = _write_parts(parts, config.part_episodes, description, episodes)
            stores.extend(_open_verified(stack, part, description) for part in written)
        if not stores:
            reasons = "; ".join(f"{file.name}: {reason}" for file, reason in skipped[:3])
            where = " and ".join(str(folder / "buffer") for folder in _folders(root, config))
            raise DataError(f"none of the {len(skipped)} files in {where} is valid: {reasons}")
        total = sum(store.num_episodes for store in stores)
        if total > before:
            merge_stores(path, description, stores)
    for part in parts.glob("*"):
        part.unlink()
    if parts.exists():
        parts.rmdir()
    return ConversionSummary(path, total, total - before, tuple(skipped))


def _folders(root: Path, config: ConvertConfig) -> list[Path]:
    """The collector's folder, and beside it what `mix` explored without reward."""
    folder = collector_folder(root, config.domain, config.collector)
    reward_free = folder.with_name(folder.name + REWARD_FREE_SUFFIX)
    return [folder, *([reward_free] if reward_free.exists() else [])]


def _find_sources(root: Path, config: ConvertConfig) -> tuple[list[_Source], list[tuple[Path, str]]]:
    """Episode files in the order of collection, thinned to ``max_episodes``, and the misnamed ones."""
    files: list[tuple[EpisodeFile, _Source]] = []
    skipped: list[tuple[Path, str]] = []
    for folder in _folders(root, config):
        labels = _read_labels(folder)
        for file in sorted(folder.glob("buffer/*.npz")):
            try:
                parsed = episode_file(file)
            except DataError as error:
                skipped.append((file, str(error)))
                continue
            files.append((parsed, _Source(file, f"{folder.name}/{file.name}", labels.get(file.name))))
    if not files and not skipped:
        if config.collector not in (*EXORL_COLLECTORS, OWN_COLLECTOR):
            raise UnknownNameError("collector", config.collector, (*EXORL_COLLECTORS, OWN_COLLECTOR))
        raise DataError(how_to_get_data(root, config))
    files.sort(key=lambda pair: (pair[1].file.parent, pair[0].index, pair[1].name))
    if config.max_episodes and config.max_episodes < len(files):
        middles = (np.arange(config.max_episodes) + 0.5) * len(files) / config.max_episodes
        files = [files[int(middle)] for middle in middles]
    return [source for _, source in files], skipped


def _read_labels(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "episodes.jsonl"
    if not path.exists():
        return {}
    try:
        labels = [json.loads(line) for line in path.read_text().splitlines()]
        used = ("algorithm", "action_repeat")
        return {label["file"]: {key: label[key] for key in used} for label in labels}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error!r}); mend it, or remove it to convert without labels"
        ) from None


def _read_all(
    sources: Sequence[_Source],
    relabeller: Relabeller,
    config: ConvertConfig,
    skipped: list[tuple[Path, str]],
    advance: Advance,
) -> Iterator[StoredEpisode]:
    """Valid episodes with their rewards; the others are added to ``skipped``."""
    for number, source in enumerate(sources):
        try:
            episode = read_episode(episode_file(source.file), domain_named(config.domain))
            relabeller.check_physics(episode)
            yield StoredEpisode(
                episode=episode,
                rewards=relabeller.rewards(episode),
                algorithm=source.label["algorithm"] if source.label else config.collector,
                action_repeat=_action_repeat(episode, source.label),
                source=source.name,
            )
        except DataError as error:
            skipped.append((source.file, str(error)))
        advance(number + 1, f"{len(skipped)} left out" if skipped else "")


def _action_repeat(episode: Episode, label: dict[str, Any] | None) -> int:
    """What the collection says, if the actions agree; a saturated policy hides how long it holds one."""
    if label is None:
        return episode.action_repeat
    repeat = label["action_repeat"]
    if not is_held(episode.action[1:], repeat):
        raise DataError(f"its actions change more often than its label's action repeat, {repeat}")
    return repeat


def _write_parts(
    folder: Path, size: int, description: StoreDescription, episodes: Iterator[StoredEpisode]
) -> Iterator[Path]:
    """Writes stores of up to ``size`` episodes each, beside those that are there, and yields their paths."""
    number = len(list(folder.glob("part-*.h5")))
    while chunk := [episode for _, episode in zip(range(size), episodes, strict=False)]:
        part = folder / f"part-{number:06d}.h5"
        write_store(part, description, chunk)
        yield part
        number += 1


def _existing(path: Path, parts: Path) -> list[Path]:
    """The store, and the parts of an interrupted conversion."""
    return [*([path] if path.exists() else []), *sorted(parts.glob("part-*.h5"))]


def _open_verified(stack: ExitStack, path: Path, description: StoreDescription) -> TrajectoryStore:
    store = stack.enter_context(TrajectoryStore.open(path))
    store.verify()
    if store.domain != description.domain:
        expected = f"expected {description.domain.name}"
        raise StoreError(f"{path} is of domain {store.domain.name}, {expected}; remove it")
    if set(store.tasks) != set(description.tasks):
        raise StoreError(
            f"{path} has rewards of {store.tasks}, expected {description.tasks}; "
            f"run `python -m data_prep.relabel --store {path}` first"
        )
    return store


def how_to_get_data(root: Path, config: ConvertConfig) -> str:
    """What to do when there are no episode files."""
    folder = collector_folder(root, config.domain, config.collector)
    return (
        f"there are no episode files in {folder / 'buffer'}. To use ExoRL's, fetch\n"
        f"  https://dl.fbaipublicfiles.com/exorl/{config.domain}/{config.collector}.zip\n"
        f"and unpack it so that its buffer/*.npz lie there; collectors: {', '.join(EXORL_COLLECTORS)} "
        "(about 2.6 GB each for walker). To make your own instead:\n"
        f"  python -m data_prep.collect --domain {config.domain}"
    )


def main(config: Annotated[ConvertConfig, tyro.conf.arg(name="")]) -> int:
    """Converts ExoRL episode files to the HDF5 store."""
    summary = convert(config)
    print(f"{summary.store}: {summary.episodes} episodes, {summary.added} of them new")
    for file, reason in summary.skipped:
        print(f"left out {file}: {reason}", file=sys.stderr)
    if summary.skipped:
        print(f"left out {len(summary.skipped)} files; mend or remove them and run again", file=sys.stderr)
    return 1 if summary.skipped else 0


if __name__ == "__main__":
    run(main)
