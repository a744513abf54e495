"""A tokenizer of one's own, for a model that is trained from scratch."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import DataError
from data_prep.conversations.conversation_files import conversation, records

BOS, EOS = "<s>", "</s>"


def conversation_texts(paths: Sequence[Path]) -> Iterator[str]:
    """The text of every turn; records that are no conversation are passed over.

    Raises:
      DataError: a file is missing or broken.
    """
    for path in paths:
        for record in records(path):
            try:
                turns = conversation(record.value).turns
            except DataError:  # whoever packs the file lists them
                continue
            yield from (turn.text for turn in turns)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most ``vocab_size`` entries, all bytes, BOS and EOS among them."""
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
