"""Paths of episodes below the data folder; those of stores are in ``agentic_ring.data.store_folder``.

    {root}/exorl/{domain}/{collector}/buffer/*.npz               ExoRL's own layout
    {root}/exorl/{domain}/mix_reward_free/buffer/*.npz           those of `mix` without a task reward
    {root}/exploration/{family}.h5

Our own single explorers write to ``mini_{collector}``, so that they are not mistaken for ExoRL's.
"""

from pathlib import Path

OWN_COLLECTOR = "mix"
"""The default collector of ``data_prep.collect``."""
REWARD_FREE_SUFFIX = "_reward_free"
SETTINGS_FILE = "collection.json"
LABELS_FILE = "episodes.jsonl"


def collector_folder(root: Path, domain: str, collector: str) -> Path:
    """The folder that holds ``buffer`` and, for our own data, ``collection.json``."""
    return root / "exorl" / domain / collector


def exploration_path(root: Path, family: str) -> Path:
    """The trials that explore a task family."""
    return root / "exploration" / f"{family}.h5"
