"""Converts episode files to a store, with the rewards of every task, on all cores.

A file that is not a valid episode is skipped and listed. The conversion writes parts, each a complete
store beside the final one, so that an interrupted run can resume. At the end all parts become one store,
which replaces the old one in a single rename. It keeps the old store's episodes and adds the new files.
"""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count, islice
from pathlib import Path
from typing import Annotated

from agentic_ring.data.domains import Domain, domain_named
from agentic_ring.data.store import (
    StoredEpisode,
    StoreDescription,
    TrajectoryStore,
    data_root,
    store_path,
    write_store,
)
from agentic_ring.data.trajectories import detect_action_repeat, is_held
from agentic_ring.errors import ConfigError, DataError, StoreError, UnknownNameError, check_at_least_one
from agentic_ring.files.run_folder import only_writer
from agentic_ring.provenance import usable_cores
from agentic_ring.terminal.cli import optional_flag
from agentic_ring.terminal.progress import Advance, progress
from data_prep.episode_files import (
    COLLECTORS,
    OWN_COLLECTOR,
    EpisodeFile,
    as_exorl_loads,
    find_episodes,
    how_to_get_episodes,
    read_episode,
    source_folders,
    spread,
)
from data_prep.relabel import Relabeller

_COMPAT_SUFFIX = "-exorl_compat"
# While a process starts, which takes some seconds, another reads about this many episodes.
_EPISODES_WORTH_A_PROCESS = 128
_WAITING_PER_PROCESS = 4


@dataclass(frozen=True)
class ConvertConfig:
    """Settings of a conversion.

    Attributes:
      domain: Domain of the episodes: walker, cheetah, cartpole, quadruped, point_mass_maze or jaco.
      collector: Folder below exorl/{domain}: a collector of ExoRL or of data_prep.collect.
      max_episodes: Maximum number of episodes, spread evenly over the order of collection, as the first
        ones are the earliest and poorest exploration. Default: all.
      part_episodes: Number of episodes per part; an interrupted run resumes after its last complete part.
      exorl_compat: Reproduce ExoRL's own loader: only the first million transitions, relabelled with zeroed
        control, in a separate store {domain}-{collector}-exorl_compat.h5.
      processes: Number of reading processes. Default: one per 128 episodes, at most one per core.
      data: Data folder. Default: $AGENTIC_RING_DATA or ./data.
    """

    domain: str = "walker"
    collector: str = "mix"
    max_episodes: Annotated[int | None, optional_flag()] = None
    part_episodes: int = 128
    exorl_compat: bool = False
    processes: Annotated[int | None, optional_flag()] = None
    data: Annotated[Path | None, optional_flag()] = None

    def __post_init__(self) -> None:
        domain_named(self.domain)
        counts = ("max_episodes", "part_episodes", "processes")
        check_at_least_one(self, *(name for name in counts if getattr(self, name) is not None))
        if self.exorl_compat and self.max_episodes is not None:
            raise ConfigError(
                "exorl_compat reads the episodes that ExoRL's loader reads; leave max_episodes out"
            )

    @property
    def root(self) -> Path:
        """The data folder."""
        return self.data or data_root()


@dataclass(frozen=True)
class ConversionSummary:
    """The store, the number of its episodes, how many are new, and (file, reason) of each skipped file."""

    store: Path
    episodes: int
    added: int
    skipped: tuple[tuple[Path, str], ...]


