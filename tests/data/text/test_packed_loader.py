"""Batches of packed rows: the same on every mesh, resumable, and a loss independent of sharding."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_ring.attention.ring.layout import inverse_order, order
from agentic_ring.data.text.packing import PackedBatches, PackedRows
from agentic_ring.errors import DataError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.llama import LlamaConfig, TokenBatch, token_loss
from agentic_ring.models.transformer_config import TransformerConfig
from tests.data.text.test_packing import numbered, packed, write

LENGTH = 32


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Seven rows, most of them with several texts, and some padding."""
    lengths = [20, 12, 31, 5, 5, 5, 17, 9, 30, 28, 26, 16]
    path = write(tmp_path_factory.mktemp("rows") / "train.h5", packed(numbered(lengths), LENGTH), LENGTH)
    with PackedRows.open(path) as stored:
        assert len(stored) == 7
        yield stored


def arrays(batch, ring):
    """A batch's fields in the order of the text."""
    undo = inverse_order(order(batch.layout, LENGTH, ring))
    names = ("tokens", "targets", "weight", "positions", "segment_ids")
    return {name: np.asarray(getattr(batch, name))[:, undo] for name in names}


def test_an_epoch_holds_every_row_once_and_the_next_another_order(rows):
    batches = PackedBatches(rows, 1, make_mesh(MeshShape(), jax.devices()[:1]), seed=1)
    seen = [arrays(next(batches), 1) for _ in range(14)]
    stored = [tuple(rows[index].tokens) for index in range(7)]
    order_of_rows = [stored.index(tuple(fields["tokens"][0])) for fields in seen]
    assert sorted(order_of_rows[:7]) == sorted(order_of_rows[7:]) == list(range(7))
    assert order_of_rows[:7] != order_of_rows[7:]
    for fields, index in zip(seen, order_of_rows, strict=True):
        row = rows[index]
        expected = row.tokens, row.targets(), row.weight(), row.positions(), row.segment_ids
        for array, values in zip(fields.values(), expected, strict=True):
            np.testing.assert_array_equal(array[0], values)


def test_batches_do_not_depend_on_the_mesh(rows):
    shape = MeshShape(data=2, fsdp=2, ring=2)
    ours = PackedBatches(rows, 4, make_mesh(shape, jax.devices()))
    theirs = PackedBatches(rows, 4, make_mesh(MeshShape(), jax.devices()[:1]))
    for _ in range(3):
        got, expected = arrays(next(ours), shape.ring), arrays(next(theirs), 1)
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array)


def test_packed_rows_have_the_loss_of_each_text_alone(rows):
    """No text sees another, no target is lost where a row is cut up, weights add up over the ring."""
    transformer = TransformerConfig(width=32, layers=1, heads=4, ffn_width=32, remat="none")
    model = LlamaConfig(transformer, vocab_size=rows.description.vocab_size).build(jax.random.key(0))
    mesh = make_mesh(MeshShape(ring=4), jax.devices()[:4])
    batch = next(PackedBatches(rows, 7, mesh))
    shifted = replace(batch, segment_ids=jnp.where(batch.segment_ids >= 0, 0, -1))
    with jax.set_mesh(mesh):
        together, confused = (float(jax.jit(token_loss)(model, each)) for each in (batch, shifted))
    losses, weights = [], []
    for index in range(7):
        row = rows[index]
        for segment in range(row.segment_ids.max() + 1):
            inside = row.segment_ids == segment
            alone = text_alone(row.tokens[inside], row.counts[inside])
            losses.append(float(jax.jit(token_loss)(model, alone)))
            weights.append(float(alone.weight.sum()))
    assert float(batch.weight.sum()) == sum(weights) > 0
    np.testing.assert_allclose(together, sum(losses), rtol=1e-5)
    assert abs(confused - sum(losses)) > 1e-3, "segments matter"


def text_alone(ids, counts):
    """One text padded to the row's length, so that all of them share one program."""
    room = (0, LENGTH - len(ids))
    tokens = np.pad(ids, room)[None]
    targets = np.pad(ids[1:], (0, room[1] + 1))[None]
    weight = np.pad(counts[1:], (0, room[1] + 1)).astype(np.float32)[None]
    positions = np.arange(LENGTH, dtype=np.int32)[None]
    return TokenBatch(*map(jnp.asarray, (tokens, targets, weight, positions)), None, "contiguous")


def test_rows_that_do_not_fit_the_ring_are_refused(tmp_path):
    path = write(tmp_path / "train.h5", packed(numbered([20]), 36), 36)
    with PackedRows.open(path) as rows, pytest.raises(DataError, match=r"ring of 8 .* pack rows of 40"):
        PackedBatches(rows, 1, make_mesh(MeshShape(ring=8), jax.devices()))
    with (
        PackedRows.open(write(tmp_path / "empty.h5", [], 32)) as rows,
        pytest.raises(DataError, match="has no rows"),
    ):
        PackedBatches(rows, 1, make_mesh(MeshShape(), jax.devices()))
