import sys

import pytest

from agentic_ring.errors import MissingExtraError
from data_prep.minari_io import Import, main


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    # Imports then behave as if the package were missing.
    monkeypatch.setitem(sys.modules, "minari", None)
    monkeypatch.delitem(sys.modules, "data_prep.minari_io", raising=False)
    with pytest.raises(MissingExtraError, match=r"agentic_ring\[minari\]"):
        main(Import("exorl/walker/rnd-v0", tmp_path / "store.h5"))
