"""The finetuning demo: a model that finds lines in short records learns to find them in long ones.

The model before finetuning is the small retriever after its first stage, on records of up to 49 lines. It is
finetuned on conversations about records that fill a row. Before and after, it is asked for lines of others.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import jax

from agentic_ring.files.atomic import replacing
from agentic_ring.mesh import make_mesh
from agentic_ring.results.results_file import Figure
from agentic_ring.token_units import short_tokens
from evals.retrieval.answers import SetScore
from evals.retrieval.documents import LinePlan
from evals.retrieval.local_reader import open_reader
from evals.retrieval.reports import LadderReport
from evals.retrieval.run import RetrievalConfig, RetrievalRun
from experiments.retriever.lessons import (
    ANSWER,
    TOKENS_A_LINE,
    TOKENS_A_QUESTION,
    Vocabulary,
    retriever_tokenizer,
)
from experiments.retriever.training import STAGES, RetrieverRun, export, train_retriever

ROWS = 256
"""Rows of conversations of each length, of which some are held out."""
SHORT_SHARE = 0.25
"""Share of the rows that hold conversations as short as the records that the base has seen. Without them it
forgets how to read those: 30 of 50 lines instead of 50 of 50."""
TOKENS_PER_QUESTION = 128
"""Tokens of a conversation for each question in it."""
ASKED_LINES = 50
"""Questions of the ladder at each length."""


def train_base(folder: Path, seed: int) -> Path:
    """Trains the model before finetuning, unless ``folder`` has it; returns the folder of the model."""
    model = folder / "model"
    if not (model / "config.json").exists():
        tokenizer = retriever_tokenizer()
        vocabulary = Vocabulary.of(tokenizer)
        run = RetrieverRun(STAGES[:1], seed)
        params = train_retriever(run, vocabulary, make_mesh(devices=jax.local_devices()[:1]), folder)
        export(params, vocabulary, tokenizer, model)
    return model


def write_record_conversations(path: Path, context: int, rows: int = ROWS, seed: int = 0) -> None:
    """Writes a jsonl of conversations about records, which nearly fill so many rows of ``context`` tokens."""
    short, short_rows = STAGES[0].tokens, round(rows * SHORT_SHARE)
    counts = ((context, rows - short_rows), (short, short_rows * (context // short)))
    with replacing(path) as beside, beside.open("w") as file:
        for tokens, count in counts:
            for number in range(count):
                name = f"finetune-{context}-{tokens}-{number}"
                turns = _conversation(name, tokens, seed)
                file.write(json.dumps({"id": name, "conversations": turns}) + "\n")


def _conversation(name: str, tokens: int, seed: int) -> list[dict[str, str]]:
    """Turns of questions about a record and of answers, of nearly so many tokens."""
    questions = max(1, tokens // TOKENS_PER_QUESTION)
    # Between two questions the template adds one token.
    lines = (tokens - 2 - questions * (TOKENS_A_QUESTION + ANSWER + 1)) // TOKENS_A_LINE
    document = LinePlan("LRT-NL", name, seed, 0, tuple(range(questions)), questions).build(lines)
    asked = random.Random(f"{name}/{seed}").sample(document.questions, questions)
    turns = [
        {"from": speaker, "value": text}
        for question in asked
        for speaker, text in (("human", question.text), ("gpt", question.expected[0]))
    ]
    turns[0]["value"] = document.text + turns[0]["value"]
    return turns


def ask_lines(model: Path, contexts: list[int], directory: Path, seed: int) -> list[SetScore]:
    """Scores a model's answers to questions for one line of a record of each length; resumes there.

    The length of the rows that the model before finetuning has seen is asked, too: what it could do already.
    """
    contexts = sorted({STAGES[0].tokens, *contexts})
    reader = open_reader(str(model), contexts, None, allow_extrapolation=False)
    config = RetrievalConfig(
        "ladder", directory.name, reader.trained_on_task, "line", "LRT-NL", ASKED_LINES, seed, ANSWER
    )
    run = RetrievalRun(directory, config, reader, LadderReport())
    with run.prepare(contexts, resume=True) as lengths:
        for length in lengths:
            run.ask(length)
        return run.score()


def line_figures(when: str, scores: list[SetScore]) -> list[Figure]:
    """Share of right answers at each length, as figures of ``results.json``."""
    return [
        replace(figure, name=f"{when}/{figure.name}")
        for figure in LadderReport().figures(scores)
        if figure.name.startswith("score/line/")
    ]


def conversations_file(directory: Path, context: int) -> Path:
    """The file of the conversations of a length, which is written if it is missing."""
    path = directory / f"records-{short_tokens(context)}.jsonl"
    if not path.exists():
        write_record_conversations(path, context)
    return path
