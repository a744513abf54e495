"""Exports a store to a Minari dataset, or imports one. Needs the extra ``minari``.

    python -m data_prep.minari_io export --store data/store/walker-rnd.h5 --dataset exorl/walker/rnd-v0
    python -m data_prep.minari_io import --dataset exorl/walker/rnd-v0 --store data/store/walker-rnd.h5

Datasets are stored below ``$MINARI_DATASETS_PATH``, as the package ``minari`` does;
``minari.load_dataset`` opens them and ``recover_environment`` gives the task.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from agentic_ring.extras import needs_extra
from agentic_ring.terminal.cli import optional_flag, run


@dataclass(frozen=True)
class Export:
    """Writes a store's episodes to a new Minari dataset.

    Attributes:
      store: HDF5 store to export.
      dataset: Id of the new dataset, such as exorl/walker/rnd-v0.
      task: Task whose rewards become the dataset's rewards. Default: the store's first.
    """

    store: Path
    dataset: str
    task: Annotated[str | None, optional_flag()] = None


@dataclass(frozen=True)
class Import:
    """Writes a Minari dataset that was exported from a store to a store again.

    Attributes:
      dataset: Id of the dataset.
      store: HDF5 store to write; an existing one is replaced.
    """

    dataset: str
    store: Path


def main(
    config: Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Import, tyro.conf.subcommand("import")],
) -> None:
    """Exports a trajectory store to a Minari dataset, or imports such a dataset into a store.

    Raises:
      MissingExtraError: the package ``minari`` is missing.
    """
    with needs_extra("minari"):
        from data_prep.minari_datasets import export_store, import_dataset

    if isinstance(config, Export):
        print(f"{config.dataset}: {export_store(config.store, config.dataset, config.task)} episodes")
    else:
        print(f"{config.store}: {import_dataset(config.dataset, config.store)} episodes")


if __name__ == "__main__":
    run(main, config=(tyro.conf.OmitArgPrefixes,))
