"""Data and sizes that the tests of several scripts share."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from agentic_ring.data.domains import DOMAINS
from agentic_ring.data.told_chains import ToldChainConfig
from agentic_ring.models.transformer_config import TransformerConfig
from data_prep.episode_files import collector_folder, write_episode
from evals.compile.machines import CompilerMissingError, machine
from experiments.common.cells import is_finished
from tests.data_prep.exploration import uniform_episodes
from tests.evals.conftest import small_run as small_run

TINY: dict[str, Any] = {
    "transformer": TransformerConfig(width=16, layers=1, heads=2, ffn_width=32),
    "trials": 2,
}
TINY_TOLD: dict[str, Any] = {
    "transformer": TINY["transformer"],
    "chains": ToldChainConfig(trajectories=4, spans=5, decisions=8, groups=2, candidates=8),
    "batch_size": 2,
    "cloning_updates": 2,
    "checkpoint_every": 2,
    "rewards": 30,
}
"""The same of a preset in which trajectories tell the task."""


@pytest.fixture(scope="module")
def data(request, tmp_path_factory) -> Path:
    """Four episodes of random actions where ExoRL's rnd data would lie.

    The module's ``DOMAIN`` names their domain and the control steps for which actions are held.
    """
    folder = tmp_path_factory.mktemp("data")
    domain, action_repeat = request.module.DOMAIN
    buffer = collector_folder(folder, domain, "rnd") / "buffer"
    episodes = uniform_episodes(DOMAINS[domain], DOMAINS[domain].tasks[:1] * 4, action_repeat)
    for number, episode in enumerate(episodes):
        write_episode(buffer, number, episode)
    return folder


@pytest.fixture
def cells_run(monkeypatch) -> list[Any]:
    """The cells that ran: in this process, as others would not see a small preset."""
    ran = []

    def run_here(title, cells, output, *_):
        for cell in cells:
            if not is_finished(cell, output):
                import_module(type(cell).__module__).run_cell(cell, output)
                ran.append(cell)

    for script in ("in_context", "table5_exorl"):
        monkeypatch.setattr(f"experiments.{script}.run_cells", run_here)
    return ran


def has_compiler(name: str) -> bool:
    """Returns whether the compiler for the machine of this name is installed."""
    try:
        machine(name).compile_target()
    except CompilerMissingError:
        return False
    return True
