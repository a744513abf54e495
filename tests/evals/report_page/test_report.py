"""The page of a real run: its content, what is left out and why, and how a browser shows it."""

import json
import os
import re
import shutil
import subprocess
from ctypes.util import find_library
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agentic_ring.errors import ConfigError, DataError
from agentic_ring.results.results_file import Figure, Results, read_results, short_number, write_results
from evals import report
from evals.report import page
from evals.report_page import filmstrip
from evals.report_page.charts import curve_label, loss_chart, trial_curves
from evals.report_page.run_data import ReportedRun, read_run
from evals.report_page.run_data import filmstrip as film_of
from tests.commands import exit_status

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "link", "img", "wbr"}


class Page(HTMLParser):
    """Checks that tags are nested and nothing is loaded from elsewhere; collects text and elements."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(html)
        assert self.open == []
        self.words = re.sub(r"\s+", " ", "".join(self.text))
        assert not {tag for tag, _ in self.elements} & {"script", "iframe", "object", "base"}
        for tag, attrs in self.elements:
            for name in ("src", "href", "xlink:href"):
                address = attrs.get(name, "")
                assert not address or address.startswith(("#", "data:")), (tag, address)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def tagged(self, tag: str) -> list[dict[str, str]]:
        return [attrs for each, attrs in self.elements if each == tag]


@pytest.fixture(scope="module")
def reported(small_run) -> ReportedRun:
    """Without pictures: the tests' MuJoCo has no graphics."""
    return read_run(small_run.directory, small_run.directory.name)


@pytest.fixture
def controls(tmp_path, small_run) -> Path:
    """A folder with nothing but results, those of an evaluation with controls."""
    results = read_results(small_run.directory / "results.json")
    figures = [
        Figure(f"return/control/{control}/trial_{trial}", 10.0 * trial, "return", 9.0, 90.0, n=32)
        for control in ("shuffled", "other_task", "zero_rewards", "descending")
        for trial in (1, 2, 3)
    ]
    directory = tmp_path / ("long_name_" * 8)
    config = {**results.config, "training": {"seed": 7}}
    changed = replace(results, config=config, figures=(*results.figures, *figures))
    write_results(directory / "results.json", changed)
    return directory


def test_it_stands_alone_holds_every_figure_and_says_what_is_missing(reported):
    html = page([reported])
    parsed = Page(html)
    assert not re.search(r"url\((?!#)", html)
    ids = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    results = reported.results
    for figure in results.figures:
        assert figure.name in parsed.words
        assert short_number(figure.value) in parsed.words
    last = results.figure("return/last_trial")
    charts = parsed.tagged("svg")
    assert len(charts) == 5  # trials, data, loss, and two of attention
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in charts)
    assert f"{last.value:.4g}" in charts[0]["aria-label"]
    shown = (
        f"{last.low:.4g} to {last.high:.4g}",
        "123.5",
        results.command,
        results.commit,
        "td3 (8)",
        "layer 2",
    )
    for text in (*shown, "MuJoCo cannot render on this machine (MUJOCO_GL=disabled"):
        assert text in parsed.words
    assert list(reported.missing) == ["film"]
    assert not parsed.tagged("img")
    # The name of a run cannot break the page.
    assert "small &lt;run&gt; &amp; co" in html
    assert "<run>" not in html


@pytest.mark.skipif(find_library("OSMesa") is None, reason="MuJoCo needs OSMesa to draw in software")
def test_the_first_and_the_last_trial_are_drawn(small_run, reported, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    run = replace(reported, film=film_of(small_run.config, reported.record.rollout), missing={})
    pictures = Page(page([run])).tagged("img")
    assert len(pictures) == 16
    ends = ["Trial 1 after 0.0 seconds", "Trial 3 after 10.0 seconds"]
    assert [pictures[0]["alt"], pictures[-1]["alt"]] == ends
    for strip in run.film:
        earned = small_run.report.trials[0, strip.trial - 1]
        assert strip.frames[-1].earned == pytest.approx(earned, rel=1e-5)


def test_controls_and_settings_stand_side_by_side(reported, controls):
    parsed = Page(page([reported, read_run(controls, controls.name)]))
    drawn = [attrs["aria-label"] for attrs in parsed.tagged("svg")]
    assert sum("control: other task: 10, 20, 30" in label for label in drawn) == 1
    for text in ("return/control/shuffled/trial_3", "training.seed", "evaluation.npz does not exist"):
        assert text in parsed.words


def test_seven_arms_have_seven_colours():
    losses = {f"arm {number}": [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}] for number in range(7)}
    drawn = loss_chart(losses)
    assert drawn is not None
    colours = set(re.findall(r"stroke: (var\(--[a-z]+\)|#[0-9a-f]+)", drawn)) - {"var(--ink)"}
    assert len(colours) == 7
    assert all(colour.startswith("var") for colour in colours)


