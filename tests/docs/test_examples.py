"""Every Python block of the documentation runs as it stands; the blocks of a page share their names."""

import re

import jax
import numpy as np
import pytest

from agentic_ring.__main__ import main
from tests.commands import exit_status
from tests.docs.pages import PAGES, blocks
from tests.models.tiny_llama import write_tiny_model

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_the_python_blocks_run(page, tmp_path, monkeypatch):
    """``FOLDER`` is a small LLaMA with its tokenizer."""
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "FOLDER", 4096)
    namespace: dict = {}
    for block in blocks(page):
        if block.language == "python":
            code = "\n" * (block.line - 1) + block.code  # a traceback then names the page's own line
            exec(compile(code, page, "exec"), namespace)
    arrays = [namespace[name] for name in ("output", "sharded", "inside") if name in namespace]
    for array in arrays:  # README and the page on attention say that these are the same
        np.testing.assert_allclose(jax.device_get(array), jax.device_get(arrays[0]), atol=2e-5)


def test_every_block_names_a_known_language():
    for page in PAGES:
        assert {block.language for block in blocks(page)} <= {"", "python"}


def test_the_explained_choice_is_what_the_command_prints(capsys):
    (shown,) = (block.code for block in blocks("docs/attention.md") if block.code.startswith("$ "))
    command, *lines = shown.splitlines()
    assert exit_status(main, *command.removeprefix("$ python -m agentic_ring ").split()) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    for line in lines:
        if line != "..." and not re.match("Python|host", line):
            assert line in printed, line  # in this order
