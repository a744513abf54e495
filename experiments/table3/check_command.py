"""The command that asks a compiler about one cell, for scripts that ask about many."""

import sys
from pathlib import Path

from evals.compile.maximum_context import Cell

SCRIPT = Path(__file__).parents[1] / "table3_max_context.py"


def check_command(cell: Cell, context: int, output: Path) -> list[str]:
    """``table3_max_context.py --check``, asking about one context of a cell."""
    flags = {
        "--hardware": cell.hardware,
        "--model": cell.model,
        "--method": cell.method,
        "--precision": cell.precision,
        "--check": str(context),
        "--inputs": "host" if cell.remat == "offload" else "device",
        "--output": str(output),
    }
    return [sys.executable, str(SCRIPT), *(part for pair in flags.items() for part in pair)]
