"""Every notebook runs as it stands, and shows what it printed."""

import copy
import re

import nbclient
import nbformat
import pytest

from tests.docs.pages import NOTEBOOKS, ROOT

notebooks = pytest.mark.parametrize("path", [ROOT / name for name in NOTEBOOKS], ids=lambda path: path.stem)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell prints, without its numbers, which differ from one machine to the next."""
    return [
        re.sub(r"[\d.,]+", "#", "".join(output.get("text", "") for output in cell.outputs))
        for cell in code_cells(notebook)
    ]


@notebooks
def test_the_committed_notebook_has_run_once_from_the_top(path):
    cells = code_cells(nbformat.read(path, 4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert path.stat().st_size < 200_000


@pytest.mark.slow
@notebooks
def test_the_notebook_runs_and_prints_what_it_shows(path, tmp_path):
    shown = nbformat.read(path, 4)
    again = copy.deepcopy(shown)
    nbclient.NotebookClient(again, timeout=900, resources={"metadata": {"path": tmp_path}}).execute()
    assert [text.split() for text in printed(again)] == [text.split() for text in printed(shown)]
