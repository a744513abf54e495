"""A published store: other tools read every value, and the card says what it is."""

import importlib
import re
import sys

import numpy as np
import pyarrow.compute
import pytest
from pyarrow import parquet

from agentic_ring.data.store import TrajectoryStore
from agentic_ring.errors import MissingExtraError
from data_prep import minari_io, publish
from data_prep.data_card import data_card
from tests.commands import exit_status
from tests.data.synthetic import TASK, random_store


@pytest.fixture
def store(tmp_path):
    return random_store(tmp_path / "cartpole-mix.h5", [20, 30, 10], algorithms=["td3", "ou", "td3"])


def test_pyarrow_reads_what_was_stored(store, tmp_path, capsys):
    folder = tmp_path / "published"
    assert exit_status(publish.main, "--store", store, "--output", folder) == 0
    assert capsys.readouterr().out == f"{folder}: 3 episodes\n"
    table = parquet.read_table(folder / "data")
    assert table.num_rows == 20 + 30 + 10 + 3
    with TrajectoryStore.open(store) as opened:
        for number, stored in enumerate(opened.episodes()):
            episode, rows = stored.episode, table.filter(pyarrow.compute.field("episode") == number)
            assert rows["step"].to_pylist() == list(range(len(episode) + 1))
            for name in ("observation", "action", "physics"):
                stored_type = rows.schema.field(name).type.value_type.to_pandas_dtype()
                assert stored_type == getattr(episode, name).dtype
                np.testing.assert_array_equal(rows[name].to_pylist(), getattr(episode, name))
            np.testing.assert_array_equal(rows[f"reward_{TASK}"], stored.rewards[TASK])
            np.testing.assert_array_equal(rows["recorded_reward"], episode.reward[:, 0])
            np.testing.assert_array_equal(rows["discount"], episode.discount[:, 0])
            assert set(rows["algorithm"].to_pylist()) == {stored.algorithm}
            assert set(rows["source"].to_pylist()) == {stored.source}
    card = (folder / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", card, re.MULTILINE) == table.column_names
    assert exit_status(publish.main, "--store", store, "--output", folder) == 1
    assert "exists; name a new folder" in capsys.readouterr().err


def test_the_card_has_origin_returns_and_limits(store):
    with TrajectoryStore.open(store) as opened:
        card = data_card(opened)
        returns = opened.returns(TASK)
        opened.collector = "rnd"
        exorl_card = data_card(opened)
    assert "license: other\n" in exorl_card
    assert "The episodes are ExoRL's, and so is their license." in exorl_card
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "# cartpole, collected by test: 3 episodes" in card
    assert "not ExoRL's data" in card
    assert f"| ou | 1 | {returns[1]:.1f} ({returns[1]:.1f} to {returns[1]:.1f}) |\n" in card
    td3 = returns[[0, 2]]
    assert f"| td3 | 2 | {np.median(td3):.1f} ({td3.min():.1f} to {td3.max():.1f}) |\n" in card
    assert "| algorithm | episodes | swingup |\n|---|---|---|\n| ou" in card
    assert "1 of 3 episodes are noise" in card


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    for package in ("minari", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)  # imports then behave as if it were missing
    with pytest.raises(MissingExtraError, match=r"agentic_ring\[minari\]"):
        minari_io.main(minari_io.Import("exorl/walker/rnd-v0", tmp_path / "store.h5"))
    monkeypatch.delitem(sys.modules, "data_prep.publish")
    with pytest.raises(MissingExtraError, match=r"agentic_ring\[parquet\]"):
        importlib.import_module("data_prep.publish")
