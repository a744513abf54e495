"""The table of known bugs: numbers, reasons in their place, and the rows of a file."""

from agentic_ring.results.rows import read_rows
from evals import known_bugs as script
from evals.attention_bugs.cases import KNOWN_BUGS
from evals.speed.attention_benchmark import UnsupportedError
from tests.commands import exit_status


def test_a_cell_is_the_number_or_the_reason(tmp_path, monkeypatch, capsys):
    def refuses(options, arrays):
        raise UnsupportedError("has no argument for padding")

    # What the test of empty rows has compiled.
    monkeypatch.setattr(script, "KNOWN_BUGS", [bug for bug in KNOWN_BUGS if bug.name == "empty rows leak"])
    monkeypatch.setattr(script, "IMPLEMENTATIONS", {"this library": script.ours, "another": refuses})
    monkeypatch.setattr(script, "simulate_cpu_devices", lambda devices: None)  # there are eight already
    assert exit_status(script.main, "--rows-to", tmp_path / "bugs.csv") == 0
    assert "has no argument for padding" in capsys.readouterr().out
    (row,) = read_rows(tmp_path / "bugs.csv")
    assert (row["this library"], row["another"]) == ("0", "has no argument for padding")


def test_the_authors_package_refuses_what_it_has_no_argument_for():
    (bug,) = (bug for bug in KNOWN_BUGS if bug.name == "window ignored")
    assert (
        script.tried(bug, {"ringattention": script.authors})["ringattention"]
        == "has no argument for a window"
    )
