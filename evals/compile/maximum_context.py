"""Maximum context length by ahead-of-time compilation: a search that compiles one context after another.

Every compilation is a process of its own, as compilers may crash and do not free their memory. Findings are
kept on disk under a hash of everything that the program depends on, so that an interrupted sweep resumes
and a repeated one compiles nothing.
"""

import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp

from agentic_ring.errors import AgenticRingError, DataError
from agentic_ring.files.json_files import read_json, write_json
from agentic_ring.files.run_folder import Dataclass
from agentic_ring.provenance import git_commit, versions
from evals.compile.llama_step import SHAPES, LlamaStep, Method, Precision
from evals.compile.machines import NamedMachine, machine
from evals.compile.memory_formula import MemoryFormula
from evals.compile.step_memory import TrainStep, check_fit

LEAST_CONTEXT = 1024
COMPILE_SECONDS = 1800


class CompilerFailedError(AgenticRingError, RuntimeError):
    """A program does not compile, for a reason other than memory."""


class Step(Protocol):
    """A training step that can be compiled."""

    @property
    def batch(self) -> int:
        """Sequences per update."""
        ...

    @property
    def config(self) -> Any:
        """Configuration of the model."""
        ...

    @property
    def train_step(self) -> TrainStep:
        """The step itself."""
        ...


class TableCell(Dataclass, Protocol):
    """A cell of a table: a machine and a step that depends on the context; ``str`` gives its name."""

    @property
    def machine(self) -> NamedMachine:
        """Machine to compile for."""
        ...

    def step(self, context: int, devices: tuple[Any, ...]) -> Step:
        """Returns the step for sequences of ``context`` tokens."""
        ...


CellType = TypeVar("CellType", bound=TableCell)


@dataclass(frozen=True)
class Cell:
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

    @property
    def machine(self) -> NamedMachine:
        """Machine to compile for."""
        return machine(self.hardware)

    def step(self, context: int, devices: tuple[Any, ...]) -> LlamaStep:
        """Returns the step for sequences of ``context`` tokens."""
        return LlamaStep(self.model, self.method, context, devices, self.precision, remat=self.remat)

    def expected(self) -> MemoryFormula:
        """Returns the formula of its memory."""
        itemsize = jnp.dtype(self.precision).itemsize
        machine = self.machine
        return MemoryFormula(
            SHAPES[self.model],
            self.method,
            self.remat,
            machine.devices,
            itemsize,
            machine.hardware.platform,
        )


