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
from evals.report_page.page import page
from evals.report_page.trial_charts import curve_label, trial_curves

from agentic_ring.errors import ConfigError, DataError
from agentic_ring.results.results_file import Figure, Results, read_results, short_number, write_results
from evals import report
from evals.report_page.charts import loss_chart
from evals.report_page.run_data import ReportedRun, filmstrip, read_run
from tests.commands import run_python
from tests.evals.finished_run import FinishedRun

ROOT = Path(__file__).resolve().parents[3]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "link", "img", "wbr"}
CONTROLS = ("shuffled", "other_task", "zero_rewards", "descending")


class Page(HTMLParser):
    """Checks that tags are nested and addresses stay within the page; collects text and elements."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(html)
        assert self.open == []
        self.words = re.sub(r"\s+", " ", "".join(self.text))

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

    def ids(self) -> list[str]:
        return [attrs["id"] for _, attrs in self.elements if "id" in attrs]

    def assert_loads_nothing(self) -> None:
        assert not {tag for tag, _ in self.elements} & {"script", "iframe", "object", "base"}
        for tag, attrs in self.elements:
            for name in ("src", "href", "xlink:href"):
                address = attrs.get(name, "")
                assert not address or address.startswith(("#", "data:")), (tag, address)


@pytest.fixture(scope="module")
def reported(small_run: FinishedRun) -> ReportedRun:
    """Without pictures: the tests' MuJoCo has no graphics."""
    return read_run(small_run.directory, small_run.directory.name)


@pytest.fixture(scope="module")
def html(reported) -> str:
    return page([reported])


@pytest.fixture
def controls(tmp_path, small_run) -> Path:
    """A folder with nothing but results, those of an evaluation with controls."""
    results = read_results(small_run.directory / "results.json")
    figures = [
        Figure(f"return/control/{control}/trial_{trial}", 10.0 * trial, "return", 9.0, 90.0, n=32)
        for control in CONTROLS
        for trial in (1, 2, 3)
    ]
    directory = tmp_path / ("long_name_" * 8)
    config = {**results.config, "training": {"seed": 7}}
    write_results(
        directory / "results.json",
        replace(results, config=config, figures=(*results.figures, *figures)),
    )
    return directory


def test_it_stands_alone_and_holds_every_figure(html, small_run):
    parsed = Page(html)
    parsed.assert_loads_nothing()
    assert not re.search(r"url\((?!#)", html)
    assert len(parsed.ids()) == len(set(parsed.ids()))
    results = read_results(small_run.directory / "results.json")
    for figure in results.figures:
        assert figure.name in parsed.words
        assert short_number(figure.value) in parsed.words
    last = results.figure("return/last_trial")
    assert f"{last.low:.4g} to {last.high:.4g}" in parsed.words
    assert "123.5" in parsed.words
    assert results.command in parsed.words
    assert results.commit in parsed.words
    charts = [attrs for tag, attrs in parsed.elements if tag == "svg"]
    assert len(charts) == 5  # trials, data, loss, and two of attention
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in charts)
    assert "td3 (8)" in parsed.words
    assert f"{last.value:.4g}" in charts[0]["aria-label"]


def test_the_name_of_a_run_cannot_break_the_page(html):
    assert "small &lt;run&gt; &amp; co" in html
    assert "<run>" not in html


def test_without_graphics_the_page_says_so_and_stays_whole(html):
    parsed = Page(html)
    assert not any(tag == "img" for tag, _ in parsed.elements)
    assert "MuJoCo cannot render on this machine (MUJOCO_GL=disabled" in parsed.words
    assert "layer 2" in parsed.words


@pytest.mark.skipif(find_library("OSMesa") is None, reason="MuJoCo needs OSMesa to draw in software")
def test_the_first_and_the_last_trial_are_drawn(small_run, reported, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert list(reported.missing) == ["film"]
    run = replace(reported, film=filmstrip(small_run.config, reported.record), missing={})
    parsed = Page(page([run]))
    parsed.assert_loads_nothing()
    pictures = [attrs for tag, attrs in parsed.elements if tag == "img"]
    assert len(pictures) == 16
    assert [pictures[0]["alt"], pictures[-1]["alt"]] == [
        "Trial 1 after 0.0 seconds",
        "Trial 3 after 10.0 seconds",
    ]
    for strip in run.film:
        earned = small_run.report.trials[0, strip.trial - 1]
        assert strip.frames[-1].earned == pytest.approx(earned, rel=1e-5)


def test_controls_and_settings_stand_side_by_side(reported, controls):
    parsed = Page(page([reported, read_run(controls, controls.name)]))
    parsed.assert_loads_nothing()
    drawn = [attrs["aria-label"] for tag, attrs in parsed.elements if tag == "svg"]
    assert sum("control: other task: 10, 20, 30" in label for label in drawn) == 1
    assert "return/control/shuffled/trial_3" in parsed.words
    assert "training.seed" in parsed.words
    assert "evaluation.npz does not exist" in parsed.words


def test_seven_arms_have_seven_colours():
    losses = {f"arm {number}": [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}] for number in range(7)}
    drawn = loss_chart(losses)
    assert drawn is not None
    colours = set(re.findall(r"stroke: (var\(--[a-z]+\)|#[0-9a-f]+)", drawn)) - {"var(--ink)"}
    assert len(colours) == 7
    assert all(colour.startswith("var") for colour in colours)


