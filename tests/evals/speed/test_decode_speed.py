"""The decode benchmark measures what it says, on a cache small enough for a test."""

from dataclasses import asdict

import pytest

from agentic_ring.attention.cache.storage import CACHE_DTYPES
from agentic_ring.results.rows import read_rows, write_rows
from evals.speed.decode_step import decode_speed


@pytest.mark.parametrize(("dtype", "bytes_a_number"), [("float32", 4), ("bfloat16", 2), ("int8", 1 + 4 / 64)])
def test_a_row_counts_the_bytes_that_a_step_reads(dtype, bytes_a_number):
    row = decode_speed(cached=2048, dtype=dtype, repeats=2, devices=2)
    assert row.cache_bytes == 2 * 2048 * 4 * 64 * bytes_a_number
    assert row.ratio == pytest.approx(row.step_seconds * row.bandwidth / row.cache_bytes)


def test_rows_are_written_as_csv_with_their_origin(tmp_path):
    path = tmp_path / "decode.csv"
    rows = [decode_speed(cached=1024, dtype=dtype, repeats=1, devices=1) for dtype in CACHE_DTYPES]
    write_rows(path, [asdict(row) for row in rows])
    rows = read_rows(path)
    assert [row["dtype"] for row in rows] == list(CACHE_DTYPES)
    assert float(rows[0]["ratio"]) > 0
    assert rows[0]["hardware"]