@dataclass(frozen=True)
class Finding(Generic[CellType]):
    """Result of compiling one cell at one context.

    Attributes:
      cell: the cell.
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

    cell: CellType
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


def compile_cell(cell: CellType, context: int) -> Finding[CellType]:
    """Compiles a cell's program in this process.

    Raises:
      ArgumentError: a context that does not divide.
      CompilerMissingError: the compiler's extra is not installed.
      CompilerFailedError: the compiler failed for another reason than memory.
    """
    target = cell.machine.compile_target()
    step = cell.step(context, target.devices).train_step
    started = time.monotonic()
    try:
        fit = check_fit(step, target)
    except Exception as error:  # of many types, from XLA, Mosaic and JAX
        raise CompilerFailedError(
            f"{cell} at {context} tokens does not compile: {type(error).__name__}: {_first_line(str(error))}"
        ) from error
    finding = Finding(
        cell,
        context,
        "fits" if fit.fits else "does not fit",
        fit.needed,
        fit.limit,
        seconds=time.monotonic() - started,
        message=fit.reason,
        commit=git_commit(),
    )
    if fit.memory is None:
        return finding
    finding = replace(finding, state=fit.memory.state, host=fit.memory.host)
    if finding.host > cell.machine.host_memory:
        needed, there = finding.host / 1e9, cell.machine.host_memory / 1e9
        message = f"needs {needed:.0f} GB of host memory per device, of {there:.0f}"
        return replace(finding, verdict="does not fit", message=message)
    return finding


class Findings(Generic[CellType]):
    """Findings on disk, one JSON file per cell and context.

    Args:
      folder: folder of the files; made if need be.
      kind: class of the cells.
    """

    def __init__(self, folder: Path, kind: type[Any] = Cell):
        self._folder = folder
        self._content: Any = Finding[kind]  # pyright: ignore[reportInvalidTypeForm]

    def path(self, cell: CellType, context: int) -> Path:
        """Returns the file of a finding, named by a hash of the configuration, machine and compiler."""
        machine, installed = cell.machine, versions()
        step = cell.step(context, (None,) * machine.devices)
        program = {
            **asdict(cell),
            "context": context,
            "sequences": step.batch,
            "config": repr(step.config),
            "machine": repr(machine),
            "versions": {name: installed.get(name) for name in ("agentic_ring", "jax", "jaxlib", "flax")},
        }
        digest = hashlib.sha256(json.dumps(program, sort_keys=True).encode()).hexdigest()
        return self._folder / f"{digest[:24]}.json"

    def get(self, cell: CellType, context: int) -> Finding[CellType] | None:
        """Returns the finding, or None if there is none or its file is damaged."""
        try:
            return read_json(self.path(cell, context), self._content, "compile again")
        except DataError:
            return None

    def put(self, finding: Finding[CellType]) -> None:
        """Writes a finding."""
        write_json(self.path(finding.cell, finding.context), asdict(finding))


def search(
    cell: Cell, compile_at: Callable[[Cell, int], Finding], least: int = LEAST_CONTEXT
) -> Iterator[Finding]:
    """Compiles at powers of two, from the expected one on, until one fits and its double does not.

    Where the compiler fails for another reason than memory, shorter contexts are tried; the search ends
    where it fails twice in a row.

    Args:
      cell: the cell whose maximum context is searched.
      compile_at: returns the finding of the cell at a context.
      least: the shortest context to try.
    """
    machine = cell.machine
    least = max(least, 2 * machine.devices) if cell.method == "ring" else least
    context = max(least, cell.expected().longest(machine.hardware.limit, least))
    finding = compile_at(cell, context)
    yield finding
    upwards = finding.verdict == "fits"
    while (finding.verdict == "fits") == upwards:
        context = context * 2 if upwards else context // 2
        if context < least:
            return
        before, finding = finding, compile_at(cell, context)
        yield finding
        if before.verdict == finding.verdict == "error":
            return


def search_finely(
    cell: Cell, compile_at: Callable[[Cell, int], Finding], grain: int = 1024
) -> Iterator[Finding]:
    """Searches like ``search``, but to within ``grain`` tokens per device, for GPUs.

    Their compiler also reports the bytes of programs that do not fit, and bytes grow linearly with tokens:
    a straight line through two findings predicts the maximum context, which is then compiled.
    """
    devices, limit = cell.machine.devices, cell.machine.hardware.limit
    tokens = max(4 * grain, cell.expected().longest(limit) // devices)
    known: dict[int, float] = {}
    tried = [tokens // 2, tokens]
    while tried:
        tokens = tried.pop(0)
        finding = compile_at(cell, devices * tokens)
        yield finding
        if finding.needed is None:
            return
        known[tokens] = finding.needed
        if tried:
            continue
        fitting = max((n for n in known if known[n] <= limit), default=0)
        excess = min((n for n in known if known[n] > limit), default=None)
        if excess is not None and excess - fitting <= grain:
            return
        (low, less), (high, more) = sorted(known.items(), key=lambda pair: abs(pair[1] - limit))[:2]
        reach = int(low + (limit - less) * (high - low) / (more - less)) // grain * grain
        # The line may point at a known context: then the next grain towards an unknown one.
        reach = (
            max(reach, fitting + grain)
            if excess is None
            else min(max(reach, fitting + grain), excess - grain)
        )
        tried.append(reach)


class CellCompiler(Generic[CellType]):
    """Compiles cells in processes of their own, and keeps the findings.

    Args:
      command: returns the command that compiles a cell at a context and adds the result to ``findings``.
      findings: known findings.
    """

    def __init__(self, command: Callable[[CellType, int], list[str]], findings: Findings[CellType]):
        self.command = command
        self._findings = findings

    def __call__(self, cell: CellType, context: int) -> Finding[CellType]:
        """Returns the finding, from disk or by compiling; an error is returned too, but not kept."""
        known = self._findings.get(cell, context)
        if known is not None:
            return known
        try:
            ended = subprocess.run(
                self.command(cell, context), capture_output=True, text=True, timeout=COMPILE_SECONDS
            )
            failure = f"the compiler's process ended with {ended.returncode}: {_last_line(ended.stderr)}"
        except subprocess.TimeoutExpired:
            failure = f"the compiler took longer than {COMPILE_SECONDS} s"
        found = self._findings.get(cell, context)
        return found or Finding(
            cell, context, "error", None, cell.machine.hardware.limit, message=failure, commit=git_commit()
        )


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:300]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if any(letter.isalnum() for letter in line)]
    return lines[-1][:300] if lines else "no output"


def sweep(
    cells: list[Cell], searched: Callable[[Cell], Iterable[Finding]], workers: int
) -> Iterator[tuple[Cell, list[Finding]]]:
    """Yields the findings of each cell when its search ends, with ``workers`` cells at a time."""
    with ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(lambda cell=cell: list(searched(cell))): cell for cell in cells}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            for future in waiting:
                future.cancel()


def longest(findings: list[Finding]) -> Finding | None:
    """Returns the finding with the longest context that fits, or None."""
    fitting = [finding for finding in findings if finding.verdict == "fits"]
    return max(fitting, key=lambda finding: finding.context, default=None)