def convert(config: ConvertConfig) -> ConversionSummary:
    """Adds to the store all episode files that it lacks; see the module's docstring.

    Raises:
      UnknownNameError: there are no episode files, and no such collector.
      DataError: there are no episode files, or none is valid.
      StoreError: the store, or a part of one, is damaged or of another version.
    """
    domain = domain_named(config.domain)
    suffix = _COMPAT_SUFFIX if config.exorl_compat else ""
    path = store_path(config.root, domain.name, config.collector + suffix)
    parts = path.with_name(f"{path.name}.parts")
    description = StoreDescription(domain, config.collector, domain.tasks)
    folders = source_folders(config.root, config.domain, config.collector)
    files, skipped = find_episodes(folders)
    if not files and not skipped:
        if config.collector not in (*COLLECTORS, OWN_COLLECTOR):
            raise UnknownNameError("collector", config.collector, (*COLLECTORS, OWN_COLLECTOR))
        raise DataError(how_to_get_episodes(config.root, config.domain, config.collector))
    if config.exorl_compat:
        files = as_exorl_loads(files)
    elif config.max_episodes is not None:
        files = spread(files, config.max_episodes)
    with ExitStack() as stack:
        stack.callback(_remove_if_empty, parts)
        stack.enter_context(only_writer(parts, wait=True))
        stores: list[TrajectoryStore] = []
        converted: set[str] = set()
        earlier = sorted(parts.glob("part-*.h5"))
        for existing in ([path] if path.exists() else []) + earlier:
            store = _open_verified(stack, existing, description)
            # A run that was killed after the last rename may have left parts that are merged already.
            if not converted.issuperset(store.sources):
                stores.append(store)
                converted.update(store.sources)
        before = stores[0].num_episodes if path.exists() else 0
        todo = [file for file in files if file.source not in converted]
        with progress(f"converting {path.stem}", len(todo)) as advance:
            episodes = _valid(todo, config, skipped, advance)
            numbers = count(len(earlier))
            while chunk := list(islice(episodes, config.part_episodes)):
                part = parts / f"part-{next(numbers):06d}.h5"
                write_store(part, description, chunk)
                stores.append(_open_verified(stack, part, description))
        if not stores:
            reasons = "; ".join(f"{file.name}: {reason}" for file, reason in skipped[:3])
            where = " and ".join(str(folder / "buffer") for folder in folders)
            raise DataError(f"none of the {len(skipped)} files in {where} is valid: {reasons}")
        total = sum(store.num_episodes for store in stores)
        if total > before:
            write_store(path, description, (each for store in stores for each in store.episodes()))
        for part in parts.glob("*.h5"):
            part.unlink()
    return ConversionSummary(path, total, total - before, tuple(skipped))


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _valid(
    files: Sequence[EpisodeFile], config: ConvertConfig, skipped: list[tuple[Path, str]], advance: Advance
) -> Iterator[StoredEpisode]:
    """Yields valid episodes with their rewards, and adds the other files to ``skipped``."""
    for number, result in enumerate(_read_all(files, config), start=1):
        if isinstance(result, StoredEpisode):
            yield result
        else:
            skipped.append((files[number - 1].path, result))
        advance(number, f"{len(skipped)} skipped" if skipped else "")


def _open_verified(stack: ExitStack, path: Path, description: StoreDescription) -> TrajectoryStore:
    store = stack.enter_context(TrajectoryStore.open(path))
    store.verify()
    if store.domain != description.domain:
        names = f"{store.domain.name}, expected {description.domain.name}"
        raise StoreError(f"{path} is of domain {names}; remove it")
    if set(store.tasks) != set(description.tasks):
        raise StoreError(
            f"{path} has rewards of {store.tasks}, expected {description.tasks}; "
            f"run `python -m data_prep.relabel --store {path}` first"
        )
    return store


@lru_cache(1)  # in each process
def _relabeller(domain: Domain, control: bool) -> Relabeller:
    return Relabeller(domain, domain.tasks, control)


def _read(domain: Domain, collector: str, control: bool, file: EpisodeFile) -> StoredEpisode | str:
    """Returns an episode with the rewards of all tasks, or what is wrong with its file.

    Without a label, ``collector`` is the algorithm.
    """
    relabeller = _relabeller(domain, control)
    try:
        episode = read_episode(file, domain)
        relabeller.check_physics(episode)
        if label := file.label:
            # Saturated actions hide the action repeat, so the label's counts, if the actions agree.
            algorithm, action_repeat = label.algorithm, label.action_repeat
            if not is_held(episode.action[1:], action_repeat):
                return f"its actions change more often than its label's action repeat, {action_repeat}"
        else:
            algorithm, action_repeat = collector, detect_action_repeat(episode.action[1:])
        return StoredEpisode(episode, relabeller.rewards(episode), algorithm, action_repeat, file.source)
    except DataError as error:
        return str(error)


def _read_all(files: Sequence[EpisodeFile], config: ConvertConfig) -> Iterator[StoredEpisode | str]:
    """Yields the episode of each file in order, or an error message; memory holds few at a time."""
    if not files:
        return
    read = partial(_read, domain_named(config.domain), config.collector, not config.exorl_compat)
    processes = config.processes or min(usable_cores(), -(-len(files) // _EPISODES_WORTH_A_PROCESS))
    if processes == 1:
        yield from map(read, files)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy JAX's threads
    pool = ProcessPoolExecutor(processes, context, initializer=_leave_with_parent)
    try:
        rest = iter(files)
        waiting = deque(pool.submit(read, each) for each in islice(rest, processes * _WAITING_PER_PROCESS))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(read, each) for each in islice(rest, 1))
    except BrokenProcessPool as error:
        raise DataError(
            f"one of the {processes} processes that read episodes died ({error}); memory may have run "
            "out: run the same command again, with fewer --processes, to resume"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_with_parent() -> None:
    """Ends this process with its parent, which cannot stop it once it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
