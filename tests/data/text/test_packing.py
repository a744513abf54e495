"""Packed rows and their batches: every token once, targets within their text, the same on every mesh."""

from dataclasses import replace

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.attention.ring.layout import inverse_order, order
from agentic_ring.data.sealed_hdf5 import seal
from agentic_ring.data.text.conversation_tokens import TokenizedText, share_beginning
from agentic_ring.data.text.packing import (
    PACKED,
    PackedBatches,
    PackedDescription,
    PackedRows,
    RowPacker,
    packed_writer,
)
from agentic_ring.errors import ArgumentError, DataError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.llama import LlamaConfig, TokenBatch, token_loss
from agentic_ring.models.transformer_config import TransformerConfig
from tests.data.text.tokenizers_for_tests import byte_level, sentencepiece

DESCRIPTION = PackedDescription(byte_level().digest, 10_000, "plain")


def numbered(lengths, first=1):
    """Texts of these lengths whose tokens are all different and never 0; every third counts."""
    texts = []
    for length in lengths:
        ids = np.arange(first, first + length, dtype=np.int32)
        texts.append(TokenizedText(ids, ids % 3 == 0))
        first += length
    return texts


def branched(shared, own, first):
    """Texts that begin with the same tokens and then differ; their own tokens from the second on count."""
    texts = []
    for length in own:
        ids = np.r_[first : first + shared, first + 40 : first + 40 + length].astype(np.int32)
        ids[shared:] += len(texts)
        texts.append(TokenizedText(ids, np.arange(len(ids)) > shared))
    return texts


def packed(texts, length, window_rows=4):
    packer = RowPacker(length, window_rows)
    return [row for text in texts for row in packer.add(text)] + packer.finish()


def write(path, rows, length):
    with packed_writer(path, DESCRIPTION, length) as add:
        for row in rows:
            add(row)
    return path


@given(
    lengths=st.lists(st.integers(1, 20), max_size=60), length=st.integers(20, 40), window=st.integers(1, 5)
)
def test_every_text_is_there_once_and_whole(lengths, length, window):
    texts = {int(text.ids[0]): text for text in numbered(lengths)}
    for row in packed(texts.values(), length, window):
        targets, weight, positions = row.targets(), row.weight(), row.positions()
        assert (targets.dtype, weight.dtype, positions.dtype) == (np.int32, np.float32, np.int32)
        place = 0
        for segment in range(row.segment_ids.max() + 1):
            text = texts.pop(int(row.tokens[place]))
            inside = slice(place, place + len(text))
            np.testing.assert_array_equal(np.flatnonzero(row.segment_ids == segment), np.r_[inside])
            np.testing.assert_array_equal(row.tokens[inside], text.ids)
            np.testing.assert_array_equal(row.counts[inside], text.counts)
            np.testing.assert_array_equal(positions[inside], np.arange(len(text)))
            np.testing.assert_array_equal(targets[inside], [*text.ids[1:], 0])
            np.testing.assert_array_equal(weight[inside], [*text.counts[1:], 0])
            place += len(text)
        assert (row.segment_ids[place:] == -1).all(), "padding stands at the end"
        for array in (row.tokens, row.counts, targets, weight, positions):
            assert len(array) == len(row.segment_ids) == length
            assert not array[place:].any()
    assert not texts


def test_padding_is_small_and_rows_are_held_no_longer_than_a_window():
    generator = np.random.default_rng(0)
    lengths = np.minimum(1 + generator.geometric(1 / 100, 3000), 1000)
    rows = packed(numbered(lengths), 1000, window_rows=16)
    assert 1 - lengths.sum() / (len(rows) * 1000) < 0.01
    packer = RowPacker(10, 2)  # the texts of an emptier row wait
    assert [len(packer.add(text)) for text in numbered([6, 6, 4, 4])] == [0, 0, 0, 1]
    assert len(packer.finish()) == 1
    for length in (0, 11):
        with pytest.raises(ArgumentError, match=f"a text has {length} tokens, expected 1 to 10"):
            packer.add(numbered([length])[0])


def test_a_file_gives_back_what_was_written(tmp_path):
    rows = packed(numbered([5, 9, 3, 12, 7]), 16)
    with PackedRows.open(write(tmp_path / "train.h5", rows, 16)) as stored:
        stored.verify()
        assert (len(stored), stored.length, stored.description) == (len(rows), 16, DESCRIPTION)
        for index, row in enumerate(rows):
            for name in ("tokens", "counts", "segment_ids"):
                np.testing.assert_array_equal(getattr(stored[index], name), getattr(row, name), strict=True)
        with pytest.raises(ArgumentError, match="row 3 is outside"):
            stored[3]
        stored.check_tokenizer(byte_level())
        with pytest.raises(DataError, match="packed with another tokenizer"):
            stored.check_tokenizer(sentencepiece())
    with pytest.raises(ArgumentError, match="the row has 16 tokens, expected 32"):
        write(tmp_path / "other.h5", rows, 32)
    with pytest.raises(DataError, match=r"no file of packed rows at .*data_prep\.sharegpt"):
        PackedRows.open(tmp_path / "none.h5")


