"""A process reads exactly the places that its devices hold, wherever they lie on the ring."""

from collections import defaultdict

import numpy as np
import pytest

from agentic_ring.data.sharded_batches import block_at, read_blocks


@pytest.mark.parametrize(("processes", "rings"), [("00100111", 1), ("01100011", 2), ("01230312", 1)])
def test_a_process_reads_what_it_holds_and_nothing_else(processes, rings):
    """``processes`` names the process of each device, ring by ring."""
    ring = len(processes) // rings
    rows, columns = 4, 2 * ring
    stored = np.random.default_rng(0).normal(size=(12, columns, 3))
    blocks_by_process = defaultdict(set)
    for number, process in enumerate(processes):
        row, column = number // ring * (rows // rings), 2 * (number % ring)
        index = slice(row, row + rows // rings), slice(column, column + 2)
        blocks_by_process[process].add(block_at(index, (rows, columns)))
    for blocks in blocks_by_process.values():
        reads = []

        def load(number: int, chosen: np.ndarray, reads=reads) -> dict[str, np.ndarray]:
            reads.append((number, chosen))
            return {"field": stored[number, chosen]}

        read = read_blocks(load, 8, blocks)
        assert read.keys() == blocks
        for block, fields in read.items():
            np.testing.assert_array_equal(fields["field"], stored[8:][np.ix_(block.rows, block.columns)])
        held = [(8 + row, column) for block in blocks for row in block.rows for column in block.columns]
        assert sorted((number, column) for number, chosen in reads for column in chosen) == sorted(held)
        assert len({number for number, _ in reads}) == len(reads), "a row was loaded twice"
