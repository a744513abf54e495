"""The data card of a published dataset, in Markdown with the front matter that Hugging Face reads."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np

from agentic_ring.data.store import NOISE_ALGORITHMS, TrajectoryStore
from agentic_ring.provenance import command_line, git_commit, versions
from data_prep.episode_files import COLLECTORS

TEMPLATE = Path(__file__).with_name("data_card.jinja")


def data_card(store: TrajectoryStore, columns: Sequence[tuple[str, str]] = ()) -> str:
    """Describes a store: origin, size, returns by algorithm, fields, and limits.

    Args:
      store: the store that is published.
      columns: name and type of each column of a Parquet dataset; none for a Minari dataset.
    """
    with store.path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    algorithms = np.array(store.algorithms)
    rows = []
    for name in sorted(set(store.algorithms)):
        acted = algorithms == name
        rows.append((name, int(acted.sum()), [_range(store.returns(task)[acted]) for task in store.tasks]))
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        store=store,
        parquet=bool(columns),
        columns=columns,
        exorl=store.collector in COLLECTORS,
        sha256=sha256,
        command=command_line(),
        commit=git_commit(),
        versions=versions(),
        algorithms=rows,
        noise=int(np.isin(algorithms, sorted(NOISE_ALGORITHMS)).sum()),
    )


def _range(returns: np.ndarray) -> str:
    return f"{np.median(returns):.1f} ({returns.min():.1f} to {returns.max():.1f})"
