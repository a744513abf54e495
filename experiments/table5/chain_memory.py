"""Memory of the paper's Agentic Transformer on a machine: the ``oom`` cells of Table 5, computed.

The 350M model's own training step on chains of 1000 steps of 4 tokens is compiled for the machine, as Table
3's cells are (``evals.compile.maximum_context``): one chain over all devices for the ring, one per device
otherwise.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentic_ring.attention import padded_length
from agentic_ring.data.tasks import DOMAINS
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig
from agentic_ring.terminal.progress import say
from evals.compile.machines import NamedMachine, machine
from evals.compile.maximum_context import CellCompiler, Finding, Findings
from evals.compile.step_memory import TrainStep, chain_step
from experiments.exorl.presets import PRESETS
from experiments.table5.methods import METHODS, Agentic

SCRIPT = Path(__file__).parents[1] / "table5_exorl.py"
DOMAIN = DOMAINS["walker"]
"""Domain whose observation and action widths are used; they hardly matter."""


@dataclass(frozen=True)
class ChainStep:
    """A train step of the paper's model.

    Attributes:
      method: the attention method and the number of trajectories per chain.
      devices: devices for which it is compiled.
    """

    method: Agentic
    devices: tuple[Any, ...]

    @property
    def batch(self) -> int:
        """Chains per update."""
        return 1 if self.method.attention == "ring" else len(self.devices)

    @property
    def config(self) -> AgenticTransformerConfig:
        """The model's configuration."""
        model = PRESETS["paper"].model(DOMAIN, max_timestep=DOMAIN.episode_steps)
        stack = self.method.transformer(model.transformer, len(self.devices))
        return AgenticTransformerConfig(stack, model.observation_dim, model.action_dim, model.max_timestep)

    @property
    def train_step(self) -> TrainStep:
        """The step to compile."""
        mesh = self.method.mesh(self.devices)
        steps = self.method.trajectories * DOMAIN.episode_steps
        padded = padded_length(steps, mesh.shape["ring"], "zigzag")
        return chain_step(self.config, PRESETS["paper"].optimizer, self.batch, padded, mesh)


@dataclass(frozen=True)
class ChainCell:
    """Names of a machine and of an Agentic method."""

    hardware: str
    method: str

    def __str__(self) -> str:
        return f"{self.hardware} 350M {self.method}"

    @property
    def machine(self) -> NamedMachine:
        """The machine for which it is compiled."""
        return machine(self.hardware)

    @property
    def agentic(self) -> Agentic:
        """The method."""
        method = METHODS[self.method]
        assert isinstance(method, Agentic)
        return method

    @property
    def context(self) -> int:
        """Tokens per chain."""
        return self.agentic.trajectories * DOMAIN.episode_steps * TOKENS_PER_STEP

    def step(self, context: int, devices: tuple[Any, ...]) -> ChainStep:
        """The train step; the method determines the context."""
        return ChainStep(self.agentic, devices)


def kept_findings(output: Path) -> Findings[ChainCell]:
    """The answers stored in a table's folder."""
    return Findings(output / "answers", ChainCell)


def memory_findings(hardware: str, output: Path) -> dict[str, Finding[ChainCell]]:
    """Findings by method: from the machine's compiler, or stored ones where that is not installed.

    Raises:
      UnknownNameError: no such machine.
    """
    findings = kept_findings(output)
    compile_at = CellCompiler(lambda cell, _: _command(cell, output), findings)
    asked = machine(hardware).hardware
    if not asked.compiler_installed:
        say(
            f"the memory on {hardware} is not computed, as its compiler is not installed; "
            f"pip install 'agentic_ring[{asked.compiler_extra}]'"
        )
        known = {name: findings.get(cell, cell.context) for name, cell in _cells(hardware).items()}
        return {name: finding for name, finding in known.items() if finding is not None}
    return {name: compile_at(cell, cell.context) for name, cell in _cells(hardware).items()}


def in_words(finding: Finding[ChainCell]) -> str:
    """Such as "oom" or "12.3 GB"."""
    if finding.verdict == "does not fit":
        return "oom"
    return "error" if finding.needed is None else f"{finding.needed / 1e9:.1f} GB"


def _cells(hardware: str) -> dict[str, ChainCell]:
    agentic: Sequence[str] = [name for name, method in METHODS.items() if isinstance(method, Agentic)]
    return {name: ChainCell(hardware, name) for name in agentic}


def _command(cell: ChainCell, output: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), "--fit", cell.method, cell.hardware, "--output", str(output)]
