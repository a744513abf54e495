"""Batches as global arrays: each process reads only the rows and positions that its own devices hold.

A batch depends only on its number. So the iterator's state is that number (kept by grain), and a resumed run
continues with the next batch.
"""

from collections.abc import Callable

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.mesh import ShardingRules

ENDLESS = 1 << 40
"""More batches than any run takes; the dataset is a function of the index and stores nothing."""

LoadRow = Callable[[int, slice], dict[str, np.ndarray]]
"""(number of a row, positions in the layout) -> arrays [positions, ...] by field name."""


class ShardedBatches:
    """An endless iterator of fields [B, S, ...], with rows sharded over data and fsdp, S over the ring.

    Batch b holds rows b x B to (b + 1) x B - 1.

    Args:
      load: reads chosen positions of a row; called from several threads.
      batch_size: number of rows B, over all processes.
      length: number of positions S in a row.
    """

    def __init__(self, load: LoadRow, batch_size: int, length: int, mesh: Mesh, rules: ShardingRules):
        self._mesh = mesh
        self._rules = rules
        self._shape = (batch_size, length)
        rows, columns = self.local_block()
        local_rows = rows.stop - rows.start

        def row(number: int) -> dict[str, np.ndarray]:
            batch, row = divmod(number, local_rows)
            return load(batch * batch_size + rows.start + row, columns)

        dataset = grain.MapDataset.range(ENDLESS).map(row).batch(local_rows)
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
        self._batches = iter(dataset.to_iter_dataset(options))

    def local_block(self) -> tuple[slice, slice]:
        """Returns the batch rows and sequence positions that this process's devices hold."""
        sharding = self._rules.sharding(self._mesh, self._shape, ("batch", "sequence"))
        indices = sharding.addressable_devices_indices_map(self._shape).values()
        bounds = [
            [axis.indices(size)[:2] for axis, size in zip(index or (), self._shape, strict=True)]
            for index in indices
        ]
        (row_starts, row_stops), (column_starts, column_stops) = np.array(bounds).transpose(1, 2, 0)
        return slice(row_starts.min(), row_stops.max()), slice(column_starts.min(), column_stops.max())

    def next_fields(self) -> dict[str, jax.Array]:
        """Returns the arrays of the next batch by field name, on the devices."""
        return {name: self._place(array) for name, array in next(self._batches).items()}

    def _place(self, local: np.ndarray) -> jax.Array:
        shape = (*self._shape, *local.shape[2:])
        axes = ("batch", "sequence", *(None,) * (local.ndim - 2))
        sharding = self._rules.sharding(self._mesh, shape, axes)
        return jax.make_array_from_process_local_data(sharding, local, shape)

    def get_state(self) -> dict:
        """Returns the iterator's state, which JSON can represent."""
        return self._batches.get_state()

    def set_state(self, state: dict) -> None:
        """Continues from a state that ``get_state`` returned."""
        self._batches.set_state(state)
