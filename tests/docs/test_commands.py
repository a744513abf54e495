"""Every command of the documentation is parsed by the program that it starts; nothing is run."""

import argparse
import functools
import re
import runpy
import shlex
import sys
import tomllib

import pytest
import tyro

from tests.docs.pages import PAGES, ROOT, blocks, inline_code

START = re.compile(r"(?:XLA_\w+=\S+ )?(?:\.venv/bin/)?(?:python|pip|make) ")


def commands(page: str) -> list[str]:
    """The lines of blocks without a language that are commands, and such inline code.

    Inline code may name a script without its required flags: that one is asked for its help.
    """
    lines = [line for block in blocks(page) if not block.language for line in block.code.splitlines()]
    for code in inline_code(page):
        flags = "pytest" in code or " -" in code.replace(" -m ", " ")
        lines.append(code if flags or not code.startswith(("python", ".venv")) else f"{code} --help")
    return [line.removeprefix("$ ") for line in lines if START.match(line.removeprefix("$ "))]


COMMANDS = sorted({command for page in PAGES for command in commands(page)})


def check_pip(arguments: str) -> None:
    extras = re.fullmatch(r"install (?:-c constraints\.txt )?(?:-e )?\.(?:\[(.+)\])?", arguments)
    assert extras is not None
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set((extras[1] or "").split(",")) <= {"", *known}


def start_python(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts the script as ``__main__``; tyro or argparse parses its flags, as patched, and calls nothing."""
    as_module = arguments[0] == "-m"
    target, *flags = arguments[as_module:]
    monkeypatch.setattr(sys, "argv", [target, *flags])
    if as_module:
        started = f"{target}.__main__" if (ROOT / target.replace(".", "/")).is_dir() else target
        monkeypatch.delitem(sys.modules, started, raising=False)  # runpy warns where a test has imported it
        runpy.run_module(target, run_name="__main__")
    else:
        runpy.run_path(str(ROOT / target), run_name="__main__")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood(command, monkeypatch, capsys):
    real, real_argparse, parsed = tyro.cli, argparse.ArgumentParser.parse_args, []

    def parse_only(main, **options):
        parsed.append(main)
        real(functools.wraps(main)(lambda *_, **__: None), **options)

    def parse_and_exit(parser, arguments=None):
        parsed.append(parser)
        real_argparse(parser, arguments)
        parser.exit()

    monkeypatch.setattr(tyro, "cli", parse_only)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_exit)
    program, *arguments = shlex.split(re.sub(r"^XLA_\w+=\S+ ", "", command), comments=True)
    program = program.removeprefix(".venv/bin/")
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in arguments)
    elif program == "pip":
        check_pip(" ".join(arguments))
    elif arguments[:2] == ["-m", "pytest"]:
        assert arguments[2:4] in ([], ["-m", "slow"])
        assert all((ROOT / tests).exists() for tests in arguments[4:])
    else:
        status = None
        try:
            start_python(arguments, monkeypatch)
        except SystemExit as stopped:
            status = stopped.code
        assert not status, capsys.readouterr().err
        assert len(parsed) == 1


def test_commands_are_found():
    assert len(COMMANDS) > 40
    assert {"make demo", "python evals/line_retrieval.py --ctx 512k"} <= set(COMMANDS)
