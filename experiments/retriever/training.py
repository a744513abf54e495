"""Training of the small retriever, stage by stage, and its export as a LLaMA."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.models.llama import save_pretrained
from agentic_ring.models.llama.config_file import read_fields
from agentic_ring.models.model import Model, Params
from agentic_ring.terminal.progress import say
from agentic_ring.token_units import short_tokens
from agentic_ring.training.loop import train
from agentic_ring.training.optimizer import OptimizerConfig
from agentic_ring.training.train_config import TrainConfig
from experiments.common.training_outputs import train_stages, training_outputs
from experiments.retriever.lessons import FARTHEST_POSITION, Lessons, Vocabulary
from experiments.retriever.model import TaughtRetriever, retriever_config, retriever_loss, starting_params

MADE_FOR = FARTHEST_POSITION
"""Context length of the exported model in tokens."""


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


def train_retriever(run: RetrieverRun, vocabulary: Vocabulary, mesh: Mesh, directory: Path) -> Params:
    """Trains all stages, each from the weights of the previous one; returns the final weights."""
    model = Model(retriever_config(vocabulary))

    def train_stage(number: int, folder: Path, params: Params | None) -> Params:
        stage = run.stages[number]
        say(f"stage {number + 1} of {len(run.stages)}: rows of {short_tokens(stage.tokens)} tokens")
        fresh = partial(starting_params, model, vocabulary.signs, run.seed)
        start = fresh if params is None else lambda: params
        with training_outputs(folder, run) as outputs:
            lessons = stage.lessons(vocabulary, run.seed)
            training = stage.training(run.seed)
            return train(training, model, retriever_loss, lessons, mesh, *outputs, start=start).params

    return train_stages(directory, len(run.stages), train_stage)


def export(params: Params, vocabulary: Vocabulary, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the LLaMA without the parts for training, in half precision, with its tokenizer."""
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)
    retriever: TaughtRetriever = Model(retriever_config(vocabulary)).bind(half)
    save_pretrained(retriever.llama, folder, MADE_FOR, partial(write_beside_weights, tokenizer))


def write_beside_weights(tokenizer: Tokenizer, folder: Path) -> None:
    """Adds the tokenizer to a model's folder, and to its config that it was trained on line retrieval."""
    tokenizer.save(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(read_fields(path) | {"trained_on_task": True}, indent=2) + "\n")
