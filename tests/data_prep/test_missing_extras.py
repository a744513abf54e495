import sys

import pytest

from agentic_ring.errors import MissingExtraError
from data_prep import minari_io, publish
from data_prep.minari_io import Import


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    for package, module in (("minari", "minari_datasets"), ("pyarrow", "parquet_files")):
        monkeypatch.setitem(sys.modules, package, None)  # imports then behave as if it were missing
        monkeypatch.delitem(sys.modules, f"data_prep.{module}", raising=False)
    with pytest.raises(MissingExtraError, match=r"agentic_ring\[minari\]"):
        minari_io.main(Import("exorl/walker/rnd-v0", tmp_path / "store.h5"))
    with pytest.raises(MissingExtraError, match=r"agentic_ring\[parquet\]"):
        publish.main(tmp_path / "store.h5", tmp_path / "published")
