"""Packed rows: every token once, targets within their text, little padding, verified files."""

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentic_ring.data.sealed_hdf5 import seal
from agentic_ring.data.text.conversation_tokens import TokenizedText
from agentic_ring.data.text.packing import PACKED, PackedDescription, PackedRows, RowPacker, packed_writer
from agentic_ring.errors import ArgumentError, DataError
from tests.data.text.tokenizers_for_tests import byte_level, sentencepiece

DESCRIPTION = PackedDescription("digest", 10_000, "plain")


def numbered(lengths, first=1):
    """Texts of these lengths whose tokens are all different and never 0; every third counts."""
    texts = []
    for length in lengths:
        ids = np.arange(first, first + length, dtype=np.int32)
        texts.append(TokenizedText(ids, ids % 3 == 0))
        first += length
    return texts


def packed(texts, length, window_rows=4):
    packer = RowPacker(length, window_rows)
    return [row for text in texts for row in packer.add(text)] + packer.finish()


def write(path, rows, length):
    with packed_writer(path, DESCRIPTION, length) as writer:
        for row in rows:
            writer.add(row)
    return path


@given(
    lengths=st.lists(st.integers(1, 20), max_size=60), length=st.integers(20, 40), window=st.integers(1, 5)
)
def test_every_text_is_there_once_and_whole(lengths, length, window):
    texts = numbered(lengths)
    found = []
    for row in packed(texts, length, window):
        assert len(row.tokens) == len(row.counts) == len(row.segment_ids) == length
        padding = row.segment_ids < 0
        assert not row.tokens[padding].any()
        assert not row.counts[padding].any()
        assert not (np.diff(padding.astype(int)) < 0).any(), "padding stands at the end"
        for segment in range(row.segment_ids.max() + 1):
            inside = row.segment_ids == segment
            assert (np.diff(np.flatnonzero(inside)) == 1).all()
            found.append((tuple(row.tokens[inside]), tuple(row.counts[inside])))
    assert sorted(found) == sorted((tuple(text.ids), tuple(text.counts)) for text in texts)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_targets_weights_and_positions_stay_within_their_text(lengths):
    texts = {int(text.ids[0]): text for text in numbered(lengths)}
    for row in packed(texts.values(), 25):
        targets, weight, positions = row.targets(), row.weight(), row.positions()
        assert (targets.dtype, weight.dtype, positions.dtype) == (np.int32, np.float32, np.int32)
        place = 0
        for _ in range(row.segment_ids.max() + 1):
            text = texts[int(row.tokens[place])]
            inside = slice(place, place + len(text))
            np.testing.assert_array_equal(positions[inside], np.arange(len(text)))
            np.testing.assert_array_equal(targets[inside], [*text.ids[1:], 0])
            np.testing.assert_array_equal(weight[inside], [*text.counts[1:], 0])
            place += len(text)
        for array in (targets, weight, positions):
            assert not array[place:].any()


def test_padding_is_small_and_the_texts_of_an_emptier_row_wait():
    generator = np.random.default_rng(0)
    lengths = np.minimum(1 + generator.geometric(1 / 100, 3000), 1000)
    rows = packed(numbered(lengths), 1000, window_rows=16)
    assert 1 - lengths.sum() / (len(rows) * 1000) < 0.01
    packer = RowPacker(10, 2)
    assert [len(packer.add(text)) for text in numbered([6, 6, 4])] == [0, 0, 0]
    assert len(packer.add(numbered([4])[0])) == 1
    assert len(packer.finish()) == 1


def test_rows_are_held_no_longer_than_a_window():
    packer = RowPacker(8, 3)
    out = [len(packer.add(text)) for text in numbered([8] * 12)]
    assert sum(out) >= 12 - 3
    assert sum(out) + len(packer.finish()) == 12
    for length in (0, 9):
        with pytest.raises(ArgumentError, match=f"a text has {length} tokens, expected 1 to 8"):
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
    with pytest.raises(ArgumentError, match="the row has 16 tokens, expected 32"):
        write(tmp_path / "other.h5", rows, 32)


def exceed_vocabulary(file):
    file["tokens"][0, 0] = 10_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.pop("counts"), "counts"),
        (lambda file: file["tokens"].resize(5, axis=0), r"arrays have shapes .*expected one"),
        (lambda file: file.attrs.pop("vocab_size"), "vocab_size"),
        (exceed_vocabulary, r"row 0 holds ids 0 to 10000, expected 0 to 9999"),
    ],
)
def test_files_that_do_not_add_up_are_named(tmp_path, change, message):
    path = write(tmp_path / "train.h5", packed(numbered([5, 9]), 16), 16)
    with h5py.File(path, "r+") as file:
        change(file)
    seal(path, PACKED)
    with pytest.raises(DataError, match=message), PackedRows.open(path) as stored:
        stored[0]


def test_another_tokenizer_and_a_missing_file_are_noticed(tmp_path):
    tokenizer = byte_level()
    description = PackedDescription(tokenizer.digest, tokenizer.vocab_size, "plain")
    with packed_writer(tmp_path / "train.h5", description, 16):
        pass
    with PackedRows.open(tmp_path / "train.h5") as stored:
        stored.check_tokenizer(byte_level())
        with pytest.raises(DataError, match="packed with another tokenizer"):
            stored.check_tokenizer(sentencepiece())
    with pytest.raises(DataError, match=r"no file of packed rows at .*data_prep\.sharegpt"):
        PackedRows.open(tmp_path / "none.h5")
