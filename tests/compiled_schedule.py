"""A compiled program read from its text: what its loops run, and what is computed while arrays travel."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
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

    @property
    def floats(self) -> bool:
        return re.match(r"\(?(f|bf)\d", self.type) is not None

    @property
    def permutes(self) -> bool:
        return self.opcode in ("collective-permute", "collective-permute-start")


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
        return (self.trips(step) or 1) * sum(self.products(other) for other in inner)

    def trips(self, step: Instruction) -> int | None:
        """How often a loop runs, which counts from 0 up to a constant; None if unknown, 1 for others."""
        if step.opcode != "while":
            return 1
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', step.attributes):
            return int(known[1])
        condition = _CONDITION.search(step.attributes)
        steps = self.computations[condition[1]] if condition else ()
        less = [other for other in steps if other.opcode == "compare" and "direction=LT" in other.attributes]
        names = {name for other in less for name in re.findall(r"%([\w.\-]+)", other.arguments)}
        limits = (int(x.arguments) for x in steps if x.opcode == "constant" and x.name in names)
        return next(limits, None)

    def walk(
        self, name: str | None = None, times: int = 1, conditional: bool = False
    ) -> Iterator[tuple[int, bool, list[Instruction]]]:
        """How often each computation runs, whether that is unsure of some device, and its steps."""
        steps = self.computations[name or self.entry]
        yield times, conditional, steps
        for step in steps:
            if step.opcode in ("while", "conditional", "call"):
                trips = self.trips(step)
                unsure = conditional or trips is None or step.opcode == "conditional"
                for called in step.called:
                    yield from self.walk(called, times * (trips or 1), unsure)


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


class Permutes(NamedTuple):
    """Executions of collective-permute in one run of a program."""

    floats: int
    integers: int
    conditional: int  # instructions, of either kind, that not every device need reach


def permutes(text: str | None) -> Permutes:
    """Counts the permutes of a program, those in loops as often as they run."""
    runs = list(parse(text).walk())
    found = [(times, unsure, step) for times, unsure, steps in runs for step in steps if step.permutes]
    floats = sum(times for times, _, step in found if step.floats)
    every = sum(times for times, _, _ in found)
    return Permutes(floats, every - floats, sum(unsure for _, unsure, _ in found))


class Hop(NamedTuple):
    """A permute from each device of a ring to the next; ``products`` run while it is in flight."""

    times: int
    backward: bool
    floats: bool
    products: int


def hops(program: Program, ring: int) -> Iterator[Hop]:
    for times, _, steps in program.walk():
        for place, step in enumerate(steps):
            if not step.permutes:
                continue
            pairs = re.findall(r"\{(\d+),(\d+)\}", step.attributes)
            if {(int(b) - int(a)) % ring for a, b in pairs} != {1}:
                continue  # brings the sequence into another order
            between = []
            if step.opcode.endswith("-start"):
                rest = steps[place + 1 :]
                arguments = [other.arguments.split(", ") for other in rest]
                between = rest[: next(n for n, names in enumerate(arguments) if f"%{step.name}" in names)]
            backward = "transpose(" in step.attributes
            yield Hop(times, backward, step.floats, sum(program.products(other) for other in between))
