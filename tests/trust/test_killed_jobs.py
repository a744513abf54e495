"""Jobs of every kind are killed or told to stop at random moments, and started again.

They end as if nothing had happened. AGENTIC_RING_TRUST_KILLS sets the number of kills of each job. Their
processes are forked from one that has imported this module already (``multiprocessing``'s fork server): a
start takes a tenth of a second instead of five.
"""

import json
import multiprocessing
import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.hidden_tasks.ranked_trials import RankingConfig
from agentic_ring.errors import EXIT_STOPPED
from agentic_ring.stopping import SIGNALS
from agentic_ring.terminal import cli
from data_prep import collect, exorl, relabel, sharegpt
from data_prep.conversion import ConvertConfig, convert
from data_prep.episode_files import collector_folder, write_episode
from data_prep.explore import ExploreConfig, explore
from evals import line_retrieval
from experiments import exorl_at_ring, in_context, llama_finetune, table5_exorl, train_retriever
from experiments.common.cells import is_finished
from experiments.exorl import pipeline, told_presets
from experiments.finetune import presets as finetune_presets
from experiments.hidden_tasks import variants as hidden_tasks
from experiments.hidden_tasks.rollouts import RolloutConfig
from experiments.table5 import methods
from experiments.table5 import presets as table_presets
from tests.data.text.tokenizers_for_tests import byte_level
from tests.data_prep.exploration import uniform_episodes
from tests.experiments.conftest import TINY_TOLD
from tests.experiments.tiny_finetuning import FRESH, write_chats
from tests.trust.daily_seed import daily_seed

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """What the jobs read: episodes of cartpole, a store of them, conversations and a tokenizer."""
    folder = tmp_path_factory.mktemp("inputs")
    explored = uniform_episodes(DOMAINS["cartpole"], ["swingup"] * 4, action_repeat=8)
    for data, count in ((folder, 12), (folder / "unconverted", 24)):
        buffer = collector_folder(data, "cartpole", "rnd") / "buffer"
        for number in range(count):
            write_episode(buffer, number, explored[number % 4])
    convert(ConvertConfig("cartpole", "rnd", data=folder))
    explore(ExploreConfig("point_mass", trials=400, data=folder))
    write_chats(folder / "chats.jsonl")
    byte_level().save(folder / "tokenizer")
    return folder


def shrink_presets() -> None:
    """Makes all presets small, in the job's process, which then runs all cells: others would not see them."""
    told_presets.TOLD_PRESETS["demo"] = replace(told_presets.TOLD_PRESETS["demo"], **TINY_TOLD, updates=8)
    told_presets.ToldEvaluation = partial(told_presets.ToldEvaluation, environments=2, trials=2)
    finetune_presets.PRESETS["demo"] = FRESH
    trained = replace(hidden_tasks.N128, trials=2, first_trials=1)
    hidden_tasks.PRESETS["demo"] = replace(
        hidden_tasks.PRESETS["demo"],
        variants=(trained, replace(hidden_tasks.ORACLE, cues=(1,))),
        transformer=TINY_TOLD["transformer"],
        tokens=2048,
        tokens_per_update=512,
        checkpoint_every=1,
        rollouts=RolloutConfig(tasks=2, trials=2, measured=1),
        ranking=RankingConfig(goals=20, demonstrations=1),
    )
    demo = table_presets.TABLE_PRESETS["demo"]
    learner = replace(demo.values.learner, hidden=8, batch=8)
    values = replace(demo.values, learner=learner, updates=6, updates_per_call=2, checkpoint_every=2)
    chains = replace(demo.chains, trials=2)
    table_presets.TABLE_PRESETS["demo"] = replace(demo, values=values, chains=chains)
    lesson = partial(train_retriever.LessonStage, steps=4, learning_rate=1e-3)
    train_retriever.STAGES = (lesson(128, 2, 4, crowding=0.0), lesson(192, 1, 4, crowding=1.0))
    train_retriever.TESTED_ROWS = 2
    collect.TD3Config = partial(collect.TD3Config, hidden=8, batch=8)  # which learns in the last two rounds
    collect.PLANS["cartpole"] = replace(collect.PLANS["cartpole"], updates=2)
    modules: list[Any] = [pipeline, methods]
    for module in modules:
        evaluation = module.EvaluationConfig
        module.EvaluationConfig = lambda kind=evaluation, **given: kind(**given | {"environments": 2})

    def run_here(title, cells, output, *_):
        for cell in cells:
            if not is_finished(cell, output):
                import_module(type(cell).__module__).run_cell(cell, output)

    in_context.run_cells = table5_exorl.run_cells = run_here


COLLECTION = "--domain cartpole --members 2 --environments 1 --output {run}"
DATA = "--data {inputs} --output {run}"
CHATS = "--template plain --output {run}"
PACKING = "{inputs}/chats.jsonl --tokenizer {inputs}/tokenizer --length 64"
LINES = "--ctx 1k,2k --num-samples 4 --questions-per-document 2 --output {run}"
JOBS: dict[str, tuple[Any, str]] = {
    "collect_noise": (collect.main, f"{COLLECTION} --collector ou --episodes 12"),
    "collect_td3": (collect.main, f"{COLLECTION} --collector td3 --episodes 8 --action-repeat 4"),
    "convert": (exorl.main, "--domain cartpole --collector rnd --part-episodes 3 --data {run}/unconverted"),
    "relabel": (relabel.main, "--store {run}/store/cartpole-rnd.h5 --tasks swingup swingup_sparse"),
    "pack_conversations": (sharegpt.main, f"{PACKING} {CHATS}"),
    "main_job": (exorl_at_ring.main, f"--task cartpole_swingup {DATA}"),
    "in_context": (in_context.main, DATA),
    "finetune": (llama_finetune.main, f"--conversations {{inputs}}/chats.jsonl {CHATS}"),
    "table5": (table5_exorl.main, f"--tasks cartpole_swingup --methods random td3_bc --seeds 1 {DATA}"),
    "line_retrieval": (line_retrieval.main, LINES),
    "train_retriever": (train_retriever.main, "--output {run}"),
}
"""Main function or class of flags, and flags: {inputs} is the folder of shared inputs, {run} the run's."""
CHANGED = {"convert": "unconverted", "relabel": "store/cartpole-rnd.h5"}
"""What a job changes below the inputs' folder: a run has a copy of its own."""


