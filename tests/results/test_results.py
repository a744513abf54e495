import json
import math
import re
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from agentic_ring.errors import ArgumentError, DataError
from agentic_ring.results.intervals import mean_interval
from agentic_ring.results.results_file import Figure, Results, figure_table, read_results, write_results

CONFIG = {"task": "walker_run", "seed": 0, "model": {"layers": 3}}
FIGURES = (
    Figure.from_interval("return/last_trial", mean_interval([60.0, 70.0, 95.0]), "return", paper=110.3),
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
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ({"value": math.nan}, "value of figure 'loss' is nan"),
        ({"low": math.nan}, "low of figure 'loss' is nan"),
        ({"high": math.inf}, "high of figure 'loss' is inf"),
        ({"paper": math.inf}, "paper of figure 'loss' is inf"),
        ({"low": None}, "low None, high 2.0"),
        ({"high": None}, "low 0.0, high None"),
        ({"low": 3.0}, "low 3.0, high 2.0"),
    ],
)
def test_a_figure_is_finite_with_two_bounds_in_order_or_none(numbers, named):
    with pytest.raises(ArgumentError, match=named):
        Figure("loss", unit="nats", **({"value": 1.0, "low": 0.0, "high": 2.0, "paper": 1.0} | numbers))


@pytest.mark.parametrize("bad", [math.nan, math.inf, {1, 2}])
def test_what_json_cannot_hold_leaves_the_old_file(tmp_path, bad):
    path = tmp_path / "results.json"
    write_results(path, RESULTS)
    before = path.read_bytes()
    broken = Results(**(vars(RESULTS) | {"config": {"learning_rate": bad}}))
    with pytest.raises(ArgumentError, match="cannot be written as JSON"):
        write_results(path, broken)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_one_name_one_figure(tmp_path):
    twice = Results(**(vars(RESULTS) | {"figures": FIGURES + FIGURES[:1]}))
    with pytest.raises(ArgumentError, match="more than once: return/last_trial"):
        write_results(tmp_path / "results.json", twice)
    with pytest.raises(ArgumentError, match=r"'return/first'.*return/last_trial"):
        RESULTS.figure("return/first")
    assert RESULTS.figure("loss/final") is FIGURES[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ('{"command": "python', "is not JSON"),
        ("[]", "its content = \\[\\]"),
        ('{"command": "python x.py"}', "has no commit"),
        ({"command": "python y.py"}, "was changed after it was written"),
        ({"figures": [{"name": "loss"}], "digest": ""}, r"figures\.0\.value"),
        ({"figures": [asdict(FIGURES[1]) | {"mean": 1}], "digest": ""}, r"figures\.0\.mean"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, message):
    path = tmp_path / "results.json"
    if isinstance(content, dict):
        write_results(path, RESULTS)
        fields = json.loads(path.read_text()) | content
        content = json.dumps({name: value for name, value in fields.items() if value != ""})
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        read_results(path)
    assert str(path) in str(caught.value)


def printed_table(figures: tuple[Figure, ...]) -> str:
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(figure_table(figures, "walker_run on one CPU"))
    return captured.get()


def test_the_table_shows_ours_and_the_papers_on_a_plain_terminal():
    printed = printed_table(FIGURES)
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]
    assert rows[0] == ["walker_run on one CPU"]
    low, high = FIGURES[0].low, FIGURES[0].high
    assert rows[3] == ["return/last_trial", "75", f"{low:.4g} to {high:.4g}", "3", "return", "110.3"]
    assert rows[4:7] == [["loss/final", "0.01235", "1", "mean"], ["squared"], ["error"]]
    assert rows[7] == ["bytes_per_device", "123,456,789", "1", "bytes"]
    assert "None" not in printed


def test_a_long_name_cuts_no_number():
    name = "return/control/no_context/trial_4"
    figure = replace(FIGURES[0], name=name, value=-0.01234, low=-0.05678, high=-0.01111, n=12_345)
    printed = printed_table((*FIGURES, figure))
    assert "…" not in printed
    assert "-0.01234  -0.05678 to -0.01111  12345  return    110.3" in printed
