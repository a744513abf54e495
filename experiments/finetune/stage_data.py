"""Packed rows of each finetuning stage: given folders, or conversations packed into the run's folder."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from agentic_ring.data.text.packing import PackedRows
from agentic_ring.data.text.tokenizer import SAVED_FILES, Tokenizer
from agentic_ring.errors import ArgumentError, ConfigError, DataError
from agentic_ring.files.atomic import replacing, replacing_folder
from agentic_ring.token_units import short_tokens
from data_prep.conversations import conversation_texts, train_tokenizer
from data_prep.sharegpt import SPLITS, ConversationsConfig, prepare
from experiments.finetune.pipeline import FinetuneConfig
from experiments.finetune.presets import PRESETS
from experiments.finetune.records import conversations_file

TEST_SHARE = 0.05
"""Share of the conversations packed here that is held out for the test."""

_WORDS = (
    *("river", "stone", "lantern", "maple", "copper", "meadow", "window", "harbour", "pepper", "button"),
    *("garden", "silver", "thunder", "pocket", "velvet", "candle", "orchard", "whistle", "marble", "feather"),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def given_rows(
    folders: Sequence[str | Path], contexts: Sequence[int], tokenizer: Tokenizer
) -> dict[int, Path]:
    """The folder with rows of each context length, among those that data_prep.sharegpt wrote.

    Raises:
      DataError: a length is missing, or a file is of another tokenizer, empty, or without answers.
      StoreError: a file is missing or damaged.
    """
    lengths = {}
    for folder in folders:
        with PackedRows.open(Path(folder) / "train.h5") as rows:
            lengths[rows.length] = Path(folder)
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
    """The folder with rows of each context length, below ``directory``; packs what is missing.

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
    """Checks that both splits contain answers, as ids of this tokenizer.

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


def check_inputs(config: FinetuneConfig, vocab_size: int) -> None:
    """Checks that the inputs of a run go together, before its folder is made.

    Args:
      vocab_size: entries of the model's vocabulary.

    Raises:
      ConfigError: flags do not go together; it says what to give.
      ArgumentError: a file of conversations is missing.
      DataError: the tokenizer is not the model's, or the packed rows do not fit.
    """
    if config.data and config.conversations:
        raise ConfigError("give either --data, which is packed, or --conversations, which will be")
    if config.model is None:
        if config.data:
            raise ConfigError("--data holds ids of a model's tokenizer; name that model's folder by --model")
        base = PRESETS[config.preset].base
        if base == "given":
            raise ConfigError(
                f"the preset {config.preset} finetunes a model; name its folder by --model, or add --dry-run "
                "to ask for its memory. Only the presets demo and tiny need no model"
            )
        if base == "records" and jax.process_count() > 1:
            raise ConfigError(f"the preset {config.preset} runs in one process; name a model by --model")
        if base == "records" and config.conversations:
            raise ConfigError(
                f"the preset {config.preset} makes its own conversations; to train on others name a model by "
                "--model, or give --preset tiny, which trains one from scratch"
            )
        if config.lora is not None:
            raise ConfigError("--lora adapts a model that is there; name its folder by --model")
    elif not config.data and not config.conversations:
        raise ConfigError("nothing to train on: give --conversations FILE..., or packed folders by --data")
    for path in config.conversations:
        if not Path(path).is_file():
            raise ArgumentError(f"there is no file {path}; give a ShareGPT JSON file, or a jsonl")
    if config.model is not None:
        tokenizer = Tokenizer.load(Path(config.model))
        tokenizer.check_fits(vocab_size)
        if config.data:
            given_rows(config.data, config.contexts, tokenizer)


def prepare_rows(
    config: FinetuneConfig, vocab_size: int, directory: Path, base: Path | None
) -> tuple[Tokenizer, dict[int, Path]]:
    """The run's tokenizer, and the folder of its packed rows by context length; makes what is missing.

    Args:
      vocab_size: entries of the vocabulary, for a model from scratch.
      directory: folder of the run.
      base: folder of the model that the run made for itself to finetune; None if it made none.
    """
    if base is not None:
        rows = {}
        for context in config.contexts:
            path = conversations_file(directory, context)
            rows |= pack_rows([path], [context], "tokenizer", base, directory / "rows")
        return Tokenizer.load(base), rows
    if config.data and config.model is not None:
        tokenizer = Tokenizer.load(Path(config.model))
        return tokenizer, given_rows(config.data, config.contexts, tokenizer)
    conversations = [Path(path) for path in config.conversations]
    if not conversations:
        conversations = [directory / "conversations.jsonl"]
        if not conversations[0].exists():
            write_demo_conversations(conversations[0])
    folder = directory / "tokenizer" if config.model is None else Path(config.model)
    if config.model is None and not all((folder / name).exists() for name in SAVED_FILES):
        with replacing_folder(folder) as beside:
            train_tokenizer(conversation_texts(conversations), vocab_size).save(beside)
    rows = pack_rows(conversations, config.contexts, config.template, folder, directory / "rows")
    return Tokenizer.load(folder), rows


def write_demo_conversations(path: Path, count: int = 1500, seed: int = 0) -> None:
    """Writes a jsonl of ``count`` made-up conversations of two to five questions each, as a seed decides.

    A tiny model learns something from them in minutes; they are nothing like real ones.
    """
    draw = random.Random(seed)
    with replacing(path) as beside, beside.open("w") as file:
        for number in range(count):
            turns = []
            for _ in range(draw.randrange(2, 6)):
                question, answer = draw.choice(_QUESTIONS)(draw)
                turns += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            file.write(json.dumps({"id": f"demo-{number}", "conversations": turns}) + "\n")


def _spelling(draw: random.Random) -> tuple[str, str]:
    word = draw.choice(_WORDS)
    return f"Spell the word {word}.", f"The word {word} is spelled {', '.join(word)}."


def _counting(draw: random.Random) -> tuple[str, str]:
    first, count = draw.randrange(1, 90), draw.randrange(3, 8)
    numbers = ", ".join(str(first + step) for step in range(count))
    return f"Count {count} numbers from {first}.", f"Here they are: {numbers}."


def _days(draw: random.Random) -> tuple[str, str]:
    day = draw.randrange(7)
    return f"Which day follows {_DAYS[day]}?", f"After {_DAYS[day]} comes {_DAYS[(day + 1) % 7]}."


def _repeating(draw: random.Random) -> tuple[str, str]:
    words = " ".join(draw.sample(_WORDS, 5))
    return f"Repeat after me: {words}", f"You said: {words}"


_QUESTIONS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_spelling, _counting, _days, _repeating)
