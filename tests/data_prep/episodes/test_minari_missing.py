import importlib.util

import pytest

from agentic_ring.errors import ConfigError
from data_prep.minari_io import Import, main


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"agentic_ring\[minari\]"):
        main(Import("exorl/walker/rnd-v0", tmp_path / "store.h5"))
