"""Progress is one live table on a terminal and plain lines elsewhere; nothing else is said."""

import os
import pty
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

from agentic_ring.terminal.progress import progress
from tests.commands import run_python

JOB = """
import sys
from agentic_ring.terminal.progress import live_table, progress, say

with live_table():
    with progress("collecting", 2) as advance:
        advance(1, "rnd", last_return=12.5)
        say("a line of its own")
        advance(2, "[/rnd]")
    with progress("training", 4) as advance, progress("rolling out", 2) as inner:
        inner(2, "trial 2", last_return=230.46)
        for step in range(1, 5):
            advance(step, "50 tokens/s", loss=0.5 / step)
print("the end", file=sys.stderr)
"""
PLAIN = {"CI", "NO_COLOR", "JAX_PLATFORMS", "MUJOCO_GL", "DISPLAY"}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in PLAIN}
ENVIRONMENT |= {"JAX_PLATFORMS": "cpu", "TERM": "xterm", "COLUMNS": "140"}


def on_a_terminal(code: str) -> str:
    """What a program prints on a terminal, with its control sequences."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT) as process:
        os.close(theirs)
        printed = b""
        try:
            while some := os.read(ours, 65536):
                printed += some
        except OSError:  # Linux's end of a terminal
            pass
        os.close(ours)
    assert process.returncode == 0, printed.decode()
    return printed.decode().replace("\r", "")


def test_a_terminal_shows_one_table():
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_a_terminal(JOB))
    before, last = printed[: printed.rindex("stage ")], printed[printed.rindex("stage ") :]
    header, *rows = [" ".join(line.split()) for line in last.splitlines() if line.strip()]
    assert header == "stage done rate time left loss last return"
    assert rows.pop() == "the end"
    shown = ("collecting 2/2", "12.5 [/rnd]"), ("training 4/4", "0.1250 50 tokens/s")  # brackets: no markup
    for row, (start, end) in zip(rows, (*shown, ("rolling out 2/2", "230.5 trial 2")), strict=True):
        assert row.startswith(f"{start} ")
        assert row.endswith(f" {end}")
    assert "a line of its own" in before


def test_who_wants_plain_text_gets_lines():
    """On a terminal, too, if NO_COLOR or CI is set, or TERM is dumb."""
    wishes = [{"NO_COLOR": "1"}, {"CI": "true"}, {"TERM": "dumb"}]
    job = f"import os\nfor wish in {wishes}:\n    os.environ |= wish\n" + textwrap.indent(JOB, "    ")
    printed = on_a_terminal(f"{job}\n    for name in wish:\n        del os.environ[name]\n")
    said = ["a line of its own", "collecting 2/2", "rolling out 2/2", "training 4/4", "the end"]
    lines = printed.splitlines()
    assert [line.split(", ")[0] for line in lines] == said * len(wishes)
    assert all(line.endswith("s left  loss 0.1250, 50 tokens/s") for line in lines[3::5])
    assert all(line.endswith("s left  return 230.5, trial 2") for line in lines[2::5])


def test_a_continued_job_has_as_much_time_left_as_it_needs_itself(monkeypatch, capsys):
    times = iter([0.0, 20.0])
    monkeypatch.setattr("agentic_ring.terminal.progress.time", SimpleNamespace(monotonic=lambda: next(times)))
    with progress("training", 1000, finished=900) as advance:
        advance(910)
    assert capsys.readouterr().err == "training 910/1000, 20 s, 180 s left\n"


def test_help_has_colours_unless_no_color_is_set():
    help_twice = """
import contextlib, os
from agentic_ring.terminal import cli
for os.environ["NO_COLOR"] in ("", "1"):
    with contextlib.suppress(SystemExit):
        cli.run(lambda: None, args=["--help"])
"""
    _, coloured, plain = on_a_terminal(help_twice).split("usage")
    assert "\x1b[" in coloured
    assert "\x1b" not in plain


def test_environments_load_without_a_word():
    code = """
import data_prep.relabel, agentic_ring.data.own_tasks.walker
from agentic_ring.data.domains import load_environment, parse_task
load_environment(parse_task("cheetah_run"), 0).reset()
"""
    ended = run_python("-c", code, env=ENVIRONMENT)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