def start(name: str, inputs: Path, run: Path, log: Path) -> None:
    """Runs a job in this process, the leader of a process group of its own; exits with its status."""
    os.setsid()
    main, flags = JOBS[name]
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    shrink_presets()
    cli.run(main, args=flags.format(inputs=inputs, run=run).split())


KILLS = int(os.environ.get("AGENTIC_RING_TRUST_KILLS", "2"))
INTERRUPTIONS_OF_A_RUN, SHARE_OF_STOPS = 4, 0.25
"""Maximum interruptions before a run may end, and the share of signals to stop instead of kills."""
TIME_UNITS, TIME_COLUMNS = {"s", "tokens/s"}, {"tokens_per_second", "seconds", "reading_seconds", "digest"}
"""Units of figures, and columns of logs, that each session measures anew; and a row's digest."""
UNCOMPARED = {"stages.json", "log.txt", ".png", ".html", ".md", ".csv", ".txt"}
"""Names and suffixes of files of times, and of pictures and tables of what other files hold."""


def begin(name: str, inputs: Path, run: Path) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=start, args=(name, inputs, run, run.with_suffix(".log")))
    process.start()
    return process


def kill(process: Any) -> bool:
    """Kills the process alone, not those that it started; returns whether it was still running."""
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def stop(process: Any, number: signal.Signals) -> bool:
    """Sends a signal once the command handles it; returns whether the process ends because of it."""
    with suppress(FileNotFoundError, ProcessLookupError):  # no /proc, or it has just ended
        caught = 0
        while process.is_alive() and not caught >> (number - 1) & 1:
            time.sleep(0.01)
            status = Path(f"/proc/{process.pid}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    if process.is_alive():
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)
    process.join(60)
    status = process.exitcode
    if status is None:
        kill(process)
    assert status in (0, EXIT_STOPPED), f"exit status {status} after {number.name}"
    return status == EXIT_STOPPED


def assert_nothing_runs_on(group: int) -> None:
    """The processes of its group, which a killed job had started, end by themselves."""
    deadline = time.monotonic() + 30
    alive = [group]
    while alive:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)
        alive = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process.cmdline())


def finish(name: str, inputs: Path, run: Path) -> float:
    """Runs a job to its end, which must be a good one; returns the seconds it took."""
    started = time.monotonic()
    process = begin(name, inputs, run)
    process.join(300)
    status = process.exitcode
    if status is None:
        kill(process)
    assert status == 0, run.with_suffix(".log").read_text()
    assert_nothing_runs_on(process.pid)
    return time.monotonic() - started


def fingerprint(run: Path) -> dict[str, object]:
    """What a finished run holds, by file, without the times that each session measures anew."""
    found: dict[str, object] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(run))
        if "checkpoints" in path.parts:  # their bytes hold times; all other files follow from them
            checkpoints = Path(*path.parts[: path.parts.index("checkpoints") + 1])
            found[str(checkpoints.relative_to(run))] = sorted(each.name for each in checkpoints.iterdir())
        elif {path.name, path.suffix} & UNCOMPARED:
            found[name] = "present"
        elif path.name == "results.json":
            figures = json.loads(path.read_text())["figures"]
            found[name] = [figure for figure in figures if figure["unit"] not in TIME_UNITS]
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: row[key] for key in row.keys() - TIME_COLUMNS} for row in rows]
        else:
            found[name] = path.read_bytes()
    return found


def prepared(name: str, inputs: Path, folder: Path) -> Path:
    """A new folder of a run, in a folder of its own, with copies of the inputs that the job changes."""
    run = folder / "run"
    run.mkdir(parents=True)
    if path := CHANGED.get(name):
        (run / path).parent.mkdir(exist_ok=True)
        (shutil.copytree if (inputs / path).is_dir() else shutil.copy2)(inputs / path, run / path)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_killed_job_ends_as_one_that_was_not(name, inputs, tmp_path, record_property):
    random = np.random.default_rng([daily_seed(), *name.encode()])
    whole = prepared(name, inputs, tmp_path / "whole")
    seconds = finish(name, inputs, whole)
    expected = fingerprint(whole)
    kills = stops = runs = 0
    while kills < KILLS:
        run = prepared(name, inputs, tmp_path / f"killed{runs}")
        interruptions = 0
        while kills < KILLS and interruptions < INTERRUPTIONS_OF_A_RUN:
            interruptions += 1
            process = begin(name, inputs, run)
            # What is left after an interruption takes less time.
            process.join(random.uniform(0, seconds / interruptions))
            if process.exitcode is not None:
                break
            if random.random() < SHARE_OF_STOPS:
                stops += stop(process, SIGNALS[random.integers(len(SIGNALS))])
            else:
                kills += kill(process)
            assert_nothing_runs_on(process.pid)
        finish(name, inputs, run)
        assert "Traceback" not in run.with_suffix(".log").read_text()
        assert fingerprint(run) == expected
        shutil.rmtree(run.parent)
        runs += 1
    record_property("trust", f"| {name} | {kills} | {stops} | {runs} |")
