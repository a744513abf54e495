"""The documentation builds without a warning."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="the extra docs is not installed")
def test_the_site_builds_strictly(tmp_path):
    """By the recipe of ``make docs``; pages link to files, so that they open from disk."""
    (tmp_path / "agentic_ring").symlink_to(ROOT / "agentic_ring")
    for folder in ("docs", "experiments/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "mkdocs.yml", "Makefile"):
        shutil.copy(ROOT / page, tmp_path)
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / "bin").symlink_to(Path(sys.executable).parent)
    stamps = [venv / name for name in ("usable", "installed", "installed-docs")]
    for stamp in stamps:
        stamp.touch()
    # Without what an outer `make test` passes on.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "docs", f"VENV={venv}", *(f"--assume-old={stamp}" for stamp in stamps)]
    built = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site/docs/attention.html").exists()
    assert 'href="docs/attention.html"' in (tmp_path / "site/index.html").read_text()
    assert "agentic_ring.attention.padded_length" in (tmp_path / "site/docs/api/attention.html").read_text()
