"""What a run records of itself, and how it writes and reads numbers of tokens."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentic_ring.errors import ArgumentError
from agentic_ring.provenance import SOURCE, command_line, git_commit
from agentic_ring.token_units import parse_tokens, short_tokens, thousands


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_of_a_checkout(tmp_path, monkeypatch):
    checkout = tmp_path
    git(checkout, "init", "--quiet")
    (checkout / "tracked.txt").write_text("1")
    git(checkout, "add", "tracked.txt")
    git(checkout, "commit", "--quiet", "-m", "first")
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "untracked.txt").write_text("a run's output")
    assert git_commit(checkout) == head
    (checkout / "tracked.txt").write_text("2")
    assert git_commit(checkout) == f"{head}-dirty"
    inside = checkout / ".venv" / "site-packages"  # another project's
    inside.mkdir(parents=True)
    assert git_commit(inside) is None
    assert git_commit(checkout / "nonexistent") is None
    monkeypatch.setenv("PATH", "")
    assert git_commit(checkout) is None


def test_command_can_be_pasted_into_a_shell(monkeypatch):
    script, folder = str(SOURCE / "evals/report.py"), str(SOURCE / "runs")
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python3", script, "--note", "two words", "--in", folder])
    assert command_line() == "python evals/report.py --note 'two words' --in runs"


def test_tokens_are_read_and_written_as_short_as_can_be():
    for text, tokens, short in (("4096", 4096, "4k"), ("2048K", 2**21, "2m"), ("500000", 500_000, "500000")):
        assert parse_tokens(text) == tokens
        assert short_tokens(tokens) == short
    assert (thousands(2**20), thousands(5000)) == ("1024K", "5000")
    for text in ("", "k", "2g", "-1k", "0", "1.5k"):
        with pytest.raises(ArgumentError, match=repr(text)):
            parse_tokens(text)
