"""The page of a real run: its content, what is left out and why, attention over trials, and pictures."""

import re
import shutil
from ctypes.util import find_library
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.special
from lxml import etree

from agentic_ring.data.domains import load_environment, parse_task
from agentic_ring.data.store import TrajectoryStore
from agentic_ring.errors import ConfigError
from agentic_ring.models.model import Model
from agentic_ring.results.results_file import Figure, Results, read_results, short_number, write_results
from agentic_ring.rollouts.policies import read_prompt
from evals import report
from evals.report import page
from evals.report_page import filmstrip, run_data
from evals.report_page.filmstrip import HEIGHT, WIDTH, data_uri, render
from evals.report_page.run_data import ReportedRun, read_run, rollout_chain
from tests.commands import exit_status
from tests.evals.conftest import DECISIONS

needs_osmesa = pytest.mark.skipif(find_library("OSMesa") is None, reason="MuJoCo draws with it in software")
PROMPT, ACTIONS = 2, 7
"""Stored trajectories before the three trials, and decisions of each trial whose attention is shown."""
TASK = parse_task("cartpole_swingup")
LEFT_OUT = dict.fromkeys(("record", "attention", "film"), "drawn by another test")


class Page:
    """Checks that tags are nested and nothing is loaded from elsewhere; finds words and elements."""

    def __init__(self, html: str):
        parser = etree.HTMLParser(encoding="utf-8")
        self.elements = [*etree.fromstring(html.encode(), parser).iter(etree.Element)]
        # libxml2 knows no tag of HTML 5 and SVG.
        assert {error.type_name for error in parser.error_log} <= {"HTML_UNKNOWN_TAG"}
        assert not {each.tag for each in self.elements} & {"script", "iframe", "object", "base"}
        self.words = " ".join("".join(self.elements[0].itertext()).split())
        ids = [each.get("id") for each in self.elements if each.get("id")]
        assert len(ids) == len(set(ids))
        for each in self.elements:
            for name in ("src", "href", "xlink:href"):
                assert each.get(name, "#").startswith(("#", "data:")), (each.tag, each.attrib)

    def tagged(self, tag: str) -> list[etree._Element]:
        return [each for each in self.elements if each.tag == tag]


