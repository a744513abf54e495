"""A day with a GPU in one command: exactness, speed of kernels, training step, decoding, and the main job.

    python evals/gpu_day.py

Measures row by row and prints goal, found and met. A row that is done is kept in OUTPUT/rows.json and is not
measured again when the same command runs again; rows that failed or were skipped are. On a GPU it needs only
JAX, and for the train steps flax and optax: the flags are read by argparse and no package of ours is
installed, so that a bare machine can run it from a checkout: PYTHONPATH=. python evals/gpu_day.py
"""

import argparse
from pathlib import Path

from agentic_ring.errors import ArgumentError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.folder_lock import only_writer
from agentic_ring.terminal.command import run_command
from evals.compile.hardware import hardware_of
from evals.gpu.processes import find_provenance, measure_rows
from evals.gpu.records import Record, read_records, record_table, write_records
from evals.gpu.rows import Row, all_rows, choose_rows

ROWS_FILE, TABLE_FILE = "rows.json", "table.md"


def gpu_day(rows: list[Row], output: Path) -> int:
    """Measures the rows that are not done, prints the table of all of them and writes it to ``output``.

    Returns:
      The exit status: 1 if a row failed or a goal was not met, else 0.

    Raises:
      ArgumentError: ``output`` holds rows of other hardware.
      DataError: its file is damaged.
      FolderInUseError: another process writes to it.
    """
    with only_writer(output):
        path = output / ROWS_FILE
        records = {record.row: record for record in read_records(path)}
        missing = [row for row in rows if row.name not in records or not records[row.name].measures(row)]
        if missing:
            measure_missing(missing, records, path)
        table = record_table([records[row.name] for row in rows])
        with replacing(output / TABLE_FILE) as beside:
            beside.write_text(table.markdown())
    print(table.markdown())
    chosen = [records[row.name] for row in rows]
    failed = sum(record.status == "failed" for record in chosen)
    skipped = sum(record.status == "skipped" for record in chosen)
    unmet = sum(record.met is False for record in chosen)
    print(f"{len(chosen)} rows: {failed} failed, {skipped} skipped, {unmet} below their goal; see {output}")
    return int(failed + unmet > 0)


def measure_missing(missing: list[Row], records: dict[str, Record], path: Path) -> None:
    """Measures rows, and writes each record to the file as soon as it is known.

    Args:
      missing: rows to measure.
      records: records by name of row; those of ``missing`` are added.
      path: file of the records.
    """
    origin = find_provenance()
    kind = origin["hardware"]["device_kind"]
    for record in records.values():
        other = record.origin["hardware"]["device_kind"]
        if other != kind:
            raise ArgumentError(
                f"{path} holds rows of {other}, and this machine has {kind}; give another --output"
            )
    hardware = hardware_of(kind)
    name = None if hardware is None else hardware.name
    for number, (row, outcome) in enumerate(measure_rows(missing), start=1):
        record = Record.of(row, outcome, name, origin)
        records[row.name] = record
        write_records(path, list(records.values()))
        found = outcome.message if record.value is None else f"{record.value:.4g} {record.unit}"
        progress = f"{number}/{len(missing)} {row.name}: {outcome.status}"
        print(f"{progress}, {found} ({outcome.seconds:.0f} s)", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Reads the flags and measures; ``arguments`` are those of the command line by default."""
    groups = ", ".join(dict.fromkeys(row.group for row in all_rows()))
    parser = argparse.ArgumentParser(description="Measures exactness and speed on one GPU, row by row.")
    parser.add_argument(
        "--rows",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"Rows to measure, or the beginning of their names; groups: {groups}. Default: all.",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="Sizes that a CPU computes in seconds, to try the script; times then have no goals.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="Folder of rows.json and table.md. Default: runs/gpu_day, with --tiny runs/gpu_day-tiny.",
    )
    flags = parser.parse_args(arguments)
    default = Path("runs") / ("gpu_day-tiny" if flags.tiny else "gpu_day")
    return gpu_day(choose_rows(all_rows(flags.tiny), flags.rows), flags.output or default)


if __name__ == "__main__":
    run_command(main)
