"""Batches as global arrays: each process reads only the rows and positions that its own devices hold.

A batch depends only on its number. So the iterator's state is that number, and a resumed run continues with
the next batch, on any mesh and with any number of processes.
"""

from collections.abc import Callable, Iterator, Set
from typing import NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.extras import needs_extra
from agentic_ring.mesh import ShardingRules

with needs_extra("models"):
    import grain

ENDLESS = 1 << 40
"""More batches than any run takes; the dataset is a function of the index and stores nothing."""

LoadRow = Callable[[int, np.ndarray], dict[str, np.ndarray]]
"""(number of a row, positions in the layout, ascending) -> arrays [positions, ...] by field name."""


class Block(NamedTuple):
    """The rows of a batch and the positions of the sequence that one device holds."""

    rows: range
    columns: range


Blocks = dict[Block, dict[str, np.ndarray]]
"""Arrays [rows, columns, ...] of each block by field name."""


def block_at(index: tuple[slice, ...] | None, shape: tuple[int, int]) -> Block:
    """Returns the block of a device from its index into an array [B, S, ...]; None is the whole array."""
    axes = (slice(None), slice(None)) if index is None else index[:2]
    return Block(*(range(*axis.indices(size)) for axis, size in zip(axes, shape, strict=True)))


def read_blocks(load: LoadRow, first_row: int, blocks: Set[Block]) -> Blocks:
    """Reads the blocks of a batch; each row is loaded once, with all of its columns that some block contains.

    A process may hold scattered blocks: a ring that follows the links of a TPU's torus passes through a host,
    leaves it, and comes back. ``first_row`` is the number of the batch's first row.
    """
    columns = {
        row: np.unique(np.concatenate([block.columns for block in blocks if row in block.rows]))
        for row in sorted({row for block in blocks for row in block.rows})
    }
    loaded = {row: load(first_row + row, places) for row, places in columns.items()}

    def part(name: str, row: int, wanted: range) -> np.ndarray:
        start = np.searchsorted(columns[row], wanted.start)
        return loaded[row][name][start : start + len(wanted)]

    return {
        block: {
            name: np.stack([part(name, row, block.columns) for row in block.rows])
            for name in loaded[block.rows.start]
        }
        for block in blocks
    }


class ShardedBatches:
    """An endless iterator of fields [B, S, ...], with rows sharded over data and fsdp, S over the ring.

    Batch b holds rows b x B to (b + 1) x B - 1.

    Args:
      load: reads chosen positions of a row; called from several threads.
      batch_size: number of rows B, over all processes.
      length: number of positions S in a row.
    """

    def __init__(self, load: LoadRow, batch_size: int, length: int, mesh: Mesh):
        self._load = load
        self._mesh = mesh
        self._shape = (batch_size, length)
        sharding = ShardingRules().sharding(mesh, self._shape, ("batch", "sequence"))
        indices = sharding.addressable_devices_indices_map(self._shape).values()
        self._held = {block_at(index, self._shape) for index in indices}
        self._start(0)

    def _start(self, number: int) -> None:
        """Starts reading ahead from batch ``number``."""

        def read(batch: int) -> Blocks:
            return read_blocks(self._load, batch * self._shape[0], self._held)

        dataset = grain.MapDataset.range(number, ENDLESS).map(read)
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
        self._batches: Iterator[Blocks] = iter(dataset.to_iter_dataset(options))
        self._next = number

    def __iter__(self) -> Self:
        return self

    def next_fields(self) -> dict[str, jax.Array]:
        """Returns the arrays of the next batch by field name, on the devices."""
        blocks = next(self._batches)
        self._next += 1
        return {name: self._place(name, blocks) for name in next(iter(blocks.values()))}

    def _place(self, name: str, blocks: Blocks) -> jax.Array:
        inner = next(iter(blocks.values()))[name].shape[2:]
        shape, axes = (*self._shape, *inner), ("batch", "sequence", *(None,) * len(inner))
        sharding = ShardingRules().sharding(self._mesh, shape, axes)
        return jax.make_array_from_callback(
            shape, sharding, lambda index: blocks[block_at(index, self._shape)][name]
        )

    def get_state(self) -> dict[str, int]:
        """Returns the number of the next batch, which is the same on every process."""
        return {"next_index": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        """Continues from a state that ``get_state`` returned, on this or another mesh."""
        self._start(state["next_index"])
