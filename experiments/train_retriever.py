"""Trains the small retriever that comes with the project, from scratch, on line retrieval itself.

    python experiments/train_retriever.py

The lines of a record are spread over up to half a million positions from the start. In the second stage they
also compete as those of a whole record would, each with the weight of the lines that were left out around it.
The result is runs/retriever/model, a folder for ``evals/line_retrieval.py --model``; the one that comes with
the project is in evals/retriever. Run the same command again after an interruption: it continues where it
stopped.
"""

from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import rich

from agentic_ring.files.run_folder import Stages, enter_directory
from agentic_ring.mesh import make_mesh
from agentic_ring.models.model import Model, Params
from agentic_ring.results.intervals import wilson_interval
from agentic_ring.results.results_file import Figure, Results, figure_table, write_results
from agentic_ring.terminal import cli
from agentic_ring.token_units import short_tokens
from evals.plots import plot_loss
from experiments.common.launch import read_stage_metrics
from experiments.retriever.lessons import ANSWER, Lesson, Lessons, LessonStage
from experiments.retriever.training import (
    STAGES,
    RetrieverConfig,
    RetrieverRun,
    answer_logits,
    export,
    train_retriever,
)

TESTED_ROWS = 64


def share_answered(params: Params, stage: LessonStage, seed: int) -> Figure:
    """Share of questions about new records of a stage's length that are answered without an error."""
    model, lessons, each = Model(RetrieverConfig()), Lessons(stage, seed), []

    @jax.jit
    def right(params: Params, lesson: Lesson) -> jax.Array:
        logits = answer_logits(model.bind(params), lesson)
        return (logits.argmax(-1) == lesson.answers) | (lesson.weight == 0)

    for _ in range(TESTED_ROWS):
        lesson = next(lessons)
        tokens = np.asarray(right(params, lesson)).reshape(-1, ANSWER)
        each.append(np.all(tokens, axis=-1)[lesson.weight.reshape(-1, ANSWER)[:, 0] > 0])
    answered = np.concatenate(each)
    interval = wilson_interval(int(answered.sum()), len(answered), "answers")
    return Figure.from_interval(f"answered/{short_tokens(stage.tokens)}", interval, "share")


def main(seed: int = 0, resume: bool = True, output: Path = Path("runs/retriever")) -> None:
    """Trains the embedded retriever.

    Args:
      seed: Random seed of the lessons and the initial weights.
      resume: Continue the run in the output folder; --no-resume moves it aside and starts anew.
      output: Folder of the run.
    """
    run, stages = RetrieverRun(STAGES, seed), Stages()
    with enter_directory(output, run, resume):
        stages.keep_in(output)
        mesh = make_mesh(devices=jax.devices()[:1])
        with stages.stage("training"):
            params = train_retriever(run, mesh, output)
        with stages.stage("test"), jax.set_mesh(mesh):
            figures = [share_answered(params, stage, seed + 1) for stage in run.stages]
        export(params, output / "model")
        write_results(output / "results.json", Results.of_this_process(asdict(run), stages.seconds, figures))
        rows = read_stage_metrics(output, [stage.steps for stage in run.stages])
        plot_loss(output / "loss.png", "retriever", rows, "nats per answer token")
        rich.print(figure_table(figures, "questions about new records"))
        print(f"written to {output}: model/, results.json, metrics and checkpoints of each stage, loss.png")


if __name__ == "__main__":
    cli.run(main)
