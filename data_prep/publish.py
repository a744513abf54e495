"""Writes a store as a folder of Parquet files with a data card.

    python -m data_prep.publish --store data/store/walker-mix.h5 --output published/walker-mix

``datasets`` opens the folder, pandas and pyarrow its folder ``data``. Needs the extra ``parquet``.
``data_prep.minari_io export`` writes a Minari dataset with such a card.
"""

from pathlib import Path
from typing import Any

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


def _columns(index: int, stored: StoredEpisode) -> dict[str, Any]:
    episode = stored.episode
    rows = len(episode) + 1

    def vectors(array: np.ndarray) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])

    return {
        "episode": [index] * rows,
        "step": range(rows),
        "observation": vectors(episode.observation),
        "action": vectors(episode.action),
        **{f"reward_{task}": reward for task, reward in stored.rewards.items()},
        "discount": episode.discount[:, 0],
        "physics": vectors(episode.physics),
        "recorded_reward": episode.reward[:, 0],
        "algorithm": [stored.algorithm] * rows,
        "action_repeat": [stored.action_repeat] * rows,
        "source": [stored.source] * rows,
    }


def main(store: Path, output: Path) -> None:
    """Writes a store as a folder of Parquet files with a data card.

    Args:
      store: HDF5 store, such as data/store/walker-mix.h5.
      output: New folder of the dataset.
    """
    if output.exists():
        raise ConfigError(f"{output} exists; name a new folder, or remove that one")
    with TrajectoryStore.open(store) as opened, replacing_folder(output) as beside:
        opened.verify()
        schema = _schema(opened)
        (beside / "data").mkdir()
        count = opened.num_episodes
        files = -(-count // SHARD_EPISODES)
        with progress(f"writing {output}", count) as advance:
            for number in range(files):
                name = f"train-{number:05d}-of-{files:05d}.parquet"
                with pq.ParquetWriter(beside / "data" / name, schema, compression="zstd") as writer:
                    for index in range(count)[number * SHARD_EPISODES :][:SHARD_EPISODES]:
                        columns = _columns(index, opened.episode(index))
                        writer.write_table(pa.Table.from_pydict(columns, schema=schema))
                        advance(index + 1)
        card = data_card(opened, [(field.name, str(field.type)) for field in schema])
        (beside / "README.md").write_text(card, encoding="utf-8")
    print(f"{output}: {count} episodes")


if __name__ == "__main__":
    run(main)
