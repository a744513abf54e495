"""Every number in README comes from the result file that its row names."""

import json
import re

from agentic_ring.results.intervals import CONFIDENCE, mean_interval
from agentic_ring.results.results_file import read_results, short_number
from agentic_ring.results.rows import read_rows
from agentic_ring.token_units import thousands
from experiments.paper import tables
from tests.docs.pages import ROOT, blocks, prose

RESULTS = ROOT / "experiments/results"
NO_MEASUREMENT = (
    r"\]\([^)]*\)|arXiv \d+\.\d+|3\.11 or 3\.12|Table 5|about 1 |512K tokens|Apache-2\.0|trial 1|7B on \S+"
)


def figure(file, name):
    return next(each for each in read_results(RESULTS / file).figures if each.name == name)


def rows(file, **fields):
    return [each for each in read_rows(RESULTS / file) if fields.items() <= each.items()]


def spread(estimate):
    return f"{estimate.value:.0f} ({estimate.low:.0f} to {estimate.high:.0f})"


def spreads(estimates):
    return " / ".join(f"{each.value:.2f} ({each.low:.2f} to {each.high:.2f})" for each in estimates)


def ratio(file, name, unit="", **fields):
    (found,) = rows(file, **fields)
    value, low, high = (float(found[name + end]) for end in ("", "_low", "_high"))
    return f"{value:.2f}{unit} ({low:.2f} to {high:.2f})"


def table5_means(file):
    lines = [re.split(r" ?\| ?", line)[1:-1] for line in (RESULTS / file).read_text().splitlines()]
    means = {
        line[0]: dict(zip(lines[2], line, strict=True))
        for line in lines
        if line[:1] in (["IQM"], ["average"])
    }
    for row in means.values():
        assert max([*row][1:], key=lambda name: float(row[name].split()[0])) == "TD3"
    return "; ".join(f"{means[kind]['AT ring, 4']} / {means[kind]['TD3']}" for kind in ("IQM", "average"))


def last_trials(file):
    found = [figure(file, f"return/n{n}/last16") for n in (128, 32, 4)]
    scale = [f"{figure(file, f'return/{name}').value:.2f}" for name in ("random", "oracle")]
    return f"{spreads(found)}; {' / '.join(scale)}"


def told_levels(file):
    return spreads([figure(file, f"target/mean with {which}") for which in ("128", "none")])


def growth(file):
    names = "mean with 128", "128 trajectories minus 32", "32 trajectories minus 4"
    return spreads([figure(file, f"target/{name}") for name in names])


def long_context(file, tokens):
    returns = [float(row["return"]) for row in rows(file, tokens=tokens)]
    return spread(mean_interval(returns, "environments"))


def contexts(machine, of=""):
    (found,) = rows("table3.csv", machine=machine, model="7B")
    return " / ".join(thousands(int(found[of + method])) for method in ("ring", "blockwise"))


def attention_speed(file):
    (found,) = rows(file, contender="ours ring", direction="forward+backward", tokens="32768")
    return f"{1 / float(found['ratio_to_ringattention']):.2f}x"


def retrieval(file):
    ((short,), (long,)) = (rows(file, Tasks=f"lines_{length}", Nulls="0/50") for length in ("64k", "512k"))
    return f"{float(short['Score']) / 2:.0f} / {float(long['Score']) / 2:.0f} of 50"


ROWS = {
    "walker_run, never trained on": (
        "told/walker_run.json",
        lambda file: " / ".join(spread(figure(file, f"return/n{n}")) for n in (128, 0)),
    ),
    "four tasks of walker": ("told_verdict-walker/results.json", told_levels),
    "24 hidden goals of the maze": ("told_verdict-point_mass_maze/results.json", growth),
    "walker_run alone": ("walker_run-demo.json", lambda file: spread(figure(file, "return/last_trial"))),
    "Table 5 at demo size": ("table5_demo.md", table5_means),
    "unseen hidden tasks": ("in_context-point_mass-full/results.json", last_trials),
    "512,000 tokens in context": (
        "context_length_walker_run_512k.csv",
        lambda file: "; ".join(long_context(file, tokens) for tokens in ("512000", "16000")),
    ),
    "maximum context, 7B on 8xA100: ": ("table3.csv", lambda _: contexts("8xA100")),
    "maximum context, 7B on TPUv4-1024: ": ("table3.csv", lambda _: contexts("TPUv4-1024")),
    "step time of a ring of 2": (
        "table4_measured_cpu.csv",
        lambda file: ratio(file, "over_blockwise_rate", method="ring", ring="2"),
    ),
    "attention, 32768 tokens": ("attention_speed_cpu.csv", attention_speed),
    "LLaMA prefill of 16K tokens": (
        "text_speed.csv",
        lambda file: ratio(file, "ratio", "x", phase="prefill", tokens="16384"),
    ),
    "line retrieval, embedded retriever": ("line_retrieval_embedded.csv", retrieval),
}
"""Beginnings of the labels, with the file of each number and how it is formatted."""


def test_each_row_has_the_number_of_its_file():
    lines = [line.split("|")[1:-1] for line in prose("README.md").splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(ROWS)
    for begin, (file, value) in ROWS.items():
        ((label, *cells),) = (line for line in lines if line[0].strip().startswith(begin.strip()))
        here, paper, details = (cell.strip() for cell in cells)
        assert here == value(file), begin
        assert f"](experiments/results/{file})" in details
        if "7B on" in label:
            assert paper == contexts(re.search(r"7B on (\S+):", label)[1], "paper ")
        elif "line retrieval" in label:
            curves = tables()["figure3_line_retrieval"]["read_off_the_plot"]
            assert curves["Ring Attention-13B (512K)"].startswith(paper)
        else:
            assert not re.search(r"\d", re.sub(NO_MEASUREMENT, "", paper + " "))


def test_what_the_demo_prints():
    (shown,) = (block.code for block in blocks("README.md") if "return/" in block.code)
    for line in shown.splitlines():
        name, value, *interval = line.split()
        found = figure("told/walker_run.json", name)
        bounds = [] if found.low is None else [short_number(found.low), "to", short_number(found.high)]
        assert [value, *interval] == [short_number(found.value), *bounds]


def test_no_other_number_is_quoted():
    demo = json.loads((RESULTS / "told/walker_run.json").read_text())
    rest = " ".join(line for line in prose("README.md").splitlines() if not line.startswith("|"))
    for stated in (
        f"{sum(demo['wall_seconds'].values()) / 60:.0f} minutes on {demo['hardware']['cores']} CPU cores",
        f"{100 * CONFIDENCE:.0f}% intervals over {demo['config']['evaluation']['environments']} environments",
        f"Measured on {demo['hardware']['cores']} CPU cores",
    ):
        assert stated in rest, stated
        rest = rest.replace(stated, "")
    assert not re.findall(r"\S*\d\S*", re.sub(NO_MEASUREMENT, "", rest))
