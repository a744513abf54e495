"""The longest context that a machine trains, by asking its compiler about one context after another.

Every question is a process of its own: compilers may crash, and what they allocate they keep. Answers are
kept on disk under a hash of all that the program depends on, so that an interrupted sweep goes on where it
stopped and a repeated one asks nothing.
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

from agentic_ring.errors import AgenticRingError
from agentic_ring.files import replacing
from agentic_ring.provenance import git_commit, versions
from agentic_ring.run_folder import Dataclass
from evals.compile.llama_step import SHAPES, LlamaStep, Method, Precision
from evals.compile.machines import NamedMachine, machine
from evals.compile.memory_formula import MemoryFormula
from evals.compile.step_memory import TrainStep, check_fit

LEAST_CONTEXT = 1024
QUESTION_SECONDS = 1800


class CompilerFailedError(AgenticRingError, RuntimeError):
    """A program that does not compile, for a reason other than memory."""


class Step(Protocol):
    """A training step that can be compiled."""

    @property
    def batch(self) -> int:
        """Sequences of an update."""
        ...

    @property
    def config(self) -> Any:
        """The model and how it is computed."""
        ...

    @property
    def train_step(self) -> TrainStep:
        """To compile."""
        ...


class Question(Dataclass, Protocol):
    """What can be asked at a context, named by ``str``."""

    @property
    def machine(self) -> NamedMachine:
        """What it is compiled for."""
        ...

    def step(self, context: int, devices: tuple[Any, ...]) -> Step:
        """The step for sequences of this many tokens."""
        ...


Asked = TypeVar("Asked", bound=Question)


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Attributes:
      hardware: one of ``MACHINES``.
      model, method, precision, remat: of ``LlamaStep``.
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
        """What it is compiled for."""
        return machine(self.hardware)

    def step(self, context: int, devices: tuple[Any, ...]) -> LlamaStep:
        """The step for sequences of this many tokens."""
        return LlamaStep(self.model, self.method, context, devices, self.precision, remat=self.remat)

    def expected(self) -> MemoryFormula:
        """Its bytes by formula."""
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
class Finding(Generic[Asked]):
    """What the compiler said of one cell at one context.

    Attributes:
      cell: which.
      context: tokens of a sequence.
      verdict: "error" for anything but a lack of memory.
      needed: bytes of a device, where known; of a TPU program that does not fit its temporaries alone.
      limit: bytes of a device that a program may use.
      state: bytes of parameters, optimiser and batch, of a step that fits.
      host: bytes in the host's memory for a device.
      seconds: to lower and compile.
      message: why it does not fit, or the error.
      commit, jax: what asked.
    """

    cell: Asked
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


def ask(cell: Asked, context: int) -> Finding[Asked]:
    """Compiles a cell's program, in this process.

    Raises:
      ArgumentError: a context that does not divide.
      CompilerMissingError: the compiler's extra is not installed.
      CompilerFailedError: the compiler failed for another reason than memory.
    """
    machine = cell.machine.compile_target()
    step = cell.step(context, machine.devices).train_step
    started = time.monotonic()
    try:
        answer = check_fit(step, machine)
    except Exception as error:  # of many types, from XLA, Mosaic and JAX
        raise CompilerFailedError(
            f"{cell} at {context} tokens does not compile: {type(error).__name__}: {_first_line(str(error))}"
        ) from error
    finding = Finding(
        cell,
        context,
        "fits" if answer.fits else "does not fit",
        answer.needed,
        answer.limit,
        seconds=time.monotonic() - started,
        message=answer.reason,
        commit=git_commit(),
    )
    if answer.memory is None:
        return finding
    finding = replace(finding, state=answer.memory.state, host=answer.memory.host)
    if finding.host > cell.machine.host_memory:
        message = (
            f"{finding.host / 1e9:.0f} GB wait in the host's memory, of {cell.machine.host_memory / 1e9:.0f}"
        )
        return replace(finding, verdict="does not fit", message=message)
    return finding


class Findings(Generic[Asked]):
    """Answers on disk, one JSON file a question.

    Args:
      folder: made if need be.
      kind: of the cells that are asked about.
    """

    def __init__(self, folder: Path, kind: Callable[..., Any] = Cell):
        self._folder = folder
        self._kind = kind

    def path(self, cell: Asked, context: int) -> Path:
        """Where the answer lies: a hash of the program's configuration, machine and compiler."""
        machine, installed = cell.machine, versions()
        step = cell.step(context, (None,) * machine.devices)
        question = {
            **asdict(cell),
            "context": context,
            "sequences": step.batch,
            "config": repr(step.config),
            "machine": repr(machine),
            "versions": {name: installed.get(name) for name in ("agentic_ring", "jax", "jaxlib", "flax")},
        }
        digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        return self._folder / f"{digest[:24]}.json"

    def get(self, cell: Asked, context: int) -> Finding[Asked] | None:
        """The answer, if it is there; a file that was damaged counts as none."""
        try:
            stored = json.loads(self.path(cell, context).read_text())
            return Finding(**{**stored, "cell": self._kind(**stored["cell"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def put(self, finding: Finding[Asked]) -> None:
        """Keeps an answer."""
        with replacing(self.path(finding.cell, finding.context)) as beside:
            beside.write_text(json.dumps(asdict(finding), indent=1) + "\n")


def search(
    cell: Cell, question: Callable[[Cell, int], Finding], least: int = LEAST_CONTEXT
) -> Iterator[Finding]:
    """Asks about powers of two, from the expected one on, until one fits and its double does not.

    A compiler that fails says nothing about what fits: shorter contexts are asked then, and the search ends
    where it fails twice in a row.
    """
    machine = cell.machine
    least = max(least, 2 * machine.devices) if cell.method == "ring" else least
    context = max(least, cell.expected().longest(machine.hardware.limit, least))
    finding = question(cell, context)
    yield finding
    upwards = finding.verdict == "fits"
    while (finding.verdict == "fits") == upwards:
        context = context * 2 if upwards else context // 2
        if context < least:
            return
        before, finding = finding, question(cell, context)
        yield finding
        if before.verdict == finding.verdict == "error":
            return


def search_finely(
    cell: Cell, question: Callable[[Cell, int], Finding], grain: int = 1024
) -> Iterator[Finding]:
    """Like ``search``, to within ``grain`` tokens a device, for GPUs.

    Their compiler tells the bytes of programs that do not fit as well, and bytes grow in proportion to
    tokens: a straight line through two answers gives the longest context, which is then asked about.
    """
    devices, limit = cell.machine.devices, cell.machine.hardware.limit
    tokens = max(4 * grain, cell.expected().longest(limit) // devices)
    known: dict[int, float] = {}
    tried = [tokens // 2, tokens]
    while tried:
        tokens = tried.pop(0)
        finding = question(cell, devices * tokens)
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
        # The line may point at what is known: then the next grain towards what is not.
        reach = (
            max(reach, fitting + grain)
            if excess is None
            else min(max(reach, fitting + grain), excess - grain)
        )
        tried.append(reach)


class Asker(Generic[Asked]):
    """Puts questions to processes of their own, and keeps the answers.

    Args:
      command: of a process that answers one question and keeps the answer in ``findings``.
      findings: what is known already.
    """

    def __init__(self, command: Callable[[Asked, int], list[str]], findings: Findings[Asked]):
        self._command = command
        self._findings = findings

    def __call__(self, cell: Asked, context: int) -> Finding[Asked]:
        """The answer, from disk or by compiling; an error is an answer too, but not kept."""
        known = self._findings.get(cell, context)
        if known is not None:
            return known
        try:
            ended = subprocess.run(
                self._command(cell, context), capture_output=True, text=True, timeout=QUESTION_SECONDS
            )
            failure = f"the compiler's process ended with {ended.returncode}: {_last_line(ended.stderr)}"
        except subprocess.TimeoutExpired:
            failure = f"the compiler took longer than {QUESTION_SECONDS} s"
        found = self._findings.get(cell, context)
        return found or Finding(
            cell, context, "error", None, cell.machine.hardware.limit, message=failure, commit=git_commit()
        )


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:300]


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if any(letter.isalnum() for letter in line)]
    return lines[-1][:300] if lines else "it said nothing"


def sweep(
    cells: list[Cell], searched: Callable[[Cell], Iterable[Finding]], workers: int
) -> Iterator[tuple[Cell, list[Finding]]]:
    """The findings of each cell as it is done, several cells at a time, in the order of their ends."""
    with ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(lambda cell=cell: list(searched(cell))): cell for cell in cells}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            for future in waiting:
                future.cancel()


def longest(findings: list[Finding]) -> Finding | None:
    """The longest context that fits."""
    fitting = [finding for finding in findings if finding.verdict == "fits"]
    return max(fitting, key=lambda finding: finding.context, default=None)
