"""The schedule of a compiled program: what its loops run, and what is computed while arrays travel."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)$")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_KERNELS = ("tpu_custom_call", "__cudnn$", "__gpu$xla.gpu.triton", "mosaic_gpu")


class Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def called(self) -> list[str]:
        branches = _BRANCHES.search(self.attributes)
        listed = re.findall(r"[\w.\-]+", branches[1]) if branches else []
        return [*_CALLED.findall(self.attributes), *listed]


@dataclass(frozen=True)
class Program:
    """Instructions of each computation in the order in which they run, and the name of the first."""

    computations: dict[str, list[Instruction]]
    entry: str

    def products(self, step: Instruction) -> int:
        """Matrix products and kernels that an instruction and what it calls run."""
        if step.opcode in ("dot", "convolution"):
            return 1
        if step.opcode == "custom-call":
            return int(any(target in step.attributes for target in _KERNELS))
        inner = (other for name in step.called for other in self.computations.get(name, ()))
        return self.trips(step) * sum(self.products(other) for other in inner)

    def trips(self, step: Instruction) -> int:
        """How often a loop runs, which counts from 0 up to a constant; 1 for others."""
        condition = _CONDITION.search(step.attributes)
        known = {other.name: other for other in self.computations[condition[1]]} if condition else {}
        for other in known.values():
            if other.opcode == "compare" and "direction=LT" in other.attributes:
                limits = [
                    known[name] for name in re.findall(r"%([\w.\-]+)", other.arguments) if name in known
                ]
                return next((int(x.arguments) for x in limits if x.opcode == "constant"), 1)
        return 1

    def walk(self, name: str | None = None, times: int = 1) -> Iterator[tuple[str, int, list[Instruction]]]:
        """Every computation reached through loops, branches and calls, with the number of its runs."""
        name = name or self.entry
        yield name, times, self.computations[name]
        for step in self.computations[name]:
            if step.opcode in ("while", "conditional", "call"):
                for called in step.called:
                    yield from self.walk(called, times * self.trips(step))


def parse(text: str | None) -> Program:
    """Parses ``jax.stages.Compiled.as_text()``."""
    computations: dict[str, list[Instruction]] = {}
    entry, steps = "", []
    for line in (text or "").splitlines():
        if header := _HEADER.match(line):
            steps = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(line.strip()):
            steps.append(Instruction(*found.groups()))
    return Program(computations, entry)


class Hop(NamedTuple):
    """A permute after which an array comes back to its device in ``ring`` repetitions.

    ``products`` run while it is in flight.
    """

    times: int
    backward: bool
    floats: bool
    products: int


def hops(program: Program, ring: int) -> Iterator[Hop]:
    for _, times, steps in program.walk():
        for place, step in enumerate(steps):
            if step.opcode not in ("collective-permute", "collective-permute-start"):
                continue
            target = {int(a): int(b) for a, b in re.findall(r"\{(\d+),(\d+)\}", step.attributes)}
            if {_cycle(target, device) for device in target} != {ring}:
                continue  # brings the sequence into another order
            between = []
            if step.opcode.endswith("-start"):
                rest = steps[place + 1 :]
                done = next(
                    n for n, other in enumerate(rest) if f"%{step.name}" in other.arguments.split(", ")
                )
                between = rest[:done]
            floats = re.match(r"\(?(f|bf)\d", step.type) is not None
            backward = "transpose(" in step.attributes
            yield Hop(times, backward, floats, sum(program.products(other) for other in between))


def _cycle(target: dict[int, int], start: int) -> int:
    device, length = target[start], 1
    while device != start and device in target and length <= len(target):
        device, length = target[device], length + 1
    return length
