import json
import math
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from agentic_ring.errors import ArgumentError, DataError
from agentic_ring.results.intervals import mean_interval
from agentic_ring.results.results_file import Figure, Results, figure_table, read_results, write_results

CONFIG = {"task": "walker_run", "seed": 0, "model": {"layers": 3}}
FIGURES = (
    Figure.from_interval(
        "return/last_trial", mean_interval([60.0, 70.0, 95.0], "environments"), "return", paper=110.3
    ),
    Figure("loss/final", 0.0123456, "mean squared error"),
    Figure("bytes_per_device", 123_456_789, "bytes"),
)
RESULTS = Results.of_this_process(CONFIG, {"train": 12.5}, FIGURES)


def test_the_file_is_the_contract_and_reads_back(tmp_path):
    path = tmp_path / "run" / "results.json"
    write_results(path, RESULTS)
    content = json.loads(path.read_text())
    assert list(content) == [
        "command", "commit", "hardware", "versions", "config", "wall_seconds", "figures", "digest",
    ]  # fmt: skip
    assert content["hardware"]["devices"] == 8
    assert "jax" in content["versions"]
    assert content["figures"][0] == asdict(FIGURES[0])
    assert read_results(path) == RESULTS
    with pytest.raises(ArgumentError, match=r"'return/first'.*return/last_trial"):
        RESULTS.figure("return/first")
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ({"value": math.nan}, "value of figure 'loss' is nan"),
        ({"paper": math.inf}, "paper of figure 'loss' is inf"),
        ({"low": None}, "low None, high 2.0"),
        ({"low": 3.0}, "low 3.0, high 2.0"),
    ],
)
def test_a_figure_is_finite_with_two_bounds_in_order_or_none(numbers, named):
    with pytest.raises(ArgumentError, match=named):
        Figure("loss", unit="nats", **({"value": 1.0, "low": 0.0, "high": 2.0, "paper": 1.0} | numbers))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"config": {"learning_rate": math.nan}}, "cannot be written as JSON"),
        ({"config": {"layers": {1, 2}}}, "cannot be written as JSON"),
        ({"figures": FIGURES + FIGURES[:1]}, "more than once: return/last_trial"),
    ],
)
def test_what_the_file_cannot_hold_leaves_the_old_one(tmp_path, changed, message):
    path = tmp_path / "results.json"
    write_results(path, RESULTS)
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match=message):
        write_results(path, replace(RESULTS, **changed))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ('{"command": "python', "is not JSON"),
        ("[]", "its content = \\[\\]"),
        ('{"command": "python x.py"}', "has no commit"),
        (json.dumps(asdict(RESULTS) | {"figures": [{"name": "loss"}]}), r"figures\.0\.value"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, message):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_results(path)
    assert str(path) in str(caught.value)


def test_the_table_shows_ours_and_the_papers_and_cuts_no_number():
    spread = {"value": -0.01234, "low": -0.05678, "high": -0.01111, "n": 12_345}
    long = replace(FIGURES[0], name="return/control/no_context/trial_4", **spread)
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        console.print(figure_table((*FIGURES, long), "walker_run on one CPU"))
    printed = " ".join(captured.get().split())
    low, high = FIGURES[0].low, FIGURES[0].high
    assert printed.startswith("walker_run on one CPU figure value")
    assert f" return/last_trial 75 {low:.4g} to {high:.4g} 3 return 110.3 " in printed
    assert " loss/final 0.01235 1 mean squared error bytes_per_device 123,456,789 1 bytes " in printed
    assert " -0.01234 -0.05678 to -0.01111 12345 return 110.3" in printed
    assert printed.endswith("intervals are over environments")
    assert "…" not in printed
