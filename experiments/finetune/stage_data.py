"""The packed rows of each stage of finetuning: given, or packed from conversations in the run's folder."""

from collections.abc import Sequence
from pathlib import Path

from agentic_ring.data.text.packed_file import PackedRows
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ArgumentError, DataError
from agentic_ring.token_units import short_tokens
from data_prep.conversations.tokenizer_training import conversation_texts, train_tokenizer
from data_prep.sharegpt import SPLITS, ConversationsConfig, prepare

TEST_SHARE = 0.05
"""Of conversations that are packed here."""


def own_tokenizer(conversations: Sequence[Path], vocab_size: int, folder: Path) -> Tokenizer:
    """The tokenizer of a model from scratch, trained on the conversations; the one in ``folder`` if any."""
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(conversation_texts(conversations), vocab_size).save(folder)
    return Tokenizer.load(folder)


def given_rows(folders: Sequence[Path], contexts: Sequence[int], tokenizer: Tokenizer) -> dict[int, Path]:
    """For each context the folder, of those that data_prep.sharegpt wrote, with rows of that length.

    Raises:
      DataError: a length is missing, or a file is of another tokenizer, empty, or without answers.
      StoreError: a file is missing or damaged.
    """
    lengths = {}
    for folder in folders:
        with PackedRows.open(folder / "train.h5") as rows:
            lengths[rows.length] = folder
    for context in contexts:
        if context not in lengths:
            raise DataError(
                f"a stage trains on rows of {context:,} tokens, but --data has rows of "
                f"{', '.join(f'{length:,}' for length in sorted(lengths))}; pack them with `python -m "
                f"data_prep.sharegpt FILE... --tokenizer MODEL --length {short_tokens(context)}`"
            )
        check_rows(lengths[context], tokenizer)
    return {context: lengths[context] for context in contexts}


def pack_rows(
    conversations: Sequence[Path],
    contexts: Sequence[int],
    template: str,
    tokenizer_folder: Path,
    directory: Path,
) -> dict[int, Path]:
    """For each context the folder of its rows below ``directory``, packed unless they are there.

    Raises:
      DataError: no conversation is left to train or to test on.
    """
    tokenizer = Tokenizer.load(tokenizer_folder)
    folders = {context: directory / short_tokens(context) for context in contexts}
    for context, folder in folders.items():
        if not all((folder / f"{split}.h5").exists() for split in SPLITS):
            prepare(
                ConversationsConfig(
                    tuple(conversations),
                    tokenizer_folder,
                    length=short_tokens(context),
                    template=template,
                    test_share=TEST_SHARE,
                    output=folder,
                )
            )
        check_rows(folder, tokenizer)
    return folders


def check_rows(folder: Path, tokenizer: Tokenizer) -> None:
    """Checks that both splits have answers to learn from, in this tokenizer's ids.

    Raises:
      DataError: they have none.
      StoreError: they are of another tokenizer, missing or damaged.
    """
    for split in SPLITS:
        with PackedRows.open(folder / f"{split}.h5") as rows:
            rows.check_tokenizer(tokenizer)
            if not rows.answer_tokens():
                advice = "a larger --test-share" if split == "test" else "conversations that have answers"
                raise DataError(
                    f"{rows.path} has {len(rows)} rows and no token of an answer in them, so nothing to "
                    f"{split} on; pack again, with {advice}, or give more conversations"
                )


def check_given(paths: Sequence[Path]) -> None:
    """Fails early where a file of conversations is missing.

    Raises:
      ArgumentError: names it.
    """
    for path in paths:
        if not path.is_file():
            raise ArgumentError(f"there is no file {path}; give a ShareGPT JSON file, or a jsonl")
