"""Writes a store as a folder of Parquet files with a data card.

    python -m data_prep.publish --store data/store/walker-mix.h5 --output published/walker-mix

``datasets`` opens the folder, pandas and pyarrow its folder ``data``. Needs the extra ``parquet``.
``data_prep.minari_io export`` writes a Minari dataset with such a card.
"""

from pathlib import Path

from agentic_ring.extras import needs_extra
from agentic_ring.terminal.cli import run


def main(store: Path, output: Path) -> None:
    """Writes a store as a folder of Parquet files with a data card.

    Args:
      store: HDF5 store, such as data/store/walker-mix.h5.
      output: New folder of the dataset.

    Raises:
      MissingExtraError: the package ``pyarrow`` is missing.
      ConfigError: the folder exists.
    """
    with needs_extra("parquet"):
        from data_prep.parquet_files import export_parquet

    print(f"{output}: {export_parquet(store, output)} episodes")


if __name__ == "__main__":
    run(main)
