"""The store as a Minari dataset, and back. Needs the extra ``minari``.

    python -m data_prep.minari_io export --store data/store/walker-rnd.h5 --dataset exorl/walker/rnd-v0
    python -m data_prep.minari_io import --dataset exorl/walker/rnd-v0 --store data/store/walker-rnd.h5

Datasets lie where the package ``minari`` keeps its own, below ``$MINARI_DATASETS_PATH``;
``minari.load_dataset`` opens them and ``recover_environment`` gives the task.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from agentic_ring.cli import run
from agentic_ring.errors import ConfigError


@dataclass(frozen=True)
class Export:
    """A store becomes a Minari dataset.

    Attributes:
      store: the HDF5 store.
      dataset: id of the new dataset, such as exorl/walker/rnd-v0.
      task: whose rewards are the dataset's rewards; the store's first if not given.
    """

    store: Path
    dataset: str
    task: str | None = None


@dataclass(frozen=True)
class Import:
    """A Minari dataset that was exported from a store becomes a store again.

    Attributes:
      dataset: its id.
      store: the HDF5 store, which is replaced if it is there.
    """

    dataset: str
    store: Path


def main(
    config: Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Import, tyro.conf.subcommand("import")],
) -> None:
    """Turns a trajectory store into a Minari dataset, or the other way.

    Raises:
      ConfigError: the package ``minari`` is missing.
    """
    if importlib.util.find_spec("minari") is None:
        raise ConfigError("minari is missing: pip install 'agentic_ring[minari]'")
    # Only now: an installation without the extra gets the message above.
    from data_prep.episodes.minari_datasets import export_store, import_dataset

    if isinstance(config, Export):
        print(f"{config.dataset}: {export_store(config.store, config.dataset, config.task)} episodes")
    else:
        print(f"{config.store}: {import_dataset(config.dataset, config.store)} episodes")


if __name__ == "__main__":
    run(main, config=(tyro.conf.OmitArgPrefixes,))
