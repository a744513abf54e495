"""The data loader of packed text: rows, shuffled every epoch, in the ring's layout."""

from collections.abc import Iterator
from typing import cast

import numpy as np
from jax.sharding import Mesh

from agentic_ring.attention import MaskSpec
from agentic_ring.attention.ring.balance import balanced_layout
from agentic_ring.attention.ring.layout import Layout, order, padded_length
from agentic_ring.data.sharded_batches import ShardedBatches
from agentic_ring.data.text.packed_file import PackedRows
from agentic_ring.errors import DataError
from agentic_ring.extras import needs_extra
from agentic_ring.mesh import ShardingRules, mesh_platform
from agentic_ring.models.llama import TokenBatch

with needs_extra("text"):
    import grain


class PackedBatches(ShardedBatches):
    """An endless iterator of ``TokenBatch``, rows over data and fsdp, tokens over the ring.

    Every row occurs once per epoch, in an order that depends on the seed but not on the mesh. A batch's
    weight is one global array: its sum is the number of answer tokens on all devices and processes, by which
    ``training.train_step.make_train_step`` divides.

    Args:
      batch_size: number of rows, over all processes.
      seed: seed of the order of the rows.
      layout: order of the tokens over the ring; None takes the one that balances packed rows on the mesh's
        devices (``balanced_layout``).

    Raises:
      DataError: there are no rows, or their length does not divide evenly over the ring.
    """

    def __init__(
        self,
        rows: PackedRows,
        batch_size: int,
        mesh: Mesh,
        seed: int = 0,
        layout: Layout | None = None,
        rules: ShardingRules = ShardingRules(),
    ):
        ring = int(np.prod([mesh.shape[axis] for axis in rules.sequence]))
        if layout is None:
            layout = balanced_layout(MaskSpec(), True, ring, rows.length // ring, mesh_platform(mesh))
        if not len(rows):
            raise DataError(f"{rows.path} has no rows; pack more conversations, or shorter rows")
        needed = padded_length(rows.length, ring, layout)
        if needed != rows.length:
            raise DataError(
                f"the rows of {rows.path} have {rows.length} tokens, which do not divide evenly over a ring "
                f"of {ring} in {layout} order; pack rows of {needed}, or use a smaller ring"
            )
        places = order(layout, rows.length, ring)
        shuffled = grain.MapDataset.range(len(rows)).shuffle(seed=seed).repeat()

        def load(number: int, columns: np.ndarray) -> dict[str, np.ndarray]:
            row = rows[cast(int, shuffled[number])]
            fields = {
                "tokens": row.tokens,
                "targets": row.targets(),
                "weight": row.weight(),
                "positions": row.positions(),
                "segment_ids": row.segment_ids,
            }
            return {name: array[places[columns]] for name, array in fields.items()}

        super().__init__(load, batch_size, rows.length, mesh, rules)
        self._layout: Layout = layout

    def __iter__(self) -> Iterator[TokenBatch]:
        return self

    def __next__(self) -> TokenBatch:
        """Returns the next batch, on the devices."""
        return TokenBatch(**self.next_fields(), layout=self._layout)
