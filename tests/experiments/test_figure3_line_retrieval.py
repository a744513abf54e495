import pytest
from matplotlib.figure import Figure as Canvas

from agentic_ring.errors import DataError
from agentic_ring.results.intervals import wilson_interval
from agentic_ring.results.results_file import Figure, Results, write_results
from evals import plots
from experiments.figure3_line_retrieval import main, plot_curves, read_curve
from experiments.paper import retrieval_curves


def write_run(path, reader="ours", trained_on_task=True):
    figures = [
        figure
        for name, right, asked, tokens in (("16k", 8, 10, 16000.0), ("4k", 10, 10, 4000.0))
        for figure in (
            Figure.from_interval(f"accuracy/{name}", wilson_interval(right, asked), "share right"),
            Figure.from_interval(f"accuracy_first/{name}", wilson_interval(0, asked), "share right"),
            Figure(f"prompt_tokens/{name}", tokens, "tokens"),
        )
    ]
    config = {"reader": reader, "trained_on_task": trained_on_task}
    write_results(path, Results("python x.py", None, {}, {}, config, {}, tuple(figures)))
    return path


def test_models_trained_on_the_task_are_drawn_apart_from_the_others_and_the_paper(
    tmp_path, monkeypatch, capsys
):
    first, second = write_run(tmp_path / "a.json"), write_run(tmp_path / "b.json", "theirs", False)
    main((first, second), output=tmp_path / "figure3.png")
    assert (tmp_path / "figure3.png").read_bytes().startswith(b"\x89PNG")
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("ours (trained on the task)", "theirs", "0.800", "Claude-2 (100K): about 1.0 to 64K"):
        assert text in printed
    drawn: list[Canvas] = []
    monkeypatch.setattr("experiments.figure3_line_retrieval.save", lambda canvas, _: drawn.append(canvas))
    plot_curves(tmp_path / "x.png", [read_curve(first), read_curve(second)], retrieval_curves())
    curve = read_curve(first)
    assert (curve.sets, curve.tokens) == (("4k", "16k"), (4000.0, 16000.0)), "in ascending length"
    assert curve.accuracies == (wilson_interval(10, 10), wilson_interval(8, 10))
    (axes,) = drawn[0].axes
    lines = {container.get_label(): container.lines[0] for container in axes.containers}
    styles = {label: line.get_linestyle() for label, line in lines.items()}
    assert styles == {"ours (trained on the task)": "--", "theirs": "-"}
    paper = [line for line in axes.lines if str(line.get_label()).startswith("paper: ")]
    assert [line.get_color() for line in paper] == [plots.GREY] * 4
    assert axes.get_xlim()[1] >= 500 * 1024


def test_results_of_something_else_are_named(tmp_path):
    path = tmp_path / "results.json"
    for config in ({"reader": "r", "trained_on_task": False}, {}):
        write_results(path, Results("x", None, {}, {}, config, {}, ()))
        with pytest.raises(DataError, match=r"results\.json has no accuracies"):
            read_curve(path)
