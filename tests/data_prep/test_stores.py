"""Datasets whose episodes are converted or collected first."""

import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.store import stored_collectors
from agentic_ring.errors import DataError
from data_prep import stores
from data_prep.episode_files import collector_folder, write_episode
from tests.commands import exit_status
from tests.data_prep.exploration import cut, uniform_episodes


def test_exorl_episodes_become_a_store_and_datasets(tmp_path):
    episodes = uniform_episodes(DOMAINS["cartpole"], ["swingup"], action_repeat=50)
    for number in range(10):
        buffer = collector_folder(tmp_path, "cartpole", "rnd") / "buffer"
        write_episode(buffer, number, cut(episodes[0], 50 * number, 100))
    (collector_folder(tmp_path, "cartpole", "mini_ou") / "buffer").mkdir(parents=True)  # ours, not ExoRL's
    environment, train, validation = stores.make_env_and_datasets("cartpole_swingup", data=tmp_path)
    assert stored_collectors(tmp_path, "cartpole") == ("rnd",)
    assert (len(train), len(validation)) == (9, 1)
    assert train[0].observation.shape == (100, *environment.observation_space.shape)
    assert exit_status(stores.main, "--domain", "cartpole", "--data", tmp_path) == 0


def test_without_episodes_our_own_mix_is_collected(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(stores, "collect", asked.append)
    with pytest.raises(DataError):  # as nothing was collected
        stores.make_env_and_datasets("walker_run", data=tmp_path)
    assert [(config.domain, config.collector, config.output) for config in asked] == [
        ("walker", "mix", tmp_path)
    ]
    assert "no ExoRL data" in capsys.readouterr().err
