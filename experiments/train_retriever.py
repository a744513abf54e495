"""Trains the small retriever that comes with the project, from scratch, on line retrieval itself.

    python experiments/train_retriever.py

The lines of a record are spread over up to half a million positions from the start. In the second stage they
also compete as those of a whole record would, each with the weight of the lines that were left out around it.
The result is runs/retriever/model, a folder for ``evals/line_retrieval.py --model``; the one that comes with
the project is in evals/retriever. Run the same command again after an interruption: it continues where it
stopped.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import rich
from jax.sharding import Mesh

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.files.run_folder import Stages, enter_directory
from agentic_ring.mesh import make_mesh
from agentic_ring.models.llama import save_pretrained
from agentic_ring.models.llama.config_fields import read_fields
from agentic_ring.models.model import Model, Params
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from agentic_ring.token_units import short_tokens
from agentic_ring.training.loop import train
from agentic_ring.training.optimizer import OptimizerConfig
from agentic_ring.training.train_config import TrainConfig
from evals.common.intervals import wilson_interval
from evals.common.plots import plot_loss
from evals.common.results import Figure, Results, figure_table, write_results
from experiments.common.training_outputs import read_stage_metrics, training_outputs
from experiments.retriever.initial_weights import starting_params
from experiments.retriever.lessons import (
    ANSWER,
    FARTHEST_POSITION,
    Lesson,
    Lessons,
    Vocabulary,
    retriever_tokenizer,
)
from experiments.retriever.model import TaughtRetriever, answer_logits, retriever_config, retriever_loss

MADE_FOR = FARTHEST_POSITION
"""Context length of the exported model in tokens."""
TESTED_ROWS = 64


@dataclass(frozen=True)
class LessonStage:
    """Training on rows of one length.

    Attributes:
      tokens: tokens per row.
      rows: rows per update.
      questions: maximum number of questions per row.
      steps: number of updates.
      learning_rate: peak learning rate.
      crowding: see ``Lessons``.
    """

    tokens: int
    rows: int
    questions: int
    steps: int
    learning_rate: float
    crowding: float

    def lessons(self, vocabulary: Vocabulary, seed: int) -> Lessons:
        """The batches of this stage."""
        return Lessons(vocabulary, self.tokens, self.rows, self.questions, self.crowding, seed)

    def training(self, seed: int) -> TrainConfig:
        """The training settings of this stage."""
        optimizer = OptimizerConfig(
            self.learning_rate, warmup_steps=50, weight_decay=0.0, clip_norm=1.0, beta2=0.99
        )
        return TrainConfig(self.steps, self.rows, optimizer, checkpoint_every=500, log_every=10, seed=seed)


STAGES = (
    LessonStage(tokens=256, rows=4, questions=16, steps=1500, learning_rate=2e-3, crowding=0.0),
    LessonStage(tokens=512, rows=2, questions=32, steps=1800, learning_rate=2e-3, crowding=4.0),
)


@dataclass(frozen=True)
class RetrieverRun:
    """Everything that decides a run's result."""

    stages: tuple[LessonStage, ...]
    seed: int


def train_stages(run: RetrieverRun, vocabulary: Vocabulary, mesh: Mesh, directory: Path) -> Params:
    """Trains all stages, each from the weights of the previous one; returns the final weights."""
    model = Model(retriever_config(vocabulary))
    begin: Callable[[], Params] = partial(starting_params, model, vocabulary.signs, run.seed)
    for number, stage in enumerate(run.stages, start=1):
        say(f"stage {number} of {len(run.stages)}: rows of {short_tokens(stage.tokens)} tokens")
        with training_outputs(directory / f"stage{number}", run) as outputs:
            lessons = stage.lessons(vocabulary, run.seed)
            training = stage.training(run.seed)
            state = train(training, model, retriever_loss, lessons, mesh, *outputs, start=begin)
        # A copy, because the next stage donates its starting weights.
        begin = partial(jax.tree.map, jnp.copy, state.params)
    return begin()


def export(params: Params, vocabulary: Vocabulary, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the LLaMA without the parts for training, in half precision, with its tokenizer."""
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    retriever: TaughtRetriever = Model(retriever_config(vocabulary)).bind(half)

    def write_others(beside: Path) -> None:
        tokenizer.save(beside)
        path = beside / "config.json"
        path.write_text(json.dumps(read_fields(path) | {"trained_on_task": True}, indent=2) + "\n")

    save_pretrained(retriever.llama, folder, MADE_FOR, write_others)


def share_answered(params: Params, stage: LessonStage, vocabulary: Vocabulary, seed: int) -> Figure:
    """Share of questions about new records of a stage's length that are answered without an error."""

    @jax.jit
    def right(params: Params, lesson: Lesson) -> jax.Array:
        logits = answer_logits(model.bind(params), lesson)
        return (logits.argmax(-1) == lesson.answers) | (lesson.weight == 0)

    model = Model(retriever_config(vocabulary))
    lessons = stage.lessons(vocabulary, seed)
    answered = total = 0
    for _ in range(TESTED_ROWS):
        lesson = next(lessons)
        tokens = np.asarray(right(params, lesson)).reshape(stage.rows, stage.questions, ANSWER)
        asked = lesson.weight.reshape(tokens.shape)[..., 0] > 0
        answered += int((tokens.all(axis=-1) & asked).sum())
        total += int(asked.sum())
    return Figure.from_interval(
        f"answered/{short_tokens(stage.tokens)}", wilson_interval(answered, total), "share"
    )


def main(seed: int = 0, resume: bool = True, output: Path = Path("runs/retriever")) -> None:
    """Trains the embedded retriever.

    Args:
      seed: Random seed of the lessons and the initial weights.
      resume: Continue the run in the output folder; --no-resume moves it aside and starts anew.
      output: Folder of the run.
    """
    run = RetrieverRun(STAGES, seed)
    with enter_directory(output, run, resume):
        stages = Stages()
        stages.keep_in(output)
        tokenizer = retriever_tokenizer()
        vocabulary = Vocabulary.of(tokenizer)
        mesh = make_mesh(devices=jax.devices()[:1])
        with stages.stage("training"):
            params = train_stages(run, vocabulary, mesh, output)
        with stages.stage("test"), jax.set_mesh(mesh):
            figures = [share_answered(params, stage, vocabulary, seed + 1) for stage in run.stages]
        export(params, vocabulary, tokenizer, output / "model")
        write_results(output / "results.json", Results.of_this_process(asdict(run), stages.seconds, figures))
        rows = read_stage_metrics(output, [stage.steps for stage in run.stages])
        plot_loss(output / "loss.png", "retriever", rows, "nats per answer token")
        rich.print(figure_table(figures, "questions about new records"))
        print(f"written to {output}: model/, results.json, metrics and checkpoints of each stage, loss.png")


if __name__ == "__main__":
    cli.run(main)