def test_curves_are_found_by_their_names():
    names = (
        "return/control/b/trial_2",
        "return/trial_10",
        "return/trial_2",
        "loss/final",
        "return/last_trial",
    )
    curves = trial_curves([Figure(name, 1.0, "return") for name in names])
    assert list(curves) == ["return", "return/control/b"]
    assert [number for number, _ in curves["return"]] == [2, 10]
    assert curve_label("return/control/no_context") == "control: no context"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (None, "holds no results.json"),
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


def test_without_checkpoint_and_metrics_the_page_says_so(small_run, tmp_path):
    copied = tmp_path / "run"
    left_out = shutil.ignore_patterns("checkpoints", "last_checkpoint", "*.jsonl")
    shutil.copytree(small_run.directory, copied, ignore=left_out)
    run = read_run(copied, "copied")
    assert run.attention is None
    words = Page(page([run])).words
    assert "has no checkpoint" in words
    assert "metrics.jsonl does not exist" in words
    assert not (copied / "checkpoints").exists()


def test_results_of_any_other_program_have_a_page(tmp_path):
    figure = Figure("accuracy/16k", 0.75, "share", 0.7, 0.8, n=200)
    write_results(tmp_path / "results.json", Results("python x.py", None, {}, {}, {"task": 3}, {}, (figure,)))
    words = Page(page([read_run(tmp_path, tmp_path.name)])).words
    assert "0.7 to 0.8" in words
    assert "not run from a checkout" in words


def test_the_command_writes_the_page_beside_the_run_or_names_the_mistake(controls, tmp_path):
    ended = run_python(ROOT / "evals" / "report.py", controls, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "left out" in ended.stderr
    Page((controls / "report.html").read_text()).assert_loads_nothing()
    ended = run_python(ROOT / "evals" / "report.py", tmp_path / "nothing", cwd=tmp_path)
    assert ended.returncode == 1
    assert re.fullmatch(r"error: .*nothing holds no results\.json; .*\n", ended.stderr)


def test_several_runs_go_into_this_folder_under_names_that_differ(controls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    same_name = tmp_path / "elsewhere" / controls.name
    shutil.copytree(controls, same_name)
    report.main((controls, same_name))
    words = Page((tmp_path / "report.html").read_text()).words
    assert str(controls) in words
    assert str(same_name) in words
    with pytest.raises(ConfigError, match="given 2 times"):
        report.main((controls, controls))
    with pytest.raises(ConfigError, match="no run was given"):
        report.main(())


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
    profile = f"--user-data-dir={folder / 'profile'}"
    ended = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", profile, outer.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "HOME": str(folder)},
    )
    found = re.search(r"<title>(.*?)</title>", ended.stdout, flags=re.DOTALL)
    assert found, ended.stdout[:500]
    console = "\n".join(line for line in ended.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(unescape(found[1])), console


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
def test_a_browser_has_no_complaints_and_a_phone_no_sideways_scrolling(reported, controls, tmp_path):
    several = page([reported, read_run(controls, controls.name)])
    found, console = in_browser(several, tmp_path)
    assert console == ""
    assert found["inner"] == 360
    assert found["scroll"] == 360
    assert len(found["charts"]) == 6
    assert all(280 < width <= 360 for width in found["charts"])
    assert found["small"] >= 7  # pixels of the smallest line of text

    # The probe does see what it looks for.
    wide = several.replace("</main>", '<div style="width:500px">x</div><img src="nowhere.png"></main>')
    found, console = in_browser(wide.replace("</main>", "<script>nothing()</script></main>"), tmp_path)
    assert found["scroll"] >= 500
    assert "nothing is not defined" in console
