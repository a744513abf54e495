"""Small jobs that write files of each kind, each in a process that may be killed.

The processes are forked from one that has imported the scripts already (``multiprocessing``'s fork server):
a start takes a tenth of a second instead of five.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from agentic_ring.data.tasks import DOMAINS
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.terminal import cli
from data_prep import collect, exorl, sharegpt
from data_prep.episodes.conversion import ConvertConfig, convert
from data_prep.episodes.episode_files import write_episode
from data_prep.folders import collector_folder
from evals.compile.llama_step import Shape
from experiments import exorl_at_ring, llama_finetune
from experiments.exorl import pipeline
from experiments.exorl import presets as exorl_presets
from experiments.finetune import presets as finetune_presets
from experiments.finetune.demo_conversations import write_demo_conversations
from tests.data.text.tokenizers_for_tests import byte_level
from tests.data_prep.exploration import uniform_episodes

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

Flags = Callable[[Path, Path], list[object]]
"""(folder of the shared inputs, folder of the run) -> flags of the command."""


@dataclass(frozen=True)
class Job:
    """A command whose run may be killed.

    Attributes:
      main: the script's main function or class of flags.
      flags: its command line.
      kills: number of kills in a trial of the job.
      inputs: files and folders below the inputs' folder that the job changes: a run has copies of its own.
      shrink: makes presets small, in the job's process.
    """

    main: Any
    flags: Flags
    kills: int
    inputs: tuple[str, ...] = ()
    shrink: Callable[[], None] | None = None


def write_inputs(folder: Path) -> None:
    """Writes what the jobs read: episodes of cartpole, a store of them, conversations and a tokenizer."""
    explored = uniform_episodes(DOMAINS["cartpole"], ["swingup"] * 4, action_repeat=8)
    for number in range(12):
        write_episode(buffer_in(folder), number, explored[number % 4])
    convert(ConvertConfig("cartpole", "rnd", data=folder))
    source = folder / "unconverted"
    for number in range(24):
        write_episode(buffer_in(source), number, explored[number % 4])
    write_demo_conversations(folder / "chats.jsonl", count=120)
    byte_level().save(folder / "tokenizer")


def buffer_in(data: Path) -> Path:
    """The folder of ExoRL's episode files of cartpole in a data folder."""
    buffer = collector_folder(data, "cartpole", "rnd") / "buffer"
    buffer.mkdir(parents=True, exist_ok=True)
    return buffer


TINY = {"transformer": TransformerConfig(width=16, layers=1, heads=2, ffn_width=32), "trials": 2}


def shrink_main_job() -> None:
    preset = exorl_presets.PRESETS["demo"]
    tiny = replace(preset, **TINY, updates=12, checkpoint_every=2, trajectories=2)
    exorl_presets.PRESETS["demo"] = tiny
    evaluation: Any = pipeline.EvaluationConfig
    pipeline.EvaluationConfig = lambda **given: evaluation(**given | {"environments": 2})


def shrink_finetune() -> None:
    stage = finetune_presets.Stage
    finetune_presets.PRESETS["demo"] = finetune_presets.FinetunePreset(
        stages=(
            stage(64, 10_000.0, 2e-2, steps=6, batch_tokens=256, warmup_steps=1),
            stage(128, 40_000.0, 1e-2, steps=4, batch_tokens=256, warmup_steps=1),
        ),
        shape=Shape(16, 32, 2, 2, vocab_size=300),
        checkpoint_every=2,
        base="fresh",
        frugal=False,
    )


def _collection(collector: str, episodes: int) -> Flags:
    size = ["--episodes", episodes, "--members", 2, "--environments", 1]
    return lambda _, run: ["--domain", "cartpole", "--collector", collector, *size, "--output", run]


JOBS: dict[str, Job] = {
    "collect_noise": Job(collect.main, _collection("ou", 12), kills=2),
    "convert": Job(
        exorl.main,
        lambda _, run: [
            *("--domain", "cartpole", "--collector", "rnd", "--part-episodes", 3),
            *("--data", run / "unconverted"),
        ],
        kills=2,
        inputs=("unconverted",),
    ),
    "pack_conversations": Job(
        sharegpt.main,
        lambda inputs, run: [
            *(inputs / "chats.jsonl", "--tokenizer", inputs / "tokenizer"),
            *("--template", "plain", "--length", 64, "--output", run),
        ],
        kills=2,
    ),
    "main_job": Job(
        exorl_at_ring.main,
        lambda inputs, run: ["--task", "cartpole_swingup", "--data", inputs, "--output", run],
        kills=1,
        shrink=shrink_main_job,
    ),
    "finetune": Job(
        llama_finetune.main,
        lambda inputs, run: [
            *("--conversations", inputs / "chats.jsonl", "--template", "plain", "--output", run)
        ],
        kills=1,
        shrink=shrink_finetune,
    ),
}


def prepare(name: str, inputs: Path, run: Path) -> None:
    """Makes the folder of a run, with the inputs that the job changes."""
    run.mkdir()
    for path in JOBS[name].inputs:
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (inputs / path).is_dir() else shutil.copy2
        copy(inputs / path, run / path)


def start(name: str, inputs: Path, run: Path, log: Path) -> None:
    """Runs a job in this process, the leader of a process group of its own; exits with its status."""
    os.setsid()
    job = JOBS[name]
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if job.shrink is not None:
        job.shrink()
    cli.run(job.main, args=[str(flag) for flag in job.flags(inputs, run)])
