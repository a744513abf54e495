"""Maximum context length by ahead-of-time compilation: programs, findings, and the search.

Every program is compiled in a process of its own, as compilers may crash and do not free their memory.
Findings are kept on disk under a hash of everything that the program depends on, so that an interrupted
sweep resumes and a repeated one compiles nothing.
"""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from agentic_ring.device_memory import DoesNotFitError
from agentic_ring.errors import AgenticRingError, DataError
from agentic_ring.files.json_files import read_json, write_json
from agentic_ring.provenance import git_commit, versions
from evals.compile.llama_step import SHAPES, LlamaStep, MemoryFormula, Method, Precision
from evals.compile.machines import NamedMachine, machine
from evals.compile.step_memory import TrainStep

LEAST_CONTEXT = 1024
COMPILE_SECONDS = 1800
"""Time after which a compiler is given up."""


class CompilerFailedError(AgenticRingError, RuntimeError):
    """A program does not compile, for a reason other than memory."""


@dataclass(frozen=True)
class Finding:
    """Result of compiling a program.

    Attributes:
      context: tokens per sequence.
      verdict: "error" for any failure other than a lack of memory.
      needed: bytes per device, where known; for a TPU program that does not fit only its temporaries.
      limit: bytes of a device that a program may use.
      state: bytes of parameters, optimiser and batch, of a step that fits.
      host: bytes per device in the host's memory.
      seconds: time to lower and compile.
      message: why it does not fit, or the error.
      commit, jax: versions that compiled it.
    """

    context: int
    verdict: Literal["fits", "does not fit", "error"]
    needed: float | None
    limit: float
    state: int | None = None
    host: int = 0
    seconds: float = 0.0
    message: str = ""
    commit: str | None = None
    jax: str = jax.__version__


class Program(ABC):
    """A training step at one context, to be compiled for a machine; ``str`` gives its name."""

    @property
    @abstractmethod
    def machine(self) -> NamedMachine:
        """Machine to compile for."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Tokens per sequence."""

    @property
    @abstractmethod
    def configuration(self) -> str:
        """Everything that the program depends on beside its context, machine and compiler."""

    @abstractmethod
    def train_step(self, devices: tuple[Any, ...]) -> TrainStep:
        """Returns the step on these devices, which need not exist."""

    def folder(self, output: Path) -> Path:
        """The folder of its finding, named by a hash of the configuration, machine and compiler."""
        installed = versions()
        compiler = {name: installed.get(name) for name in ("agentic_ring", "jax", "jaxlib", "flax")}
        program = repr((self.configuration, self.context, self.machine, compiler))
        digest = hashlib.sha256(program.encode()).hexdigest()
        return output / "answers" / digest[:24]

    def kept(self, output: Path) -> Finding | None:
        """Returns the finding on disk, or None if there is none or its file is damaged."""
        try:
            return read_json(self.folder(output) / "results.json", Finding, "compile again")
        except DataError:
            return None

    def keep(self, output: Path, finding: Finding) -> None:
        """Writes the finding."""
        write_json(self.folder(output) / "results.json", asdict(finding))

    def compiled(self, output: Path, run: Callable[[Self], str | None]) -> Finding:
        """Returns the finding on disk, or else compiles; an error is returned too, but not kept.

        Args:
          output: folder of the experiment.
          run: compiles the program in a process that calls ``compile_here``; returns a message if it failed.
        """
        found, failure = self.kept(output), None
        if found is None:
            (self.folder(output) / "results.json").unlink(missing_ok=True)  # a damaged one
            failure = run(self)
            found = self.kept(output)
        message = failure or f"{self} left no finding"
        return found or Finding(
            self.context, "error", None, self.machine.hardware.limit, message=message, commit=git_commit()
        )

    def compile_here(self, output: Path) -> Finding:
        """Compiles the program in this process and keeps what is found.

        Raises:
          ArgumentError: a context that does not divide.
          CompilerMissingError: the compiler's extra is not installed.
          CompilerFailedError: the compiler failed for another reason than memory.
        """
        target = self.machine.compile_target()
        step, limit = self.train_step(target.devices), target.hardware.limit
        started = time.monotonic()
        try:
            memory = step.memory(target)
            finding = Finding(self.context, "fits", memory.total, limit, memory.state, memory.host)
        except DoesNotFitError as error:
            finding = Finding(self.context, "does not fit", error.needed, limit, message=str(error))
        except Exception as error:  # of many types, from XLA, Mosaic and JAX
            reason = str(error).partition("\n")[0][:300]
            raise CompilerFailedError(f"{self} does not compile: {type(error).__name__}: {reason}") from error
        finding = replace(finding, seconds=time.monotonic() - started, commit=git_commit())
        if finding.host > self.machine.host_memory:
            needed, there = finding.host / 1e9, self.machine.host_memory / 1e9
            message = f"needs {needed:.0f} GB of host memory per device, of {there:.0f}"
            finding = replace(finding, verdict="does not fit", message=message)
        self.keep(output, finding)
        return finding


@dataclass(frozen=True)
class ContextCell:
    """One cell of Table 3.

    Attributes:
      hardware: one of ``MACHINES``.
      model, method, precision, remat: see ``LlamaStep``.
    """

    hardware: str
    model: str
    method: Method
    precision: Precision
    remat: Literal["full", "offload"] = "full"

    def __str__(self) -> str:
        offloaded = " +offload" if self.remat == "offload" else ""
        return f"{self.hardware} {self.model} {self.method}{offloaded} {self.precision}"

    def step(self, context: int, devices: tuple[Any, ...]) -> LlamaStep:
        """Returns the step for sequences of ``context`` tokens."""
        return LlamaStep(self.model, self.method, context, devices, self.precision, remat=self.remat)

    @property
    def expected(self) -> MemoryFormula:
        """The formula of its memory."""
        itemsize, target = jnp.dtype(self.precision).itemsize, self.machine
        platform = target.hardware.platform
        return MemoryFormula(SHAPES[self.model], self.method, self.remat, target.devices, itemsize, platform)

    @property
    def machine(self) -> NamedMachine:
        """Machine to compile for."""
        return machine(self.hardware)


def search(cell: ContextCell, compile_at: Callable[[int], Finding]) -> Iterator[Finding]:
    """Compiles at powers of two, from the expected one on, until one fits and its double does not.

    Where the compiler fails for another reason than memory, shorter contexts are tried; the search ends
    where it fails twice in a row.

    Args:
      cell: the cell whose maximum context is searched.
      compile_at: returns the finding of the cell at a context.
    """
    target = cell.machine
    least = max(LEAST_CONTEXT, 2 * target.devices) if cell.method == "ring" else LEAST_CONTEXT
    context = max(least, cell.expected.longest(target.hardware.limit, least))
    finding = compile_at(context)
    yield finding
    upwards = finding.verdict == "fits"
    while (finding.verdict == "fits") == upwards:
        context = context * 2 if upwards else context // 2
        if context < least:
            return
        before, finding = finding, compile_at(context)
        yield finding
        if before.verdict == finding.verdict == "error":
            return


def longest(findings: Sequence[Finding]) -> Finding | None:
    """Returns the finding with the longest context that fits, or None."""
    fitting = [finding for finding in findings if finding.verdict == "fits"]
    return max(fitting, key=lambda finding: finding.context, default=None)
