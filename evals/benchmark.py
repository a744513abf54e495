"""Benchmark of attention, decoding, training, rollouts and text, beside other libraries where they exist.

    python evals/benchmark.py --list
    python evals/benchmark.py attention/8192 decode
    python evals/benchmark.py --gpu-day

Contenders of a row are timed interleaved; medians are reported with minimum and maximum, and ratios are taken
within a round. Each row is measured in a process of its own with a time limit, and kept in a CSV file as soon
as it is known. The exit status is 1 if a row could not be measured or is beyond its tolerance. The rows of a
GPU need only JAX, and flax and optax for training steps: argparse reads the flags, so that a bare machine can
run this from a checkout, with PYTHONPATH=.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.provenance import SOURCE, git_commit
from agentic_ring.results.rows import read_rows
from agentic_ring.terminal.command import run_command
from evals.benchmarks.rows import Row, all_rows, choose_rows, is_wrong, line_table, measure
from evals.compile.machines import GPU_MEMORY_FRACTION


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the flags and measures; ``arguments`` are those of the command line by default."""
    parser = argparse.ArgumentParser(description="Measures speed and exactness, row by row.")
    rows_help = "Rows to measure, or the beginning of their names, such as attention. Default: all but gpu."
    parser.add_argument("rows", nargs="*", metavar="ROW", help=rows_help)
    for flag, text in {
        "--list": "List the rows and measure nothing.",
        "--gpu-day": "Measure the rows below gpu, which take at most 15 minutes.",
        "--tiny": "Sizes that a CPU computes in seconds, to try the rows.",
        "--missing": "Leave out rows that the file has from this commit and sizes.",
        "--in-this-process": "Measure in this process, without a time limit; for one row, such as under a "
        "profiler.",
    }.items():
        parser.add_argument(flag, action="store_true", help=text)
    file_help = "CSV file of the results. Default: runs/benchmark.csv, with --tiny runs/benchmark-tiny.csv."
    parser.add_argument("--rows-to", type=Path, metavar="FILE", help=file_help)
    flags = parser.parse_args(arguments)
    names = [*flags.rows, *(["gpu"] if flags.gpu_day else [])]
    rows = choose_rows(all_rows(), names) if names else all_rows()
    path = flags.rows_to or Path("runs") / ("benchmark-tiny.csv" if flags.tiny else "benchmark.csv")
    if flags.list:
        for row in rows:
            print(f"{row.name:32}{row.description}")
        return 0
    rows = [row for row in rows if names or not row.needs_gpu]
    if flags.in_this_process:
        for row in rows:
            os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_MEMORY_FRACTION))
            if not row.threads:
                # Cores that simulate more devices than there are would hide the imbalance between devices.
                one_thread = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
                os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {one_thread}"
            simulate_cpu_devices(row.devices)
            measure(row, flags.tiny, path)
        return 0
    if flags.missing:
        rows = [row for row in rows if not is_measured(row, flags.tiny, path)]
    return measure_all(rows, flags.tiny, path)


def is_measured(row: Row, tiny: bool, path: Path) -> bool:
    """Whether the file has the row with the same settings, measured at the commit that is checked out."""
    wanted = row.name, json.dumps(row.sized(tiny)), git_commit() or ""
    lines = read_rows(path) if path.exists() else []
    return any((line["row"], line["settings"], line["commit"]) == wanted and line["value"] for line in lines)


def measure_all(rows: Sequence[Row], tiny: bool, path: Path) -> int:
    """Measures rows one after another, and prints a table of those that were measured, and what failed.

    Returns the exit status: 1 if a row could not be measured or is beyond its tolerance, else 0.
    """
    flags = [*(["--tiny"] if tiny else []), "--rows-to", str(path.resolve())]
    failed: dict[str, str] = {}
    for number, row in enumerate(rows, start=1):
        print(f"{number}/{len(rows)} {row.name}: {row.description}", flush=True)
        started = time.perf_counter()
        # In a process of its own: it holds the GPU's memory, and an illegal access or a failed check ends it
        # or leaves it unusable.
        command = [sys.executable, "-m", "evals.benchmark", row.name, "--in-this-process", *flags]
        reason = ""
        try:
            ended = subprocess.run(command, cwd=SOURCE, timeout=row.limit_seconds, check=False)
            if ended.returncode != 0:
                reason = f"exit status {ended.returncode}, see above"
        except subprocess.TimeoutExpired:
            reason = f"took longer than {row.limit_seconds:.0f} s"
        if reason:
            failed[row.name] = reason
        print(f"  {reason or 'measured'} ({time.perf_counter() - started:.0f} s)", flush=True)
    chosen = {row.name for row in rows} - set(failed)
    lines = [line for line in read_rows(path) if line["row"] in chosen] if chosen else []
    print(line_table(lines).markdown())
    wrong = dict.fromkeys(line["row"] for line in lines if is_wrong(line))
    for name in wrong:
        print(f"{name} is beyond its tolerance")
    for name, reason in failed.items():
        print(f"{name} was not measured: {reason}")
    if failed:
        command = ["python", "evals/benchmark.py", *failed, *flags]
        print(f"to measure what is missing: {shlex.join(command)}")
    print(f"{len(chosen)} of {len(rows)} rows measured; see {path}")
    return int(bool(failed or wrong))


if __name__ == "__main__":
    run_command(main)
