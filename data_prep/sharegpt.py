"""Cleans, deduplicates and splits conversations and packs them into rows of tokens; only answers bear loss.

    python -m data_prep.sharegpt sg_90k_part1.json sg_90k_part2.json --tokenizer MODEL_FOLDER --length 512k

Reads ShareGPT's JSON, FastChat's, and any jsonl of conversations, joins the parts of divided conversations,
cleans them (``conversations.py``), and writes ``train.h5`` and ``test.h5``
(``agentic_ring.data.text.packing``).
Files are streamed: memory holds one conversation, the texts of the rows that are being filled, and 32 bytes
per conversation to detect duplicates. Records that are not conversations are skipped and listed, and the
exit status is then 1; so is what is missing at the end of an array that was cut off. Conversations that the
cleaning rejects are counted by reason.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console

from agentic_ring.data.store import data_root
from agentic_ring.data.text.chat import TEMPLATES, Turn, chat_template
from agentic_ring.data.text.conversation_tokens import TokenizedText, tokenize_in_parts
from agentic_ring.data.text.packing import PackedDescription, PackedRow, RowPacker, packed_writer
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ConfigError, DataError, check_choice
from agentic_ring.files.atomic import replacing_folder
from agentic_ring.files.model_path import find_model
from agentic_ring.terminal.cli import optional_flag, run
from agentic_ring.terminal.progress import progress, say
from agentic_ring.terminal.tables import TextTable
from agentic_ring.token_units import parse_tokens
from data_prep.conversations import (
    BLOCKED,
    Deduplicator,
    Record,
    Rejected,
    clean_turns,
    conversation,
    is_test,
    joined,
    records,
)

SPLITS = ("train", "test")
_MOST_NAMED = 20
_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class ConversationsConfig:
    """Settings of the packing.

    Attributes:
      inputs: Files of conversations, JSON arrays or jsonl.
      tokenizer: The model: a folder with a tokenizer.json, a GGUF file, or a name, such as smollm2.
      length: Row length in tokens, such as 4096, 32k or 512k.
      template: Chat template: vicuna_v1.1, llama-3, plain, or tokenizer for the model's own.
      test_share: Share of the conversations held out for testing, chosen by their ids only.
      blocked: Phrases; conversations that contain one are rejected. Without a value, none is.
      output: Folder for train.h5 and test.h5. Default: text/{first input}-{length} in the data folder.
    """

    inputs: tyro.conf.Positional[tuple[Path, ...]]
    tokenizer: Path
    length: str = "32k"
    template: str = "vicuna_v1.1"
    test_share: float = 0.01
    blocked: tuple[str, ...] = BLOCKED
    output: Annotated[Path | None, optional_flag()] = None

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ConfigError("no input was given; name at least one file of conversations")
        check_choice(self, "template", TEMPLATES)
        if not 0 <= self.test_share < 1:
            raise ConfigError(f"test_share is {self.test_share}; it must be at least 0 and below 1")
        if self.row_length < 2:
            raise ConfigError(f"length is {self.length}; a row needs at least 2 tokens")

    @property
    def row_length(self) -> int:
        """Row length in tokens."""
        return parse_tokens(self.length)

    @property
    def folder(self) -> Path:
        """The output folder."""
        return self.output or data_root() / "text" / f"{self.inputs[0].stem}-{self.length}"


@dataclass
class PackingSummary:
    """Result of the packing.

    Attributes:
      splits: counts of each split: conversations, rows, tokens without padding, and answer tokens, those that
        count in the loss.
      lengths: number of tokens of every packed conversation, all its parts together.
      malformed: file, line and reason of the first 20 records that are not conversations.
      joined: number of records that continue the conversation of the record before them.
      divided: number of conversations that were longer than a row and became several texts.
      cut: number of question-answer pairs that were longer than a row and were truncated.
      unanswered: number of truncated pairs without any answer token left; they are not packed.
    """

    splits: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in SPLITS})
    lengths: array = field(default_factory=lambda: array("q"))
    rejected: Counter[str] = field(default_factory=Counter)
    malformed: list[str] = field(default_factory=list)
    malformed_count: int = 0
    joined: int = 0
    divided: int = 0
    cut: int = 0
    cut_tokens: int = 0
    unanswered: int = 0

    def add_parts(self, parts: Sequence[TokenizedText]) -> list[TokenizedText]:
        """Counts the parts of a conversation; returns those with an answer to learn from."""
        # The first token of a text is no target: an answer must reach further than that to count.
        learned = [part for part in parts if part.counts[1:].any()]
        if not learned:
            raise Rejected("its questions alone fill a row")
        self.divided += len(parts) > 1
        self.cut += sum(part.cut > 0 for part in parts)
        self.cut_tokens += sum(part.cut for part in parts)
        self.unanswered += len(parts) - len(learned)
        self.lengths.append(sum(len(part) + part.cut for part in parts))
        return learned


def prepare(config: ConversationsConfig) -> PackingSummary:
    """Packs conversations into one file per split; see the module's docstring.

    A file, tokenizer or template that does not fit is a ``DataError``, and so is nothing left to train on.
    """
    tokenizer = Tokenizer.load(find_model(config.tokenizer))
    template = chat_template(config.template, tokenizer)
    summary, seen = PackingSummary(), Deduplicator()
    description = PackedDescription(tokenizer.digest, tokenizer.vocab_size, template.name)
    packers = {name: RowPacker(config.row_length) for name in SPLITS}

    def encode(key: str | None, turns: Sequence[Turn]) -> tuple[str, list[TokenizedText]]:
        """The key of a conversation, and its texts with an answer to learn from."""
        turns = clean_turns(turns, config.blocked)
        key = seen.check(key, turns)
        parts = list(tokenize_in_parts(tokenizer, template, turns, config.row_length))
        return key, summary.add_parts(parts)

    with replacing_folder(config.folder) as folder, ExitStack() as stack:
        writers = {
            name: stack.enter_context(packed_writer(folder / f"{name}.h5", description, config.row_length))
            for name in SPLITS
        }

        def write(split: str, rows: list[PackedRow]) -> None:
            for row in rows:
                writers[split](row)
                tokens, answers = int((row.segment_ids >= 0).sum()), int(row.counts.sum())
                summary.splits[split].update({"rows": 1, "tokens": tokens, "answer tokens": answers})

        for key, turns, count in joined(_conversations(config.inputs, summary)):
            summary.joined += count - 1
            try:
                key, texts = encode(key, turns)
            except DataError as reason:  # of the template, too
                summary.rejected[str(reason)] += 1
                continue
            split = "test" if is_test(key, config.test_share) else "train"
            summary.splits[split]["conversations"] += 1
            for text in texts:
                write(split, packers[split].add(text))
        for split, packer in packers.items():
            write(split, packer.finish())
        if not summary.splits["train"]["rows"]:
            counts = [f"{count} rejected: {reason}" for reason, count in summary.rejected.most_common()]
            reasons = "; ".join([*counts, *summary.malformed[:3]]) or "the files hold none"
            raise DataError(f"no conversation is left to train on; {reasons}")
    for malformed in summary.malformed:
        say(f"skipped {malformed}")
    if summary.malformed_count:
        say(f"records that were skipped: {summary.malformed_count:,}; repair or remove them and run again")
    return summary


def _conversations(paths: Sequence[Path], summary: PackingSummary) -> Iterator[tuple[str | None, list[Turn]]]:
    """Yields the id and the turns of all records that are conversations, and counts the others."""
    for path, record in _all_records(paths):
        try:
            if record.fault:
                raise DataError(record.fault)
            found = conversation(record.value)
        except Rejected as reason:
            summary.rejected[str(reason)] += 1
        except DataError as error:
            summary.malformed_count += 1
            if summary.malformed_count <= _MOST_NAMED:
                summary.malformed.append(f"{path}, line {record.line}: {error}")
        else:
            yield found


def _all_records(paths: Sequence[Path]) -> Iterator[tuple[Path, Record]]:
    """Yields the records of all files and shows a progress bar of the bytes read."""
    sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
    total = max(1, sum(sizes) // _MEBIBYTE)
    shown = before = 0
    with progress("reading conversations (MiB)", total) as advance:
        for path, size in zip(paths, sizes, strict=True):
            for count, record in enumerate(records(path), start=1):
                yield path, record
                read = (before + record.end) // _MEBIBYTE
                if read > shown:
                    shown = read
                    advance(read, f"{path.name}: {count:,} records")
            before += size
        advance(total, "")


def length_table(lengths: Sequence[int]) -> TextTable:
    """A histogram of the conversations' lengths in tokens, with bins at powers of two."""
    tokens = np.asarray(lengths, np.int64)
    rows = []
    below, upper = 0, 1 << max(6, int(tokens.min() - 1).bit_length())
    while below < tokens.max():
        inside = tokens[(tokens > below) & (tokens <= upper)]
        rows.append(
            {
                "length up to": f"{upper:,}",
                "conversations": f"{len(inside):,}",
                "share": f"{len(inside) / len(tokens):.1%}",
                "share of tokens": f"{inside.sum() / tokens.sum():.1%}",
            }
        )
        below, upper = upper, 2 * upper
    return TextTable("Conversation lengths in tokens", rows)


