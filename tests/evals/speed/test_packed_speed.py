"""The benchmark of packed rows counts what is live, and compares like with like."""

import numpy as np
import pytest

from evals.packed_speed import live_share, packed_row, packed_speed
from evals.speed.attention_benchmark import Problem


def test_live_share_is_that_of_the_causal_pairs_in_one_document():
    segments = packed_row(200, 20)
    pairs = np.tril(segments == segments.T)
    assert live_share(segments) == pytest.approx(pairs.sum() / np.tril(np.ones_like(pairs)).sum())
    assert live_share(packed_row(200, None)) == 1.0


def test_rows_of_a_ring():
    rows = packed_speed(Problem(512, heads=1, kv_heads=1, head_dim=4), (64,), devices=2, turns=1)
    cases = [(row.documents, row.layout) for row in rows]
    layouts = ("zigzag", "block_striped")
    assert cases == [(documents, layout) for documents in (None, 64) for layout in layouts]
    by_case = dict(zip(cases, rows, strict=True))
    for (documents, layout), row in by_case.items():
        zigzag, one = by_case[documents, "zigzag"], by_case[None, layout]
        assert row.to_zigzag is not None
        assert row.to_zigzag.median == pytest.approx(row.seconds.median / zigzag.seconds.median)
        assert row.to_one_document.median == pytest.approx(row.seconds.median / one.seconds.median)
        assert row.critical_path >= 1.0
