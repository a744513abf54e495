"""Trains a tokenizer on conversations, for a model that is trained from scratch."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import DataError
from data_prep.conversations.conversation_files import conversation, records

BOS, EOS = "<s>", "</s>"


def conversation_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Yields the text of every turn; records that are not conversations are skipped.

    Raises:
      DataError: a file is missing or malformed.
    """
    for path in paths:
        for record in records(path):
            try:
                turns = conversation(record.value).turns
            except DataError:  # data_prep.sharegpt lists them
                continue
            yield from (turn.text for turn in turns)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of at most ``vocab_size`` entries, with all bytes, BOS and EOS."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, bos=BOS, eos=(EOS,), add_bos=True)
