"""Every number in README comes from the result file that its row names."""

import json
import re
from collections.abc import Callable

import pytest

from agentic_ring.token_units import thousands
from evals.common.intervals import CONFIDENCE, mean_interval
from evals.common.results import Figure, read_results, short_number
from evals.common.rows import read_rows
from tests.docs.pages import ROOT, blocks, prose

RESULTS = ROOT / "experiments/results"


def figure(file: str, name: str) -> Figure:
    return next(each for each in read_results(RESULTS / file).figures if each.name == name)


def row(file: str, **fields: str) -> dict[str, str]:
    (found,) = (
        each for each in read_rows(RESULTS / file) if all(each[key] == value for key, value in fields.items())
    )
    return found


def spread(value: float, low: float, high: float, digits: int = 2, unit: str = "") -> str:
    return f"{value:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


def last_trial(file: str) -> str:
    found = figure(file, "return/last_trial")
    return spread(found.value, found.low, found.high, 0)


def interquartile_means(file: str) -> str:
    table = (RESULTS / file).read_text()
    header, *lines = (
        [cell.strip() for cell in line.split("|")] for line in table.splitlines() if "|" in line
    )
    means = dict(zip(header, next(line for line in lines if line[1] == "IQM"), strict=True))
    best = max((name for name in means if name not in ("", "task")), key=lambda name: float(means[name]))
    assert best == "TD3"
    return f"{means['AT ring, 4']} / {means[best]}"


def hidden_tasks(file: str) -> str:
    return " / ".join(f"{figure(file, f'pooled/online/trial_{trial}').value:.2f}" for trial in (1, 4))


def longest_rollout(file: str) -> str:
    returns = [float(each["return"]) for each in read_rows(RESULTS / file) if each["tokens"] == "512000"]
    found = mean_interval(returns)
    assert found.low is not None
    assert found.high is not None
    return spread(found.value, found.low, found.high, 0)


def contexts(file: str, machine: str, prefix: str = "") -> str:
    found = row(file, machine=machine, model="7B")
    return " / ".join(thousands(int(found[prefix + method])) for method in ("ring", "blockwise"))


def step_time(file: str) -> str:
    found = row(file, method="ring", ring="2")
    name = "over_blockwise_rate"
    return spread(*(float(found[name + end]) for end in ("", "_low", "_high")))


def attention_speed(file: str) -> str:
    found = row(file, contender="ours ring", direction="forward+backward", tokens="32768")
    return f"{1 / float(found['ratio_to_ringattention']):.2f}x"


def prefill(file: str) -> str:
    found = row(file, phase="prefill", tokens="16384")
    return spread(*(float(found["ratio" + end]) for end in ("", "_low", "_high")), unit="x")


def retrieval(file: str) -> str:
    found = [row(file, Tasks=f"lines_{length}") for length in ("64k", "512k")]
    asked = {int(each["Nulls"].split("/")[1]) for each in found}
    assert asked == {50}
    return " / ".join(f"{float(each['Score']) / 100 * 50:.0f}" for each in found) + " of 50"


ROWS: dict[str, tuple[str, Callable[[str], str]]] = {
    "walker_run, return of the last trial": ("walker_run-demo.json", last_trial),
    "Table 5 at demo size, interquartile mean: ring AT / best (TD3)": ("table5_demo.md", interquartile_means),
    "hidden tasks on cheetah, fraction of the target: trial 1 / trial 4": (
        "hidden_cheetah-demo.json",
        hidden_tasks,
    ),
    "512,000 tokens in context, return on walker_run": (
        "context_length_walker_run_512k.csv",
        longest_rollout,
    ),
    "maximum context, 7B on 8xA100: ring / blockwise (compiled)": (
        "table3.csv",
        lambda file: contexts(file, "8xA100"),
    ),
    "maximum context, 7B on TPUv4-1024: ring / blockwise (compiled)": (
        "table3.csv",
        lambda file: contexts(file, "TPUv4-1024"),
    ),
    "step time of a ring of 2 / predicted from blockwise": ("table4_measured_cpu.csv", step_time),
    "attention, 32768 tokens: speed relative to the authors' package": (
        "attention_speed_cpu.csv",
        attention_speed,
    ),
    "LLaMA prefill of 16K tokens, speed relative to `transformers`": ("text_speed.csv", prefill),
    "line retrieval, embedded retriever: right at 64K / 512K tokens": (
        "line_retrieval_embedded.csv",
        retrieval,
    ),
}
PAPER = {
    "maximum context, 7B on 8xA100: ring / blockwise (compiled)": lambda: contexts(
        "table3.csv", "8xA100", "paper "
    ),
    "maximum context, 7B on TPUv4-1024: ring / blockwise (compiled)": lambda: contexts(
        "table3.csv", "TPUv4-1024", "paper "
    ),
    "line retrieval, embedded retriever: right at 64K / 512K tokens": lambda: re.search(
        r"about [\d.]+", (ROOT / "experiments/paper/tables.json").read_text().split("Ring Attention-13B")[1]
    )[0],
}
NO_MEASUREMENT = (
    r"\]\([^)]*\)|arXiv \d+\.\d+|3\.11 or 3\.12|Table 5|about 1 |512K tokens|Apache-2\.0|trial 1|7B on \S+"
)


def cells() -> dict[str, list[str]]:
    """The table of results: label -> the other cells."""
    lines = [line.split("|")[1:-1] for line in prose("README.md").splitlines() if line.startswith("| ")]
    return {label.strip(): [cell.strip() for cell in rest] for label, *rest in lines[1:]}


@pytest.mark.parametrize("label", ROWS)
def test_a_row_has_the_number_of_its_file(label):
    file, value = ROWS[label]
    here, paper, details = cells()[label]
    assert here == value(file)
    assert f"](experiments/results/{file})" in details
    if label in PAPER:
        assert paper == PAPER[label]()
    else:
        assert not re.search(r"\d", re.sub(NO_MEASUREMENT, "", paper + " "))


def test_every_row_is_read():
    assert list(cells()) == list(ROWS)


def test_what_the_demo_prints():
    (shown,) = (block.code for block in blocks("README.md") if "return/" in block.code)
    for line in shown.splitlines():
        name, value, *interval = line.split()
        found = figure("walker_run-demo.json", name)
        bounds = [] if found.low is None else [short_number(found.low), "to", short_number(found.high)]
        assert [value, *interval] == [short_number(found.value), *bounds]


def test_no_other_number_is_quoted():
    demo = json.loads((RESULTS / "walker_run-demo.json").read_text())
    minutes = sum(demo["wall_seconds"].values()) / 60
    stated = (
        f"{minutes:.0f} minutes on {demo['hardware']['cores']} CPU cores",
        f"{100 * CONFIDENCE:.0f}% intervals over {demo['config']['evaluation']['environments']} environments",
        f"Measured on {demo['hardware']['cores']} CPU cores",
    )
    rest = "\n".join(line for line in prose("README.md").splitlines() if not line.startswith("|"))
    rest = rest.replace("\n", " ")
    for each in stated:
        assert each in rest, each
        rest = rest.replace(each, "")
    assert not re.findall(r"\S*\d\S*", re.sub(NO_MEASUREMENT, "", rest))
