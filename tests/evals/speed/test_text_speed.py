"""The benchmark against transformers runs, agrees with it, and names its missing extra."""

import sys

import pytest

from agentic_ring.errors import ConfigError, MissingExtraError
from agentic_ring.results.rows import read_rows
from evals import text_speed


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "evals.speed.torch_llama", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentic_ring\[hf\]'"):
        text_speed.main(lengths=(32,), model="tiny", devices=8)


def test_a_question_is_measured_without_transformers(tmp_path):
    file = tmp_path / "rows.csv"
    text_speed.main(lengths=(), model="tiny", devices=8, turns=2, question_at=64, rows_to=file)
    (row,) = read_rows(file)
    assert (row["phase"], row["cached"], row["turns"]) == ("question", "64", "2")
    assert float(row["other_seconds"]) > float(row["seconds"]) > 0
    assert 1 < float(row["ratio_low"]) <= float(row["ratio"]) <= float(row["ratio_high"])


@pytest.mark.filterwarnings("default")
def test_both_sides_agree_and_are_timed(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    file = tmp_path / "rows.csv"
    text_speed.main(lengths=(48,), model="tiny", devices=8, new_tokens=4, turns=1, rows_to=file)
    rows = read_rows(file)
    assert [(row["phase"], row["tokens"]) for row in rows] == [("prefill", "48"), ("decode", "4")]


def test_an_unknown_shape_is_refused():
    with pytest.raises(ConfigError, match="model is 'big'; it must be one of 47m, tiny"):
        text_speed.main(model="big")
