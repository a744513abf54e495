"""Maximum context length by ahead-of-time compilation: programs, findings, and the search.

Every program is compiled in a process of its own, as compilers may crash and do not free their memory.
Findings are kept on disk under a hash of everything that the program depends on, so that an interrupted
sweep resumes and a repeated one compiles nothing.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from agentic_ring.device_memory import DoesNotFitError
from agentic_ring.errors import AgenticRingError, DataError
from agentic_ring.files.json_files import read_json, write_json
from agentic_ring.provenance import git_commit, versions
from evals.compile.llama_step import CHUNK, SHAPES, LlamaStep, Method, Precision, layer_weights
from evals.compile.machines import NamedMachine, machine
from evals.compile.step_memory import TrainStep

LEAST_CONTEXT = 1024
COMPILE_SECONDS = 1800
"""Time after which a compiler is given up."""


class CompilerFailedError(AgenticRingError, RuntimeError):
    """A program does not compile, for a reason other than memory."""


@dataclass(frozen=True)
class Finding:
    """Result of compiling a program for sequences of ``context`` tokens.

    Attributes:
      verdict: "error" for any failure other than a lack of memory.
      needed: bytes per device, where known; for a TPU program that does not fit only its temporaries.
      limit: bytes of a device that a program may use.
      state, host: bytes per device of parameters, optimiser and batch, of a step that fits, and in the
        host's memory.
      seconds: time to lower and compile.
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


@dataclass(frozen=True)
class Program:
    """A training step on sequences of ``context`` tokens, to be compiled for a machine.

    Attributes:
      configuration: everything that the program depends on beside its context, machine and compiler.
      train_step: returns the step on these devices, which need not exist.
      arguments: script and flags of the Python process that calls ``compile_here``, without --output.
    """

    name: str
    machine: NamedMachine
    context: int
    configuration: str
    train_step: Callable[[tuple[Any, ...]], TrainStep]
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    def command(self, output: Path) -> list[str]:
        """Command of the process that compiles it."""
        return [sys.executable, *self.arguments, "--output", str(output)]

    def folder(self, output: Path) -> Path:
        """The folder of its finding, named by a hash of the configuration, machine and compiler."""
        installed = versions()
        compiler = {name: installed.get(name) for name in ("agentic_ring", "jax", "jaxlib", "flax")}
        program = repr((self.configuration, self.context, self.machine, compiler))
        return output / "answers" / hashlib.sha256(program.encode()).hexdigest()[:24]

    def kept(self, output: Path) -> Finding | None:
        """Returns the finding on disk, or None if there is none or its file is damaged."""
        try:
            return read_json(self.folder(output) / "results.json", Finding, "compile again")
        except DataError:
            return None

    def keep(self, output: Path, finding: Finding) -> None:
        """Writes the finding."""
        write_json(self.folder(output) / "results.json", asdict(finding))

    def compiled(self, output: Path, run: Callable[["Program"], str | None]) -> Finding:
        """Returns the finding on disk, or else compiles; an error is returned too, but not kept.

        ``run`` runs the program's command in the experiment's folder; it returns a message if that failed.
        """
        if found := self.kept(output):
            return found
        message = run(self) or f"{self} left no finding"
        failed = Finding(self.context, "error", None, self.machine.hardware.limit, message=message)
        return self.kept(output) or replace(failed, commit=git_commit())

    def compile_here(self, output: Path) -> Finding:
        """Compiles the program in this process and keeps what is found.

        A compiler that fails for another reason than memory is a CompilerFailedError; then nothing is kept.
        """
        target, there = self.machine.compile_target(), self.machine.host_memory
        step, limit = self.train_step(target.devices), target.hardware.limit
        started = time.monotonic()
        try:
            memory = step.memory(target)
            finding = Finding(self.context, "fits", memory.total, limit, memory.state, memory.host)
            if memory.host > there:
                message = f"needs {memory.host / 1e9:.0f} GB of host memory per device, of {there / 1e9:.0f}"
                finding = replace(finding, verdict="does not fit", message=message)
        except DoesNotFitError as error:
            finding = Finding(self.context, "does not fit", error.needed, limit, message=str(error))
        except Exception as error:  # of many types, from XLA, Mosaic and JAX
            reason = str(error).partition("\n")[0][:300]
            raise CompilerFailedError(f"{self} does not compile: {type(error).__name__}: {reason}") from error
        finding = replace(finding, seconds=time.monotonic() - started, commit=git_commit())
        self.keep(output, finding)
        return finding


# Arrays [tokens of a device, width] that are alive beside the attention of a layer: its input, what is kept
# of the heads, gradients of both; as counted in the compilers' plans of a backward pass. TPUs keep more of
# them than GPUs, and more where memory is ample; they pad to lanes of 128, so a head of 100 takes 128.
_WHOLE_UNITS = {"cuda": 4, "tpu": 9}


@dataclass(frozen=True)
class ContextCell:
    """One cell of Table 3: a name for ``machine``, and arguments of ``LlamaStep``."""

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
    def machine(self) -> NamedMachine:
        """Machine to compile for."""
        return machine(self.hardware)

    def expected_bytes(self, context: int) -> float:
        """Returns the bytes per device by a formula, which starts a search and checks compilers."""
        shape, ring, target = SHAPES[self.model], self.method == "ring", self.machine
        itemsize, tokens = jnp.dtype(self.precision).itemsize, context / target.devices if ring else context
        # State, gradients and gathered weights do not depend on the context.
        feedforward, vocabulary = 3 * shape.width * shape.ffn_width, shape.width * shape.vocab_size
        parameters = shape.layers * layer_weights(shape.llama().transformer) + 2 * vocabulary
        gathered = feedforward * (2 * itemsize + 4) + vocabulary * (itemsize + 12)
        constant = 16 * parameters / target.devices + gathered + 3 * CHUNK * shape.vocab_size * 4
        unit = shape.width * itemsize
        kept = 2 if self.remat == "offload" else shape.layers
        # In float32: dQ, dK and dV; a ring holds the latter two summed, sent and received.
        blocks = (9 + 7 * 4 / itemsize) / shape.head_groups if ring else 5 + 3 * 4 / itemsize
        whole = self.method in ("vanilla", "memory_efficient")
        hidden = 6 * shape.ffn_width * itemsize if whole else 0
        # The feedforward's backward and the attention's do not overlap in time.
        per_token = unit * (kept + _WHOLE_UNITS[target.hardware.platform]) + max(unit * blocks, hidden)
        # Scores, probabilities and their gradient, in float32 or narrower and not all at once.
        scores = 7 * shape.heads * tokens**2 if self.method == "vanilla" else 0
        return constant + per_token * tokens + scores


def search(cell: ContextCell, compile_at: Callable[[int], Finding]) -> Iterator[Finding]:
    """Compiles at powers of two, from the expected one on, until one fits and its double does not.

    Where the compiler fails for another reason than memory, shorter contexts are tried; the search ends
    where it fails twice in a row. ``compile_at`` returns the cell's finding at a context.
    """
    target = cell.machine
    context = least = max(LEAST_CONTEXT, 2 * target.devices) if cell.method == "ring" else LEAST_CONTEXT
    while cell.expected_bytes(2 * context) <= target.hardware.limit:
        context *= 2
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


def longest(findings: Sequence[Finding]) -> int:
    """Returns the longest context that fits, 0 if none does."""
    return max((finding.context for finding in findings if finding.verdict == "fits"), default=0)
