import importlib
import sys

import pytest

from agentic_ring.errors import MissingExtraError


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("minari_io", "minari", "minari"), ("publish", "pyarrow", "parquet")],
)
def test_without_the_package_the_extra_is_named(monkeypatch, module, package, extra):
    monkeypatch.setitem(sys.modules, package, None)  # imports then behave as if it were missing
    monkeypatch.delitem(sys.modules, f"data_prep.{module}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"agentic_ring\[{extra}\]"):
        importlib.import_module(f"data_prep.{module}")
