"""Order of TPU devices in a ring, such that neighbours of the ring are neighbours in the chip grid.

Generations with flat pods (v2, v3, v5e, v6e) link each chip to its neighbours in a rectangle. A ring in
row order would jump from the end of each row to the beginning of the next. On v5e XLA then sends every hop
of the ring synchronously: with 256 devices all hops are exposed, against one of 766 otherwise (read from
compiled programs). A closed tour of the rectangle has no such jump::

    0 - 1 - 2 - 3        each step is one link; the last chip is the first one's neighbour
    |           |
    7   6 - 5 - 4        needs an even side, which every pod has
    :   :
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


def rings(devices: Sequence[Any], count: int) -> np.ndarray | None:
    """Arranges devices in ``count`` rings of equal size, each a closed tour of a rectangle of chips.

    The cores of a chip follow one another.

    Returns:
      [count, devices / count]; None where the devices are no TPU chips that fill a flat rectangle, or the
      rectangle does not divide into such rings.
    """
    # Devices of a GPU compile target have coordinates too, but no cores.
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
    """Returns all (row, column) of a rectangle, each a neighbour of the one before, the last of the first.

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
