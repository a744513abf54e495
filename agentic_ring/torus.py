"""Rings along the links of a TPU's grid.

Chips of generations whose pods are flat (v2, v3, v5e, v6e) are linked to their neighbours in a rectangle.
Taken row by row, a ring would jump from the end of each row to the beginning of the next, and on v5e XLA
then sends every hop of the ring synchronously: all of a ring of 256 are exposed, against one of 766 (read
from compiled programs). A closed tour of the rectangle has no such jump::

    0 - 1 - 2 - 3        each step is one link; the last chip is the first one's neighbour
    |           |
    7   6 - 5 - 4        needs an even side, which every pod has
    :   :
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


def rings(devices: Sequence[Any], count: int) -> np.ndarray | None:
    """The devices as ``count`` rings of equal size, each a closed tour of a rectangle of chips.

    The cores of a chip follow one another.

    Args:
      devices: of one machine.
      count: of rings.

    Returns:
      [count, devices / count]; None where the devices are no TPU chips that fill a flat rectangle, or this
      does not divide into such rings.
    """
    # GPUs that are described but absent have coordinates too, and no cores.
    if not all(hasattr(device, "coords") and hasattr(device, "core_on_chip") for device in devices):
        return None
    chips: dict[tuple[int, int], list[Any]] = {}
    for device in sorted(devices, key=lambda device: device.core_on_chip):
        x, y, z = device.coords
        if z != 0:
            return None
        chips.setdefault((x, y), []).append(device)
    columns, rows = (1 + max(place[axis] for place in chips) for axis in (0, 1))
    if len(chips) != rows * columns or len({len(cores) for cores in chips.values()}) > 1:
        return None
    for across in range(1, count + 1):
        down = count // across
        if count % across or rows % down or columns % across:
            continue
        tour = closed_tour(rows // down, columns // across)
        if tour is not None:
            corners = [
                (top * (rows // down), left * (columns // across))
                for top in range(down)
                for left in range(across)
            ]
            order = [[core for y, x in tour for core in chips[left + x, top + y]] for top, left in corners]
            return np.array(order, dtype=object)
    return None


def closed_tour(rows: int, columns: int) -> list[tuple[int, int]] | None:
    """All (row, column) of a rectangle, each beside the one before it, and the last beside the first.

    None where there is no such tour: a single row or column of more than two, or both sides odd.
    """
    if rows * columns <= 2:
        return [(row, column) for row in range(rows) for column in range(columns)]
    if min(rows, columns) < 2 or (rows % 2 and columns % 2):
        return None
    if columns % 2:
        transposed = closed_tour(columns, rows)
        return None if transposed is None else [(row, column) for column, row in transposed]
    # Along the first row, and back down and up the columns below it.
    tour = [(0, column) for column in range(columns)]
    for number, column in enumerate(reversed(range(columns))):
        below = range(1, rows)
        tour += [(row, column) for row in (below if number % 2 == 0 else reversed(below))]
    return tour
