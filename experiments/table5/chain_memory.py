"""Memory of the paper's Agentic Transformer on a machine: the ``oom`` cells of Table 5, computed.

The 350M model's own training step on chains of 1000 steps of 4 tokens is compiled for the machine, as Table
3's cells are (``evals.compile.maximum_context``): one chain over all devices for the ring, one per device
otherwise.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentic_ring.attention import padded_length
from agentic_ring.data.domains import DOMAINS
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig
from agentic_ring.terminal.progress import say
from evals.compile.machines import NamedMachine, machine
from evals.compile.maximum_context import COMPILE_SECONDS, Finding, Program
from evals.compile.step_memory import TrainStep, chain_step
from experiments.common.cells import CellPool
from experiments.exorl.presets import PRESETS
from experiments.table5.methods import METHODS, Agentic

SCRIPT = Path(__file__).parents[1] / "table5_exorl.py"
DOMAIN = DOMAINS["walker"]
"""Domain whose observation and action widths are used; they hardly matter."""


@dataclass(frozen=True)
class ChainProgram(Program):
    """A train step of the paper's model by an Agentic method, named as on the command line, on a machine."""

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

    @property
    def batch(self) -> int:
        """Chains per update."""
        return 1 if self.agentic.attention == "ring" else self.machine.devices

    @property
    def model(self) -> AgenticTransformerConfig:
        """The model's configuration."""
        model = PRESETS["paper"].model(DOMAIN, max_timestep=DOMAIN.episode_steps)
        stack = self.agentic.transformer(model.transformer, self.machine.devices)
        return replace(model, transformer=stack, dropout=0.0)

    @property
    def configuration(self) -> str:
        """The model's configuration and its number of chains."""
        return repr((self.model, self.batch))

    def train_step(self, devices: tuple[Any, ...]) -> TrainStep:
        """Returns the step on these devices."""
        mesh = self.agentic.mesh(devices)
        padded = padded_length(self.context // TOKENS_PER_STEP, mesh.shape["ring"], "zigzag")
        return chain_step(self.model, PRESETS["paper"].optimizer, self.batch, padded, mesh)

    def command(self, output: Path) -> list[str]:
        """Command of the process that compiles it."""
        flags = ["--fit", self.method, self.hardware, "--output", str(output)]
        return [sys.executable, str(SCRIPT), *flags]


def memory_cells(hardware: str, output: Path) -> dict[str, str]:
    """Memory by method, from the machine's compiler, or kept on disk where that is not installed.

    Raises:
      UnknownNameError: no such machine.
    """
    asked = machine(hardware).hardware
    programs = {name: ChainProgram(hardware, name) for name in METHODS if name.startswith("at_")}
    if asked.compiler_installed:
        with CellPool(output, 1, seconds=COMPILE_SECONDS) as pool:
            return {name: in_words(each.compiled(output, pool.run)) for name, each in programs.items()}
    say(
        f"the memory on {hardware} is not computed, as its compiler is not installed; "
        f"pip install 'agentic_ring[{asked.compiler_extra}]'"
    )
    kept = {name: each.kept(output) for name, each in programs.items()}
    return {name: in_words(finding) for name, finding in kept.items() if finding is not None}


def in_words(finding: Finding) -> str:
    """Such as "oom" or "12.3 GB"."""
    if finding.verdict == "does not fit":
        return "oom"
    return "error" if finding.needed is None else f"{finding.needed / 1e9:.1f} GB"
