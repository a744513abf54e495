"""Brings the store of a domain up to date: with ExoRL's episodes if they are there, else with our own.

python -m data_prep.stores --domain walker     collects our own mix if there are no episodes (minutes)
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from agentic_ring.data.domains import Domain, domain_named, parse_task
from agentic_ring.data.store import data_root
from agentic_ring.data.task_datasets import TrajectoryDataset
from agentic_ring.data.task_datasets import make_env_and_datasets as open_env_and_datasets
from agentic_ring.errors import ConfigError
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.provenance import usable_cores
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from data_prep.collect import CollectConfig, collect
from data_prep.conversion import ConvertConfig, convert
from data_prep.episode_files import OWN_COLLECTOR, CollectionFolder, collector_folder

if TYPE_CHECKING:
    import gymnasium

OWN_PREFIXES = ("mix", "mini_")
"""Prefixes of the folders that data_prep.collect writes; all other folders are taken for ExoRL's."""
_OWN_FOLDERS = {"mix": OWN_COLLECTOR, "family": "mini_family"}
_MOST_PROCESSES = 4  # for `family`; `mix` needs the cores for its learners


def prepare_store(
    domain: Domain, data: Path, collector: str | None, own: Literal["mix", "family"] = "mix"
) -> Path:
    """Finds or collects the episodes of a domain in a data folder and brings their store up to date.

    Without a ``collector`` it reads ExoRL's if there is one, else our ``own``. Before one of the latter
    is read, it is collected, with the domain's number of episodes, or completed with its own.

    Raises:
      ConfigError: several of ExoRL's collectors are there and none was chosen.
      DataError: the chosen collector has no episodes, or none that is valid.
    """
    chosen = collector or _exorl_collector(domain, data) or _OWN_FOLDERS[own]
    if chosen in _OWN_FOLDERS.values():
        why = f"no ExoRL data under {data}: " if collector is None else ""
        say(
            f"{why}using our own exploration of {domain.name}, which is not ExoRL's (missing episodes are "
            "collected now)"
        )
        own = "mix" if chosen == OWN_COLLECTOR else "family"
        processes = min(usable_cores(), _MOST_PROCESSES) if own == "family" else 1
        episodes = CollectionFolder(collector_folder(data, domain.name, chosen)).episodes()
        collect(CollectConfig(domain.name, own, episodes=episodes, processes=processes, output=data))
    summary = convert(ConvertConfig(domain=domain.name, collector=chosen, data=data))
    for file, reason in summary.skipped:
        say(f"left out {file}: {reason}")
    say(f"{summary.store}: {summary.episodes} episodes")
    return summary.store


def _exorl_collector(domain: Domain, data: Path) -> str | None:
    folders = (path.parent for path in collector_folder(data, domain.name, "").glob("*/buffer"))
    names = sorted(folder.name for folder in folders if not folder.name.startswith(OWN_PREFIXES))
    if len(names) > 1:
        raise ConfigError(
            f"{data} holds several collectors of {domain.name}; choose --collector {'|'.join(names)}"
        )
    return names[0] if names else None


def make_env_and_datasets(
    task: str, collector: str | None = None, data: Path | str | None = None, streaming: bool = False
) -> "tuple[gymnasium.Env, TrajectoryDataset, TrajectoryDataset]":
    """Does as ``agentic_ring.make_env_and_datasets``, and brings the store up to date first."""
    root = data_root() if data is None else Path(data)
    store = prepare_store(parse_task(task).domain, root, collector)
    chosen = store.stem.split("-", 1)[1]
    return open_env_and_datasets(task, chosen, root, streaming)


def main(
    domain: str,
    collector: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None,
    data: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
) -> None:
    """Brings the store of a domain up to date, and collects episodes of our own if there are none.

    Args:
      domain: Domain, such as walker.
      collector: ExoRL collector whose data is read, such as rnd, or mix or mini_family for our own. Default:
        ExoRL's if the data folder has some, else mix.
      data: Folder of the data. Default: $AGENTIC_RING_DATA, or else data.
    """
    simulate_cpu_devices()
    prepare_store(domain_named(domain), data or data_root(), collector)


if __name__ == "__main__":
    cli.run(main)
