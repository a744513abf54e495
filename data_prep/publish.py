"""Writes a store as a folder of Parquet files with a data card.

    python -m data_prep.publish --store data/store/walker-mix.h5 --output published/walker-mix

``datasets`` opens the folder, pandas and pyarrow its folder ``data``. Needs the extra ``parquet``.
``data_prep.minari_io export`` writes a Minari dataset with such a card.
"""

from pathlib import Path

import numpy as np

from agentic_ring.data.store import StoredEpisode, TrajectoryStore
from agentic_ring.errors import ConfigError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing_folder
from agentic_ring.terminal.cli import run
from agentic_ring.terminal.progress import progress
from data_prep.data_card import data_card

with needs_extra("parquet"):
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingImports]

SHARD_EPISODES = 500
"""Episodes per file: about 150 MB of walker."""


def export_parquet(path: Path, folder: Path) -> int:
    """Writes ``data/*.parquet`` and a data card to a new folder; returns the number of episodes.

    Raises:
      ConfigError: the folder exists.
      StoreError: the store cannot be read or is damaged.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a new folder, or remove that one")
    with TrajectoryStore.open(path) as store, replacing_folder(folder) as beside:
        store.verify()
        schema = _schema(store)
        (beside / "data").mkdir()
        files = -(-store.num_episodes // SHARD_EPISODES)
        with progress(f"writing {folder}", store.num_episodes) as advance:
            for number in range(files):
                name = f"train-{number:05d}-of-{files:05d}.parquet"
                with pq.ParquetWriter(beside / "data" / name, schema, compression="zstd") as writer:
                    first = number * SHARD_EPISODES
                    for index in range(first, min(first + SHARD_EPISODES, store.num_episodes)):
                        columns = _columns(index, store.episode(index))
                        writer.write_table(pa.Table.from_pydict(columns, schema=schema))
                        advance(index + 1, "")
        card = data_card(store, [(field.name, str(field.type)) for field in schema])
        (beside / "README.md").write_text(card, encoding="utf-8")
        return store.num_episodes


def _schema(store: TrajectoryStore) -> pa.Schema:
    domain = store.domain
    return pa.schema(
        [
            ("episode", pa.int32()),
            ("step", pa.int32()),
            ("observation", pa.list_(pa.float32(), domain.observation_dim)),
            ("action", pa.list_(pa.float32(), domain.action_dim)),
            *((f"reward_{task}", pa.float32()) for task in store.tasks),
            ("discount", pa.float32()),
            ("physics", pa.list_(pa.float64(), domain.physics_dim)),
            ("recorded_reward", pa.float32()),
            ("algorithm", pa.dictionary(pa.int8(), pa.string())),
            ("action_repeat", pa.int32()),
            ("source", pa.dictionary(pa.int32(), pa.string())),
        ]
    )


def _columns(index: int, stored: StoredEpisode) -> dict[str, pa.Array]:
    episode = stored.episode
    rows = len(episode) + 1

    def vectors(array: np.ndarray) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])

    def constant(value: int | str, kind: pa.DataType) -> pa.Array:
        return pa.array([value] * rows, kind)

    return {
        "episode": constant(index, pa.int32()),
        "step": pa.array(np.arange(rows, dtype=np.int32)),
        "observation": vectors(episode.observation),
        "action": vectors(episode.action),
        **{f"reward_{task}": pa.array(reward) for task, reward in stored.rewards.items()},
        "discount": pa.array(episode.discount[:, 0]),
        "physics": vectors(episode.physics),
        "recorded_reward": pa.array(episode.reward[:, 0]),
        "algorithm": constant(stored.algorithm, pa.dictionary(pa.int8(), pa.string())),
        "action_repeat": constant(stored.action_repeat, pa.int32()),
        "source": constant(stored.source, pa.dictionary(pa.int32(), pa.string())),
    }


def main(store: Path, output: Path) -> None:
    """Writes a store as a folder of Parquet files with a data card.

    Args:
      store: HDF5 store, such as data/store/walker-mix.h5.
      output: New folder of the dataset.

    Raises:
      ConfigError: the folder exists.
    """
    print(f"{output}: {export_parquet(store, output)} episodes")


if __name__ == "__main__":
    run(main)
