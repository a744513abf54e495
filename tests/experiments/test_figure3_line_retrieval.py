import pytest
from matplotlib.figure import Figure as Canvas

from agentic_ring.errors import DataError
from agentic_ring.results.intervals import wilson_interval
from agentic_ring.results.results_file import Figure, Results, write_results
from evals import plots
from experiments.figure3_line_retrieval import main, read_curve


def write_run(path, reader="ours", trained_on_task=True):
    figures = []
    for name, right, tokens in (("16k", 8, 16000.0), ("4k", 10, 4000.0)):
        accuracy, first = wilson_interval(right, 10, "answers"), wilson_interval(0, 10, "answers")
        figures.append(Figure.from_interval(f"accuracy/{name}", accuracy, "share right"))
        figures.append(Figure.from_interval(f"accuracy_first/{name}", first, "share right"))
        figures.append(Figure(f"prompt_tokens/{name}", tokens, "tokens"))
    config = {"reader": reader, "trained_on_task": trained_on_task}
    write_results(path, Results("python x.py", None, {}, {}, config, {}, tuple(figures)))
    return path


def test_models_trained_on_the_task_are_drawn_apart_from_the_others(tmp_path, monkeypatch, capsys):
    drawn: list[Canvas] = []
    monkeypatch.setattr("experiments.figure3_line_retrieval.save", lambda canvas, _: drawn.append(canvas))
    first, second = write_run(tmp_path / "a.json"), write_run(tmp_path / "b.json", "theirs", False)
    main((first, second))
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("ours (trained on the task)", "theirs", "0.800", "Claude-2 (100K): about 1.0 to 64K"):
        assert text in printed
    points = (
        ("4k", 4000.0, wilson_interval(10, 10, "answers")),
        ("16k", 16000.0, wilson_interval(8, 10, "answers")),
    )
    assert read_curve(first).points == [*points], "in ascending length"
    (axes,) = drawn[0].axes
    lines = {container.get_label(): container.lines[0] for container in axes.containers}
    styles = {label: line.get_linestyle() for label, line in lines.items()}
    assert styles == {"ours (trained on the task)": "--", "theirs": "-"}
    paper = [line for line in axes.lines if str(line.get_label()).startswith("paper: ")]
    assert [line.get_color() for line in paper] == [plots.GREY] * 4


def test_results_of_something_else_are_named(tmp_path):
    path = tmp_path / "results.json"
    for config in ({"reader": "r", "trained_on_task": False}, {}):
        write_results(path, Results("x", None, {}, {}, config, {}, ()))
        with pytest.raises(DataError, match=r"results\.json has no accuracies"):
            read_curve(path)
