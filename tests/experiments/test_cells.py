import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.common.cells import RESULTS_FILE, CellFailedError, CellPool, run_cells

FINISH = f"import os; open({RESULTS_FILE!r}, 'w').close(); print(os.environ['SHARE'])"
FAIL = "raise SystemExit('error: no such luck')"
WAIT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open('saved', 'w').close(), sys.exit(75)))
open('started', 'w').close()
time.sleep(60)
"""


@dataclass(frozen=True)
class ScriptCell:
    """A cell that runs a line of Python in its folder."""

    name: str
    line: str

    def __str__(self) -> str:
        return f"cell {self.name}"

    def folder(self, output: Path) -> Path:
        return output / self.name

    def command(self, output: Path) -> list[str]:
        return [sys.executable, "-c", f"import os; os.chdir({str(self.folder(output))!r})\n{self.line}"]


def test_a_cell_that_fails_is_named_after_the_others_and_finished_ones_are_kept(tmp_path):
    cells = [ScriptCell("bad", FAIL), ScriptCell("good", FINISH)]
    with pytest.raises(CellFailedError, match=r"1 of 2 .*cell bad .*status 1: error: no such luck.*log\.txt"):
        run_cells("cells", cells, tmp_path, workers=2, environment={"SHARE": "one core"})
    log = tmp_path / "good" / "log.txt"
    assert log.read_text() == "one core\n"
    run_cells("cells", cells[1:], tmp_path, workers=2)
    assert log.read_text() == "one core\n"


def test_a_request_to_stop_reaches_the_processes_which_save_their_work(tmp_path):
    waiting, later = ScriptCell("waiting", WAIT), ScriptCell("later", FINISH)
    with CellPool(tmp_path, 1) as pool:  # left as by the exception of a signal
        pool.each(pool.run, [waiting, later])
        while not (waiting.folder(tmp_path) / "started").exists():
            time.sleep(0.01)
    assert (waiting.folder(tmp_path) / "saved").exists()
    assert not (later.folder(tmp_path) / RESULTS_FILE).exists()


def test_processes_that_take_too_long_or_crash_are_killed_and_described(tmp_path):
    with CellPool(tmp_path, 1, seconds=0.5) as pool:
        assert "no end after 0.5 s" in pool.run(ScriptCell("endless", "import time; time.sleep(60)"))
    with CellPool(tmp_path, 1) as pool:
        assert "status -6: no output" in pool.run(ScriptCell("crash", "os.abort()"))
    assert "was not started" in pool.run(ScriptCell("late", ""))
