"""Packed rows of each finetuning stage, and the demo, which learns to find lines in ever longer records.

Rows are in given folders, or conversations are packed into the run's folder. The demo's model before
finetuning is the small retriever after its first stage, on records of up to 49 lines. It is finetuned on
conversations about records that fill a row, and asked for lines of others before and after.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax

from agentic_ring.data.text.chat import chat_template
from agentic_ring.data.text.packing import PackedRows
from agentic_ring.data.text.tokenizer import SAVED_FILES, Tokenizer
from agentic_ring.errors import ArgumentError, ConfigError, DataError
from agentic_ring.files.atomic import replacing, replacing_folder
from agentic_ring.files.model_path import find_model
from agentic_ring.mesh import make_mesh
from agentic_ring.results.results_file import Figure
from agentic_ring.token_units import short_tokens
from data_prep.conversations import conversation_texts, train_tokenizer
from data_prep.sharegpt import SPLITS, ConversationsConfig, prepare
from evals.retrieval.documents import LinePlan
from evals.retrieval.local_reader import open_reader
from evals.retrieval.reports import LadderReport
from evals.retrieval.run import RetrievalConfig, RetrievalRun
from experiments.finetune.lines_conversations import write_lines_rows
from experiments.finetune.presets import PRESETS, TEST_SHARE, FinetuneConfig
from experiments.retriever.lessons import ANSWER, TOKENS_A_LINE, TOKENS_A_QUESTION
from experiments.retriever.training import STAGES, RetrieverRun, export, train_retriever

ROWS = 256
"""Rows of conversations about records of each length, of which some are held out."""
SHORT_SHARE = 0.25
"""Share of the rows that hold conversations as short as the records that the base has seen. Without them it
forgets how to read those: 30 of 50 lines instead of 50 of 50."""
TOKENS_PER_QUESTION = 128
"""Tokens of a conversation for each question in it."""
ASKED_LINES = 50
"""Questions of the ladder at each length."""


def given_rows(
    folders: Sequence[str | Path], contexts: Sequence[int], tokenizer: Tokenizer
) -> dict[int, Path]:
    """The folder with rows of each context length, among those that data_prep.sharegpt wrote; checks them."""
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
        _check_rows(lengths[context], tokenizer)
    return {context: lengths[context] for context in contexts}


def _check_rows(folder: Path, tokenizer: Tokenizer) -> None:
    """Checks that both splits contain answers, as ids of this tokenizer, and that it has their template."""
    for split in SPLITS:
        with PackedRows.open(folder / f"{split}.h5") as rows:
            rows.check_tokenizer(tokenizer)
            chat_template(rows.description.template, tokenizer)
            if not rows.answer_tokens():
                advice = "a larger --test-share" if split == "test" else "conversations that have answers"
                raise DataError(
                    f"{rows.path} has {len(rows)} rows and no token of an answer in them, so nothing to "
                    f"{split} on; pack again, with {advice}, or give more conversations"
                )


def check_inputs(config: FinetuneConfig, vocab_size: int) -> None:
    """Checks that the inputs of a run go together, before its folder is made.

    ``vocab_size`` is that of the model. The errors say what to give.
    """
    preset = PRESETS[config.preset]
    base = preset.base
    if config.data and config.conversations:
        raise ConfigError("give either --data, which is packed, or --conversations, which will be")
    if config.model is None and (config.data or config.lora is not None or base == "given"):
        raise ConfigError(
            f"--data, --lora and every preset but demo and tiny (here {config.preset}) need a model; name "
            "its folder by --model, or add --dry-run to ask for its memory"
        )
    if config.model is None and base == "records":
        if config.conversations or jax.process_count() > 1:
            raise ConfigError(
                f"the preset {config.preset} makes its own conversations, in one process; to train on others "
                "name a model by --model, or give --preset tiny, which trains one from scratch"
            )
    elif not (config.data or config.conversations or preset.lines):
        raise ConfigError("nothing to train on: give --conversations FILE... or packed folders by --data")
    for path in config.conversations:
        if not Path(path).is_file():
            raise ArgumentError(f"there is no file {path}; give a ShareGPT JSON file, or a jsonl")
    if config.model is not None:
        tokenizer = Tokenizer.load(find_model(config.model))
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
    folder = base or (directory / "tokenizer" if config.model is None else find_model(config.model))
    inputs, template = tuple(map(Path, config.conversations)), config.template
    if base is None and config.model is None and not all((folder / name).exists() for name in SAVED_FILES):
        with replacing_folder(folder) as beside:
            train_tokenizer(conversation_texts(inputs), vocab_size).save(beside)
    tokenizer, rows = Tokenizer.load(folder), {}
    if config.data:
        return tokenizer, given_rows(config.data, config.contexts, tokenizer)
    for context in config.contexts:
        length = short_tokens(context)
        rows[context] = packed = directory / "rows" / length
        if not all((packed / f"{split}.h5").exists() for split in SPLITS):
            files = inputs
            if base is not None:
                template = "tokenizer"
                files = (directory / f"records-{length}.jsonl",)
                write_record_conversations(files[0], context, ROWS)
            if files:
                prepare(ConversationsConfig(files, folder, length, template, TEST_SHARE, output=packed))
            else:
                chat = chat_template(template, tokenizer)
                write_lines_rows(packed, context, config.rows(context), tokenizer, chat)
        _check_rows(packed, tokenizer)
    return tokenizer, rows


def write_record_conversations(path: Path, context: int, rows: int) -> None:
    """Writes a jsonl of conversations about records, which nearly fill so many rows of ``context`` tokens."""
    short, short_rows = STAGES[0].tokens, round(rows * SHORT_SHARE)
    counts = ((context, rows - short_rows), (short, short_rows * (context // short)))
    with replacing(path) as beside, beside.open("w") as file:
        for tokens, count in counts:
            for name in (f"finetune-{context}-{tokens}-{number}" for number in range(count)):
                file.write(json.dumps({"id": name, "conversations": _conversation(name, tokens)}) + "\n")


def _conversation(name: str, tokens: int) -> list[dict[str, str]]:
    """Turns of questions about a record, which precedes the first, and answers, of nearly so many tokens."""
    count = max(1, tokens // TOKENS_PER_QUESTION)
    # Between two questions the template adds one token.
    lines = (tokens - 2 - count * (TOKENS_A_QUESTION + ANSWER + 1)) // TOKENS_A_LINE
    document = LinePlan("LRT-NL", name, 0, 0, tuple(range(count)), count).build(lines)
    turns = []
    for question in random.Random(f"{name}/0").sample(document.questions, count):
        turns += [{"from": "human", "value": question.text}, {"from": "gpt", "value": question.expected[0]}]
    turns[0]["value"] = document.text + turns[0]["value"]
    return turns


def train_base(folder: Path, seed: int) -> Path:
    """Trains the demo's model before finetuning, unless ``folder`` has it; returns its folder."""
    model = folder / "model"
    if not (model / "config.json").exists():
        mesh = make_mesh(devices=jax.local_devices()[:1])
        export(train_retriever(RetrieverRun(STAGES[:1], seed), mesh, folder), model)
    return model


def ask_lines(when: str, model: Path, contexts: list[int], directory: Path, seed: int) -> list[Figure]:
    """Shares of right answers to questions for single lines of a record of each length, as figures.

    The length of the rows that the model before finetuning has seen is asked, too: what it could do already.
    The questions resume in ``directory``/ladder-``when``.
    """
    contexts, folder = sorted({STAGES[0].tokens, *contexts}), directory / f"ladder-{when}"
    reader, report = open_reader(str(model), contexts), LadderReport()
    config = RetrievalConfig(
        "ladder", folder.name, reader.trained_on_task, "line", "LRT-NL", ASKED_LINES, seed, ANSWER
    )
    run = RetrievalRun(folder, config, reader, report)
    with run.prepare(contexts, resume=True) as lengths:
        for length in lengths:
            run.ask(length)
        figures = report.figures(run.score())
    return [
        replace(figure, name=f"{when}/{figure.name}")
        for figure in figures
        if figure.name.startswith("score/line/")
    ]