def main(config: Annotated[ConversationsConfig, tyro.conf.arg(name="")]) -> int:
    """Cleans conversations and packs them into rows of tokens for finetuning."""
    summary = prepare(config)
    console = Console()
    console.print(length_table(summary.lengths).rich())
    if summary.rejected:
        counts = summary.rejected.most_common()
        rows = [{"reason": reason, "conversations": f"{count:,}"} for reason, count in counts]
        console.print(TextTable("Rejected conversations", rows).rich())
    length = config.row_length
    rows = [
        {"split": name}
        | {column: f"{counts[column]:,}" for column in ("conversations", "rows", "tokens", "answer tokens")}
        | {"padding": f"{1 - counts['tokens'] / (counts['rows'] * length):.2%}" if counts["rows"] else ""}
        for name, counts in summary.splits.items()
    ]
    console.print(TextTable(f"Rows of {length:,} tokens", rows).rich())
    if summary.joined:
        print(f"{summary.joined:,} records continue the conversation of the one before and were joined to it")
    if summary.divided:
        print(f"{summary.divided:,} conversations were longer than a row and were split between turns")
    if summary.cut:
        print(
            f"{summary.cut:,} question-answer pairs were longer than a row and were truncated by "
            f"{summary.cut_tokens:,} tokens in all; "
            f"{summary.unanswered:,} lost the whole answer and are not packed"
        )
    print(f"{config.folder}: {' and '.join(f'{name}.h5' for name in SPLITS)}")
    return 1 if summary.malformed_count else 0


if __name__ == "__main__":
    run(main)
