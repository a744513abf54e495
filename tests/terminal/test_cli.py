"""One message and an exit status for what a user can act on; a traceback for what is our own fault."""

import errno
import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from agentic_ring import errors
from agentic_ring.terminal import cli
from tests.commands import exit_status


def raises(error: BaseException):
    def main() -> None:
        raise error

    return main


def test_each_user_error_is_one_message_and_status_1(capsys):
    names = {errors.UnknownNameError: ("task", "walker_fly", ("walker_run", "walker_walk"))}
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.AgenticRingError):
            error = kind(*names.get(kind, ("bad value 3; expected 4",)))
            assert exit_status(raises(error)) == kind.exit_status == 1
            assert capsys.readouterr() == ("", f"error: {error}\n")
            assert kind not in names or re.search("walker_fly.*walker_run, walker_walk", str(error))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's always-full device")
def test_a_full_disk_is_one_message_with_the_file_where_it_is_known(capsys):
    assert exit_status(lambda: print(Path("/dev/full").write_text("anything"))) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: no space left on the disk")
    assert message.count("\n") == 1
    assert exit_status(raises(OSError(errno.ENOSPC, "No space left on device", "data/walker-mix.h5"))) == 1
    assert "data/walker-mix.h5" in capsys.readouterr().err


def test_other_errors_keep_their_traceback():
    with pytest.raises(FileNotFoundError):
        cli.run(raises(FileNotFoundError()), args=[])


def test_a_status_is_returned_and_an_interrupt_and_a_wrong_flag_say_how_to_go_on(capsys):
    assert exit_status(lambda: 3) == 3
    assert exit_status(raises(KeyboardInterrupt())) == errors.EXIT_STOPPED == 75
    assert "run the same command again" in capsys.readouterr().err
    assert exit_status(explore, "--sze", "2") == 2
    assert "--size" in capsys.readouterr().err


@dataclass(frozen=True)
class Settings:
    """Settings of an exploration.

    Attributes:
      episodes: Number of episodes, each of which lasts as many control steps as its domain says, such as
        1000 of them.
    """

    episodes: int = 1


def explore(config: Annotated[Settings, tyro.conf.arg(name="")], size: int = 0) -> None:
    """Explores a domain.

    * ExoRL's
    * Minari's

    Args:
      size: Size of the run: demo (a laptop), small (one accelerator) or paper (350M parameters,
        512K tokens). It must be one of these three.
    """
    del config, size


def test_help_breaks_lines_where_the_terminal_ends_and_not_where_the_docstring_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for _ in range(2):  # a second time changes nothing
        assert exit_status(explore, "--help") == 0
    shown = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    for docstring in (explore.__doc__, Settings.__doc__):
        (flag,) = [line.split(": ", 1)[1] for line in str(docstring).splitlines() if line.startswith("  ")]
        assert flag in " ".join(shown)
    assert any("(350M parameters, 512K tokens)." in line for line in shown)
    assert {"* ExoRL's", "* Minari's", "Explores a domain."} <= set(shown)


@pytest.mark.parametrize(("arguments", "status"), [("--help", 141), ("--shape 1,2", 2)])
def test_a_reader_that_leaves_is_no_error(arguments, status):
    command = [sys.executable, "-m", "agentic_ring", *arguments.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, printed = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Broken" not in printed
    assert bool(printed) == (status == 2)
