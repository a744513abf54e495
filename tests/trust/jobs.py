"""Small jobs of every kind that writes files, each in a process that may be killed.

The processes are forked from one that has imported the scripts already (``multiprocessing``'s fork server):
a start takes a tenth of a second instead of five.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.families.ranked_trials import RankingConfig
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.terminal import cli
from data_prep import collect, exorl, relabel, sharegpt
from data_prep.conversion import ConvertConfig, convert
from data_prep.episode_files import collector_folder, write_episode
from data_prep.explore import ExploreConfig, explore
from evals import line_retrieval
from experiments import exorl_at_ring, in_context, llama_finetune, table5_exorl, train_retriever
from experiments.common import cells
from experiments.exorl import pipeline
from experiments.exorl import presets as exorl_presets
from experiments.finetune import presets as finetune_presets
from experiments.hidden_tasks import variants as hidden_tasks
from experiments.table5 import methods
from experiments.table5 import presets as table_presets
from experiments.table5.cells import run_cell
from tests.data.text.tokenizers_for_tests import byte_level
from tests.data_prep.exploration import uniform_episodes
from tests.experiments.tiny_finetuning import FRESH, write_chats

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@dataclass(frozen=True)
class Job:
    """A command whose run may be killed."""

    main: Any
    """The script's main function or class of flags."""
    flags: str
    """Its flags, in which {inputs} and {run} stand for the folders of the shared inputs and of the run."""
    inputs: tuple[str, ...] = ()
    """Files and folders below the inputs' folder that the job changes: a run has copies of its own."""
    shrink: Callable[[], None] = lambda: None
    """Makes presets small, in the job's process."""


def write_inputs(folder: Path) -> None:
    """Writes what the jobs read: episodes of cartpole, a store of them, conversations and a tokenizer."""
    explored = uniform_episodes(DOMAINS["cartpole"], ["swingup"] * 4, action_repeat=8)
    for number in range(12):
        write_episode(buffer_in(folder), number, explored[number % 4])
    convert(ConvertConfig("cartpole", "rnd", data=folder))
    source = folder / "unconverted"
    for number in range(24):
        write_episode(buffer_in(source), number, explored[number % 4])
    explore(ExploreConfig("point_mass", trials=400, data=folder))
    write_chats(folder / "chats.jsonl")
    byte_level().save(folder / "tokenizer")


def buffer_in(data: Path) -> Path:
    """The folder of ExoRL's episode files of cartpole in a data folder."""
    buffer = collector_folder(data, "cartpole", "rnd") / "buffer"
    buffer.mkdir(parents=True, exist_ok=True)
    return buffer


TINY = {"transformer": TransformerConfig(width=16, layers=1, heads=2, ffn_width=32), "trials": 2}


def _shrink(presets: dict[str, Any], **changes: Any) -> None:
    presets["demo"] = replace(presets["demo"], **changes)


def _evaluate_in_two_environments(module: Any) -> None:
    evaluation = module.EvaluationConfig
    module.EvaluationConfig = lambda **given: evaluation(**given | {"environments": 2})


def shrink_main_job() -> None:
    _shrink(exorl_presets.PRESETS, **TINY, updates=8, checkpoint_every=2, trajectories=2)
    _evaluate_in_two_environments(pipeline)


def shrink_in_context() -> None:
    trained = replace(hidden_tasks.N128, trials=2, first_trials=1)
    _shrink(
        hidden_tasks.PRESETS,
        variants=(trained, replace(hidden_tasks.ORACLE, cues=(1,))),
        **TINY | {"tokens": 2048, "tokens_per_update": 512, "checkpoint_every": 1, "tasks": 2, "measured": 1},
        ranking=RankingConfig(goals=20, demonstrations=1),
    )
    cells.run_cells = _runs_here(hidden_tasks.run_cell)


def _runs_here(run: Callable[[Any, Path], None]) -> Any:
    """Runs cells in this process: others would not see the small preset."""

    def run_here(each, output, workers, environment):
        for cell in each:
            if not cells.is_finished(cell, output):
                run(cell, output)
            yield cell

    return run_here


def shrink_finetune() -> None:
    finetune_presets.PRESETS["demo"] = FRESH


def shrink_retriever() -> None:
    lesson = partial(train_retriever.LessonStage, steps=4, learning_rate=1e-3)
    train_retriever.STAGES = (lesson(128, 2, 4, crowding=0.0), lesson(192, 1, 4, crowding=1.0))
    train_retriever.TESTED_ROWS = 2


def shrink_table() -> None:
    demo = table_presets.TABLE_PRESETS["demo"]
    learner = replace(demo.values.learner, hidden=8, batch=8)
    values = replace(demo.values, learner=learner, updates=6, updates_per_call=2, checkpoint_every=2)
    _shrink(table_presets.TABLE_PRESETS, values=values, chains=replace(demo.chains, trials=2))
    _evaluate_in_two_environments(methods)
    cells.run_cells = _runs_here(run_cell)


COLLECTION = "--domain cartpole --members 2 --environments 1 --output {run}"
DATA = "--data {inputs} --output {run}"
CHATS = "--template plain --output {run}"
JOBS: dict[str, Job] = {
    "collect_noise": Job(collect.main, f"{COLLECTION} --collector ou --episodes 12"),
    "collect_td3": Job(collect.main, f"{COLLECTION} --collector td3 --episodes 8"),
    "convert": Job(
        exorl.main,
        "--domain cartpole --collector rnd --part-episodes 3 --data {run}/unconverted",
        inputs=("unconverted",),
    ),
    "relabel": Job(
        relabel.main,
        "--store {run}/store/cartpole-rnd.h5 --tasks swingup swingup_sparse",
        inputs=("store/cartpole-rnd.h5",),
    ),
    "pack_conversations": Job(
        sharegpt.main, f"{{inputs}}/chats.jsonl --tokenizer {{inputs}}/tokenizer --length 64 {CHATS}"
    ),
    "main_job": Job(exorl_at_ring.main, f"--task cartpole_swingup {DATA}", shrink=shrink_main_job),
    "in_context": Job(in_context.main, DATA, shrink=shrink_in_context),
    "finetune": Job(
        llama_finetune.main, f"--conversations {{inputs}}/chats.jsonl {CHATS}", shrink=shrink_finetune
    ),
    "table5": Job(
        table5_exorl.main,
        f"--tasks cartpole_swingup --methods random td3_bc --seeds 1 {DATA}",
        shrink=shrink_table,
    ),
    "line_retrieval": Job(
        line_retrieval.main, "--ctx 1k,2k --num-samples 4 --questions-per-document 2 --output {run}"
    ),
    "train_retriever": Job(train_retriever.main, "--output {run}", shrink=shrink_retriever),
}


def start(name: str, inputs: Path, run: Path, log: Path) -> None:
    """Runs a job in this process, the leader of a process group of its own; exits with its status."""
    os.setsid()
    job = JOBS[name]
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    job.shrink()
    cli.run(job.main, args=job.flags.format(inputs=inputs, run=run).split())
