"""Bugs that users of ring attention met in other packages, tried on this one and on `ringattention` 0.1.2.

    python evals/known_bugs.py --rows-to known_bugs.csv

Each bug is a case whose result the bug changes (``evals.attention_bugs.cases``), with the number that was
measured and the bound that an implementation without the bug keeps. `ringattention` runs the cases for which
it has arguments, after `pip install -e '.[peers]'`; without the package its column says so.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rich.console import Console

from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal import cli
from agentic_ring.terminal.tables import TextTable
from evals.attention_bugs.cases import KNOWN_BUGS, KnownBug
from evals.attention_bugs.implementations import authors, ours
from evals.attention_bugs.problem import Attend
from evals.speed.attention_benchmark import UnsupportedError

DEVICES = 8
IMPLEMENTATIONS: dict[str, Attend] = {
    "this library": ours,
    "ringattention": authors,
    "ringattention, float32_logits=False": partial(authors, float32_logits=False),
}


def tried(bug: KnownBug, implementations: Mapping[str, Attend]) -> dict[str, str]:
    """The row of a bug: what each implementation gave, or the reason why it gave nothing."""
    row = {
        "bug": bug.name,
        "thread": " ".join(bug.threads),
        "measured": bug.measured,
        "bound": f"{bug.bound:g}",
    }
    for name, attend in implementations.items():
        try:
            row[name] = f"{bug.measure(attend):.2g}"
        except UnsupportedError as reason:
            row[name] = str(reason)
    return row


def main(rows_to: Path | None = None) -> None:
    """Prints what every implementation gives for every known bug.

    Args:
      rows_to: CSV file for the rows; none is written if left out.
    """
    simulate_cpu_devices(DEVICES)
    rows = [tried(bug, IMPLEMENTATIONS) for bug in KNOWN_BUGS]
    Console(width=200).print(TextTable("known bugs of ring attention", rows).rich())
    if rows_to is not None:
        write_rows(rows_to, rows)


if __name__ == "__main__":
    cli.run(main)
