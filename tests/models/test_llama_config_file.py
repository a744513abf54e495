"""A model is used beyond its context only on request."""

import json

import pytest

from agentic_ring.errors import ConfigError, DataError
from agentic_ring.models.llama.config_file import usable_context


def test_a_context_is_checked_against_the_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    assert usable_context(tmp_path, None, False) == 64
    assert usable_context(tmp_path, 63, False) == 63
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match="65 tokens is requested, but the model was made for 64"):
        usable_context(tmp_path, 65, False)
    assert usable_context(tmp_path, 65, True) == 65
    assert "made for 64 tokens, and is used on up to 65" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="at least 1"):
        usable_context(tmp_path, 0, False)


def test_a_context_must_be_given_if_the_model_states_none(tmp_path):
    with pytest.raises(DataError, match=r"config\.json does not exist"):
        usable_context(tmp_path, 64, False)
    (tmp_path / "config.json").write_text("{}")
    assert usable_context(tmp_path, 64, False) == 64
    with pytest.raises(ConfigError, match="give a length"):
        usable_context(tmp_path, None, False)
