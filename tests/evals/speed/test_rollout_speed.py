"""Rollout speed: the cached policy is checked and timed, and the prompt is stored once."""

import jax.numpy as jnp
import pytest

from agentic_ring.errors import ConfigError
from agentic_ring.inference.in_context_policy import InContextPolicy
from agentic_ring.results.rows import read_rows
from evals import rollout_speed
from evals.speed.rollout_scene import ActionsDifferError
from experiments.exorl.presets import PRESETS

SMALL = {"model": "tiny", "action_repeat": 50, "decisions": 2, "turns": 2}


@pytest.mark.slow
def test_rows_hold_the_speeds_and_the_bytes(tmp_path):
    file = tmp_path / "rows.csv"
    rollout_speed.main((1, 3), environments=8, encode_again_up_to=1, rows_to=file, **SMALL)
    short, long = read_rows(file)
    decisions, bytes_a_token = 20, 2 * 16 * 4 + 4  # key and value of one layer, and the position
    assert int(short["prompt_bytes"]) == 0
    assert int(long["prompt_bytes"]) == 2 * decisions * 4 * bytes_a_token + 8  # once, whatever the devices
    assert long["environments_bytes"] == short["environments_bytes"]
    assert int(long["environments_bytes"]) == 8 * decisions * 4 * bytes_a_token + 2 * 8  # two policies'
    assert (int(long["steps"]), int(long["tokens"])) == (2 * 8 * 50, 3 * 20 * 4)
    for row in (short, long):
        assert 0 < float(row["slower_low"]) <= float(row["slower"]) <= float(row["slower_high"])
        assert float(row["cached_seconds"]) > 0
    assert float(short["again_seconds"]) > float(short["alone_seconds"])
    assert long["again_seconds"] == long["faster"] == ""


def test_a_policy_that_acts_otherwise_is_not_timed(monkeypatch):
    right = InContextPolicy.act
    monkeypatch.setattr(InContextPolicy, "act", lambda self, seen: right(self, jnp.asarray(seen) + 0.1))
    with pytest.raises(ActionsDifferError, match="decision 0: the cached policy's action differs by"):
        rollout_speed.main((1,), environments=8, **SMALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": 9}, "are 20 decisions, but an episode has only 20"),
        ({"trials": 2}, "1 trajectories of context cannot hold 2 trials"),
        ({"model": "big"}, "model is 'big'; it must be one of demo, tiny"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        rollout_speed.main((1,), environments=8, **(SMALL | changes))


def test_the_shape_is_the_demos():
    assert rollout_speed.MODELS["demo"] == PRESETS["demo"].transformer
    assert PRESETS["demo"].action_repeat["walker"] == 4  # the script's default
