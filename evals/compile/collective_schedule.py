"""Reads the schedule of a compiled program: its collectives, and the work that overlaps each of them."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)$")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]+)(\d+)(?:e\w+)?\[([\d,]*)\]")
_KERNELS = ("tpu_custom_call", "__cudnn$", "__gpu$xla.gpu.triton", "mosaic_gpu")
"""Targets of custom calls that are kernels with matrix products."""


@dataclass(frozen=True)
class Instruction:
    """One line of a computation: name, type of the result, opcode, operands and attributes."""

    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it uses."""
        return re.findall(r"%([\w.\-]+)", self.arguments)

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        branches = _BRANCHES.search(self.attributes)
        listed = re.findall(r"[\w.\-]+", branches[1]) if branches else []
        return [*_CALLED.findall(self.attributes), *listed]


@dataclass(frozen=True)
class Program:
    """The parsed schedule of a compiled program.

    Attributes:
      computations: instructions of each computation, in the order in which they run.
      entry: name of the computation that a run starts with.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    def matmuls(self, instruction: Instruction) -> int:
        """Returns the number of matrix products that it and what it calls run; a kernel counts as one."""
        if instruction.opcode in ("dot", "convolution"):
            return 1
        if instruction.opcode == "custom-call":
            return int(any(target in instruction.attributes for target in _KERNELS))
        inner = (step for name in instruction.called for step in self.computations.get(name, ()))
        return self.trips(instruction) * sum(self.matmuls(step) for step in inner)

    def trips(self, instruction: Instruction) -> int:
        """Returns how often it runs what it calls; 1 for a loop of unknown length."""
        if instruction.opcode != "while":
            return 1
        if known := _TRIPS.search(instruction.attributes):
            return int(known[1])
        # TPU programs do not state it. The loops of JAX count from 0 up to a constant.
        condition = _CONDITION.search(instruction.attributes)
        steps = {step.name: step for step in self.computations.get(condition[1] if condition else "", ())}
        for step in steps.values():
            if step.opcode == "compare" and "direction=LT" in step.attributes:
                limits = [steps[name] for name in step.operands if name in steps]
                constants = [int(limit.arguments) for limit in limits if limit.opcode == "constant"]
                return constants[0] if constants else 1
        return 1

    def walk(self, name: str | None = None, times: int = 1) -> Iterator[tuple[str, int, list[Instruction]]]:
        """Yields every computation reached through loops, branches and calls, with the number of its runs."""
        name = name or self.entry
        yield name, times, self.computations[name]
        for instruction in self.computations[name]:
            if instruction.opcode in ("while", "conditional", "call"):
                for called in instruction.called:
                    yield from self.walk(called, times * self.trips(instruction))


def parse(text: str) -> Program:
    """Parses ``jax.stages.Compiled.as_text()``."""
    computations: dict[str, list[Instruction]] = {}
    entry, steps = "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            steps = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif found := _INSTRUCTION.match(line.strip()):
            name, kind, opcode, arguments, attributes = found.groups()
            steps.append(Instruction(name, kind, opcode, arguments, attributes))
    return Program(computations, entry)


@dataclass(frozen=True)
class Transfer:
    """One collective-permute of a program.

    Attributes:
      name: name of the instruction that starts it.
      computation: the computation that holds it: the entry, or the body of a loop.
      times: how often it runs in one run of the program.
      backward: whether JAX made it by transposing.
      array: type of the array that it sends, such as "bf16[2,1,8192,8,128]".
      size: bytes.
      cycle: number of repetitions after which an array is back on its device, 0 where devices differ: the
        size of the ring for a hop, and 0 for an exchange that permutes the sequence once.
      matmuls: number of matrix products, or kernels, that run while it is in flight.
      meanwhile: number of other instructions scheduled while it is in flight, by opcode.
    """

    name: str
    computation: str
    times: int
    backward: bool
    array: str
    size: int
    cycle: int
    matmuls: int
    meanwhile: Counter[str] = field(default_factory=Counter)

    @property
    def hidden(self) -> bool:
        """Whether matrix products overlap it."""
        return self.matmuls > 0


def transfers(text: str) -> list[Transfer]:
    """Returns every collective-permute of a compiled program, in the order of its computations."""
    program = parse(text)
    found = []
    for computation, times, steps in program.walk():
        for place, step in enumerate(steps):
            if step.opcode not in ("collective-permute", "collective-permute-start"):
                continue
            between = in_flight(steps, place)
            array, size = first_array(step.type)
            found.append(
                Transfer(
                    name=step.name,
                    computation=computation,
                    times=times,
                    backward="transpose(" in step.attributes,
                    array=array,
                    size=size,
                    cycle=_cycle(step.attributes),
                    matmuls=sum(program.matmuls(other) for other in between),
                    meanwhile=Counter(other.opcode for other in between if other.opcode in _WORK),
                )
            )
    return found


def in_flight(steps: list[Instruction], place: int) -> list[Instruction]:
    """Returns the instructions between an asynchronous one at ``place`` and its done; none for others."""
    start = steps[place]
    if not start.opcode.endswith("-start"):
        return []
    name = start.opcode.removesuffix("-start") + "-done"
    done = next(
        index for index, other in enumerate(steps) if other.opcode == name and start.name in other.operands
    )
    return steps[place + 1 : done]


_WORK = ("fusion", "while", "conditional", "custom-call", "dot", "convolution", "copy")


def exposed(text: str, ring: int) -> list[Transfer]:
    """Returns the hops of the ring that no product overlaps, except those of positions and segment ids."""
    return [
        transfer
        for transfer in transfers(text)
        if transfer.cycle == ring and not transfer.hidden and transfer.array.startswith(("f", "bf"))
    ]


def first_array(kind: str) -> tuple[str, int]:
    """Returns the first array of a type, and its bytes."""
    found = _ARRAY.search(kind)
    if not found:
        return kind, 0
    _, bits, shape = found.groups()
    return found[0], int(bits) * math.prod(int(n) for n in shape.split(",") if n) // 8


def _cycle(attributes: str) -> int:
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    if not pairs:
        return 0
    target = {int(a): int(b) for a, b in re.findall(r"\{(\d+),(\d+)", pairs[0])}
    lengths = set()
    for start in target:
        device, length = target[start], 1
        while device != start and device in target and length <= len(target):
            device, length = target[device], length + 1
        lengths.add(length if device == start else 0)
    return lengths.pop() if len(lengths) == 1 else 0
