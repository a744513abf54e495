"""Batches as global arrays: each process reads only the rows and places that its own devices hold.

Everything about a batch follows from its number, so the iterator's state is that number (kept by
grain), and a run that was stopped goes on with the batch it would have met.
"""

from collections.abc import Callable

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from agentic_ring.mesh import ShardingRules

ENDLESS = 1 << 40
"""More batches than any run takes; the dataset is a function of the index, nothing is stored."""

LoadRow = Callable[[int, slice], dict[str, np.ndarray]]
"""(number of a row, places of the layout) -> arrays [places, ...] by field name."""


class ShardedBatches:
    """An endless iterator of fields [B, S, ...], batch rows over data and fsdp, places over the ring.

    Batch b holds rows b x B to (b + 1) x B - 1.

    Args:
      load: reads the chosen places of a row; called from several threads.
      batch_size: rows B of all processes together.
      length: places S of a row.
      mesh, rules: where the arrays go.
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
        """The batch rows and sequence places that this process's devices hold."""
        sharding = self._rules.sharding(self._mesh, self._shape, ("batch", "sequence"))
        indices = sharding.addressable_devices_indices_map(self._shape).values()
        bounds = [
            [axis.indices(size)[:2] for axis, size in zip(index or (), self._shape, strict=True)]
            for index in indices
        ]
        (row_starts, row_stops), (column_starts, column_stops) = np.array(bounds).transpose(1, 2, 0)
        return slice(row_starts.min(), row_stops.max()), slice(column_starts.min(), column_stops.max())

    def next_fields(self) -> dict[str, jax.Array]:
        """The next batch's arrays by field name, on the devices."""
        return {name: self._place(array) for name, array in next(self._batches).items()}

    def _place(self, local: np.ndarray) -> jax.Array:
        shape = (*self._shape, *local.shape[2:])
        axes = ("batch", "sequence", *(None,) * (local.ndim - 2))
        sharding = self._rules.sharding(self._mesh, shape, axes)
        return jax.make_array_from_process_local_data(sharding, local, shape)

    def get_state(self) -> dict:
        """Where the iterator stands, as JSON-able data."""
        return self._batches.get_state()

    def set_state(self, state: dict) -> None:
        """Goes on from a state that ``get_state`` gave."""
        self._batches.set_state(state)
