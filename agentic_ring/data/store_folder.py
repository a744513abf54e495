"""Paths of trajectory stores below the data folder: {root}/store/{domain}-{collector}.h5."""

import os
from pathlib import Path


def data_root() -> Path:
    """``$AGENTIC_RING_DATA``, or ``data`` in the working directory."""
    return Path(os.environ.get("AGENTIC_RING_DATA") or "data")


def store_path(root: Path, domain: str, collector: str) -> Path:
    """The HDF5 store."""
    return root / "store" / f"{domain}-{collector}.h5"


def stored_collectors(root: Path, domain: str) -> tuple[str, ...]:
    """Returns the collectors of which there is a store of this domain, sorted."""
    first, last = store_path(root, domain, "*").name.split("*")
    found = store_path(root, domain, "*").parent.glob(f"{first}*{last}")
    return tuple(sorted(path.name.removeprefix(first).removesuffix(last) for path in found))
