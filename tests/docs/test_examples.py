"""Every Python block and every notebook of the documentation runs as it stands.

The blocks of a page share their names.
"""

import copy
import os
import re

import jax
import nbclient
import nbformat
import numpy as np
import pytest

from agentic_ring.__main__ import main
from tests.commands import exit_status
from tests.docs.pages import NOTEBOOKS, PAGES, ROOT, blocks
from tests.models.tiny_llama import write_tiny_model

LANGUAGES = {page: {block.language for block in blocks(page)} for page in PAGES}
SLOW = {"docs/llama.md"}  # compiles three engines; tests/inference calls the same functions
TRAINS = {"docs/notebooks/in_context_agent.ipynb"}  # for a minute, and for two without XLA's optimisations


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else [])
        for page in PAGES
        if "python" in LANGUAGES[page]
    ],
)
def test_the_python_blocks_run(page, tmp_path, monkeypatch):
    """``FOLDER`` is a small LLaMA with its tokenizer."""
    monkeypatch.chdir(tmp_path)
    assert set().union(*LANGUAGES.values()) == {"", "python"}
    python = [block for block in blocks(page) if block.language == "python"]
    if any("FOLDER" in block.code for block in python):
        write_tiny_model(tmp_path / "FOLDER", 4096)
    namespace: dict = {}
    for block in python:
        code = "\n" * (block.line - 1) + block.code  # a traceback then names the page's own line
        exec(compile(code, page, "exec"), namespace)
    arrays = [namespace[name] for name in ("output", "sharded", "inside") if name in namespace]
    for array in arrays:  # README and the page on attention say that these are the same
        np.testing.assert_allclose(jax.device_get(array), jax.device_get(arrays[0]), atol=2e-5)


def test_the_explained_choice_is_what_the_command_prints(capsys):
    (shown,) = (block.code for block in blocks("docs/attention.md") if block.code.startswith("$ "))
    command, *lines = shown.splitlines()
    assert exit_status(main, *command.removeprefix("$ python -m agentic_ring ").split()) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    for line in lines:
        if line != "..." and not re.match("Python|host", line):
            assert line in printed, line  # in this order


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """The words that each cell prints, without numbers, which differ from one machine to the next."""
    texts = ("".join(output.get("text", "") for output in cell.outputs) for cell in code_cells(notebook))
    return [re.sub(r"[\d.,]+", "#", text).split() for text in texts]


def test_committed_notebooks_have_run_once_from_the_top():
    for name in NOTEBOOKS:
        cells = code_cells(nbformat.read(ROOT / name, 4))
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), name
        assert (ROOT / name).stat().st_size < 200_000


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_runs_and_prints_what_it_shows(name, tmp_path):
    shown = nbformat.read(ROOT / name, 4)
    again = copy.deepcopy(shown)
    client = nbclient.NotebookClient(again, timeout=900, resources={"metadata": {"path": tmp_path}})
    client.execute(env=os.environ | ({"XLA_FLAGS": ""} if name in TRAINS else {}))
    assert printed(again) == printed(shown)