@pytest.fixture(scope="module")
def reported(small_run) -> ReportedRun:
    """Without pictures: the tests' MuJoCo has no graphics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_data, "MAX_ACTIONS", ACTIONS)
        return read_run(small_run.directory, small_run.directory.name)


@pytest.fixture
def controls(tmp_path, small_run) -> Path:
    """A folder with nothing but results, those of an evaluation with controls."""
    results = read_results(small_run.directory / "results.json")
    figures = [
        Figure(f"return/control/{control}/trial_{trial}", 10.0 * trial, "return", 9.0, 900.0, n=32)
        for control in ("shuffled", "other_task", "zero_rewards", "descending")
        for trial in (10, 1, 2)
    ]
    directory = tmp_path / ("long_name_" * 8)
    config = {**results.config, "training": {"seed": 7}}
    changed = replace(results, config=config, figures=(*figures, *results.figures))
    write_results(directory / "results.json", changed)
    return directory


def test_it_stands_alone_holds_every_figure_and_says_what_is_missing(reported):
    html = page([reported])
    parsed = Page(html)
    assert not re.search(r"url\((?!#)", html)
    results = reported.results
    for figure in results.figures:
        assert figure.name in parsed.words
        assert short_number(figure.value) in parsed.words
    last = results.figure("return/last_trial")
    charts = parsed.tagged("svg")
    assert len(charts) == 5  # trials, data, loss, and two of attention
    assert all(chart.get("role") == "img" and chart.get("aria-label") for chart in charts)
    assert f"{last.value:.4g}" in charts[0].get("aria-label")
    shown = (f"{last.low:.4g} to {last.high:.4g}", "123.5", results.command, results.commit)
    for text in (*shown, "td3 (8)", "layer 2", "MuJoCo cannot render on this machine (MUJOCO_GL=disabled"):
        assert text in parsed.words
    assert list(reported.missing) == ["film"]
    assert not parsed.tagged("img")
    # The name of a run cannot break the page.
    assert "small &lt;run&gt; &amp; co" in html
    assert "<run>" not in html


@needs_osmesa
def test_the_first_and_the_last_trial_are_drawn(small_run, reported, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    film = run_data.filmstrip(small_run.config, reported.record.rollout)
    run = replace(reported, film=film, record=None, attention=None, missing=LEFT_OUT)
    pictures = Page(page([run])).tagged("img")
    assert len(pictures) == 16
    ends = ["Trial 1 after 0.0 seconds", "Trial 3 after 10.0 seconds"]
    assert [picture.get("alt") for picture in (pictures[0], pictures[-1])] == ends
    for strip in run.film:
        earned = small_run.report.trials[0, strip.trial - 1]
        assert strip.frames[-1].earned == pytest.approx(earned, rel=1e-5)


def test_controls_and_settings_stand_side_by_side(reported, controls):
    plain = replace(reported, record=None, attention=None, missing=LEFT_OUT)
    parsed = Page(page([plain, read_run(controls, controls.name)]))
    drawn = [chart.get("aria-label") for chart in parsed.tagged("svg")]
    (trials,) = (label for label in drawn if "control: other task: 10, 20, 100" in label)
    assert ". the model: " in trials, "its curve comes first"
    for text in ("return/control/shuffled/trial_2", "training.seed", "evaluation.npz does not exist"):
        assert text in parsed.words


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


def test_a_run_that_trajectories_tell_its_task_shows_returns_by_their_number(told_again):
    run = read_run(told_again, "told")
    parsed = Page(page([run]))
    contexts, trials, data = (chart.get("aria-label") for chart in parsed.tagged("svg"))
    most, zeroed = (run.results.figure(name).value for name in ("return/n4", "control/zeroed"))
    for value in (f"4: {most:.4g}", f"zeroed: {zeroed:.4g}"):
        assert value in contexts
    assert "nothing stored: " in trials
    assert "after 4 stored: " in trials
    assert "12 trajectories" in data
    assert parsed.tagged("h1")[0].text.endswith("mine.py:right")
    for text in ("4 stored trajectories", "normalised gain", "attention is shown for runs of", "MUJOCO_GL"):
        assert text in parsed.words


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
    assert all(str(path) in words for path in (controls, same_name))
    for runs in ((controls, controls), ()):
        with pytest.raises(ConfigError, match="each run once"):
            report.main(runs)


def test_attention_over_the_chain_that_the_model_acted_on_is_plain_softmax(small_run, reported):
    config, rollout = small_run.config, small_run.report.rollout
    with TrajectoryStore.open(config.store) as store:
        prompt = read_prompt(store, config, ring=1)
    chain = rollout_chain(rollout, config.target, config.scaling, prompt)

    @jax.jit
    def actions_and_first_layer(params, chain):
        bound = Model(config.model).bind(params)
        block = jax.tree.map(lambda x: x[0], bound.transformer.blocks)
        return bound(chain), block.attention.project(bound.tokens(chain), bound.positions(chain)[0])

    actions, (query, key, _) = actions_and_first_layer(small_run.params, chain)
    # Over the whole chain at once the model gives the actions that it took step by step.
    taken = rollout.action.reshape(-1, 1)
    np.testing.assert_allclose(actions[0, PROMPT * DECISIONS :], taken, atol=2e-5)
    assert np.ptp(taken) > 0.01

    found = reported.attention
    queries = ACTIONS * 3
    assert found.shares.shape == (2, 4, queries, 5)
    np.testing.assert_allclose(found.shares.sum(axis=-1), 1, atol=1e-5)
    np.testing.assert_allclose(found.even.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_array_equal(found.trajectory, np.repeat([2, 3, 4], ACTIONS))
    assert list(found.timestep[:ACTIONS]) == [0, 3, 6, 10, 13, 16, 19]
    later = np.arange(5) > found.trajectory[:, None]
    assert (found.shares[:, :, later] == 0).all()
    assert (found.even[later] == 0).all()
    # The very first action of the last trial sees two tokens of its own among all those before.
    assert found.even[2 * ACTIONS, 4] == pytest.approx(2 / (4 * 4 * DECISIONS + 2))

    # The first layer again, with the whole matrix of scores.
    key = np.repeat(key, 2, axis=2)  # 4 query heads on 2 key heads
    scores = np.einsum("btnh,bsnh->nts", query, key) / 2  # heads of 4
    weights = scipy.special.softmax(np.where(np.tri(scores.shape[1]), scores, -np.inf), axis=-1)
    of_token = np.repeat(chain.trajectory[0], 4)
    tokens = 4 * (found.trajectory * DECISIONS + found.timestep) + 1
    for index in range(5):
        expected = weights[:, tokens][:, :, of_token == index].sum(axis=-1)
        np.testing.assert_allclose(found.shares[0, :, :, index], expected, atol=1e-5)


@needs_osmesa
def test_a_state_is_drawn_where_the_cart_stands(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    physics = load_environment(TASK, seed=0).physics
    states = []
    for place in (-1.2, 1.2):
        with physics.reset_context():
            physics.named.data.qpos["slider"] = place
        states.append(physics.get_state())
    frames = render(TASK, np.array(states))
    assert frames.shape == (2, HEIGHT, WIDTH, 3)
    # The cart is the warmest thing in the picture.
    warmth = [(frame[..., 0].astype(int) - frame[..., 2]).clip(0).sum(axis=0) for frame in frames]
    left, right = (np.average(np.arange(WIDTH), weights=row) for row in warmth)
    assert left < WIDTH / 2 < right
    assert data_uri(frames[0]).startswith("data:image/jpeg;base64,/9j/")