def test_files_that_do_not_add_up_are_named(tmp_path):
    for change, message in (
        (lambda file: file.pop("counts"), "counts"),
        (lambda file: file["tokens"].resize(5, axis=0), r"arrays have shapes .*expected one"),
        (lambda file: file.attrs.pop("vocab_size"), "vocab_size"),
        (lambda file: file["tokens"].__setitem__((0, 0), 10_000), r"ids 0 to 10000, expected 0 to 9999"),
    ):
        path = write(tmp_path / "train.h5", packed(numbered([5, 9]), 16), 16)
        with h5py.File(path, "r+") as file:
            change(file)
        seal(path, PACKED)
        with pytest.raises(DataError, match=message), PackedRows.open(path) as stored:
            stored[0]


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


def test_an_epoch_holds_every_row_once_on_every_mesh(rows):
    ours = PackedBatches(rows, 4, make_mesh(MeshShape(data=2, fsdp=2, ring=2), jax.devices()), seed=1)
    theirs = PackedBatches(rows, 4, make_mesh(MeshShape(), jax.devices()[:1]), seed=1)
    stored = [tuple(rows[index].tokens) for index in range(7)]
    order_of_rows = []
    for _ in range(7):
        got, expected = arrays(next(ours), 2), arrays(next(theirs), 1)
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array)
        for number, tokens in enumerate(got["tokens"]):
            order_of_rows.append(stored.index(tuple(tokens)))
            row = rows[order_of_rows[-1]]
            values = row.tokens, row.targets(), row.weight(), row.positions(), row.segment_ids
            for array, value in zip(got.values(), values, strict=True):
                np.testing.assert_array_equal(array[number], value)
    epochs = np.reshape(order_of_rows, (4, 7)).tolist()
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 4
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("ring", [1, 2])
def test_packed_rows_have_the_loss_of_each_text_alone(ring, tmp_path):
    """No text sees another, texts that share their beginning stay texts, no target is lost where a row is cut
    up, and weights add up over the ring."""
    transformer = TransformerConfig(width=32, layers=1, heads=4, ffn_width=32, remat="none")
    model = LlamaConfig(transformer, vocab_size=256).build(jax.random.key(0))
    mesh = make_mesh(MeshShape(ring=ring), jax.devices()[:ring])
    texts = numbered([20, 12, 31, 5, 5, 5, 17, 9, 30, 28])
    documents = [branched(9, [7, 10, 3], 100), branched(3, [4, 5], 150), branched(1, [3], 190)]
    alone = texts + [text for group in documents for text in group]
    stored = write(tmp_path / "rows.h5", packed([*texts, *map(share_beginning, documents)], LENGTH), LENGTH)

    def summed(batch):
        return float(jax.jit(token_loss)(model, batch))

    with PackedRows.open(stored) as rows:
        batch = next(PackedBatches(rows, len(rows), mesh))
    shifted = replace(batch, segment_ids=jnp.where(batch.segment_ids >= 0, 0, -1))
    with jax.set_mesh(mesh):
        together, *confused = map(summed, (batch, shifted, replace(batch, hidden_from=None)))
    losses, weights = [], []
    for text in alone:
        # Padded to the row's length, so that all texts share one program.
        arrays = [text.ids, text.ids[1:], text.counts[1:].astype(np.float32)]
        padded = [np.pad(array, (0, LENGTH - len(array)))[None] for array in arrays]
        positions = np.arange(LENGTH, dtype=np.int32)[None]
        each = TokenBatch(*map(jnp.asarray, (*padded, positions)), None, "contiguous")
        losses.append(summed(each))
        weights.append(float(each.weight.sum()))
    assert float(batch.weight.sum()) == sum(weights) > 0
    np.testing.assert_allclose(together, sum(losses), rtol=1e-5)
    for loss in confused:
        assert abs(loss - sum(losses)) > 1e-3, "segments and branches matter"


def test_rows_that_do_not_fit_the_ring_are_refused(tmp_path):
    path = write(tmp_path / "train.h5", packed(numbered([20]), 36), 36)
    with PackedRows.open(path) as rows, pytest.raises(DataError, match=r"ring of 8 .* pack rows of 40"):
        PackedBatches(rows, 1, make_mesh(MeshShape(ring=8), jax.devices()))
    path = write(tmp_path / "empty.h5", [], 32)
    with PackedRows.open(path) as rows, pytest.raises(DataError, match="has no rows"):
        PackedBatches(rows, 1, make_mesh(MeshShape(), jax.devices()))