def test_curves_are_found_by_their_names():
    names = [
        "return/control/b/trial_2",
        "return/trial_10",
        "return/trial_2",
        "loss/final",
        "return/last_trial",
    ]
    curves = trial_curves([Figure(name, 1.0, "return") for name in names])
    assert list(curves) == ["return", "return/control/b"]
    assert [number for number, _ in curves["return"]] == [2, 10]
    assert curve_label("return/control/no_context") == "control: no context"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (None, "results.json does not exist"),
        ("{", "is not JSON"),
        ('{"accuracy": 1}', "has no command"),
        ("hardware", "hardware = 'a laptop'"),
    ],
)
def test_what_is_no_run_is_named(tmp_path, small_run, damage, message):
    if damage == "hardware":
        content = json.loads((small_run.directory / "results.json").read_text())
        del content["digest"]
        damage = json.dumps(content | {"hardware": "a laptop"})
    if damage is not None:
        (tmp_path / "results.json").write_text(damage)
    with pytest.raises(DataError, match=message):
        read_run(tmp_path, tmp_path.name)


def test_without_checkpoint_metrics_and_graphics_the_page_says_so(small_run, tmp_path, monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(filmstrip, "BACKENDS", ())
    copied = tmp_path / "run"
    left_out = shutil.ignore_patterns("checkpoints", "last_checkpoint", "*.jsonl")
    shutil.copytree(small_run.directory, copied, ignore=left_out)
    run = read_run(copied, "copied")
    assert run.attention is None
    words = Page(page([run])).words
    for text in ("has no checkpoint", "metrics.jsonl does not exist", "libosmesa6 to render in software"):
        assert text in words
    assert not (copied / "checkpoints").exists()


def test_results_of_any_other_program_have_a_page(tmp_path):
    figure = Figure("accuracy/16k", 0.75, "share", 0.7, 0.8, n=200)
    write_results(tmp_path / "results.json", Results("python x.py", None, {}, {}, {"task": 3}, {}, (figure,)))
    words = Page(page([read_run(tmp_path, tmp_path.name)])).words
    assert "0.7 to 0.8" in words
    assert "not run from a checkout" in words


def test_the_command_writes_the_page_of_a_run_or_of_several_and_names_mistakes(
    controls, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert exit_status(report.main, controls) == 0
    assert "left out" in capsys.readouterr().err
    Page((controls / "report.html").read_text())
    assert exit_status(report.main, tmp_path / "nothing") == 1
    assert re.fullmatch(r"error: .*nothing/results\.json does not exist; .*\n", capsys.readouterr().err)
    # Several go into this folder, under names that differ.
    same_name = tmp_path / "elsewhere" / controls.name
    shutil.copytree(controls, same_name)
    report.main((controls, same_name))
    words = Page((tmp_path / "report.html").read_text()).words
    assert str(controls) in words
    assert str(same_name) in words
    for runs in ((controls, controls), ()):
        with pytest.raises(ConfigError, match="each run once"):
            report.main(runs)


def in_browser(html: str, folder: Path, width: int = 360) -> tuple[dict, str]:
    """What a real browser finds in a page of this width, and what its console says."""
    probe = (
        "<script>addEventListener('load', () => { const page = document.documentElement;"
        " parent.document.title = JSON.stringify({inner: innerWidth, scroll: page.scrollWidth,"
        " charts: [...document.querySelectorAll('svg.chart')].map(c => c.getBoundingClientRect().width),"
        " small: Math.min(...[...document.querySelectorAll('svg text')]"
        ".map(t => t.getBoundingClientRect().height))}); })</script>"
    )
    framed = escape(html.replace("</body>", probe + "</body>"))
    outer = folder / "framed.html"
    outer.write_text(f'<iframe style="border:0; width:{width}px; height:900px" srcdoc="{framed}"></iframe>')
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command = [CHROMIUM, *flags, "--dump-dom", f"--user-data-dir={folder / 'profile'}", outer.as_uri()]
    home = {**os.environ, "HOME": str(folder)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=home)
    found = re.search(r"<title>(.*?)</title>", ended.stdout, flags=re.DOTALL)
    assert found, ended.stdout[:500]
    console = "\n".join(line for line in ended.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(unescape(found[1])), console


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
def test_a_browser_has_no_complaints_and_a_phone_no_sideways_scrolling(reported, controls, tmp_path):
    several = page([reported, read_run(controls, controls.name)])
    found, console = in_browser(several, tmp_path)
    assert console == ""
    assert (found["inner"], found["scroll"], len(found["charts"])) == (360, 360, 6)
    assert all(280 < width <= 360 for width in found["charts"])
    assert found["small"] >= 7  # pixels of the smallest line of text

    # The probe does see what it looks for.
    wide = several.replace("</main>", '<div style="width:500px">x</div><img src="nowhere.png"></main>')
    found, console = in_browser(wide.replace("</main>", "<script>nothing()</script></main>"), tmp_path)
    assert found["scroll"] >= 500
    assert "nothing is not defined" in console
