"""Is a transfer of the ring hidden behind compute? Read from the schedule of a compiled program.

    python evals/overlap.py --hardware v5e --topology 4x4 --tokens 1048576

compiles attention, forward and backward, for a machine that need not be there, and lists every
collective-permute with the work that the compiler has put between its start and its done. Ring
attention costs nothing over attention where a hop's transfer is in flight during a hop's products
(arXiv 2310.01889, section 3) and takes less time than they do; the second is estimated from the
published rates of the hardware.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from agentic_ring.attention import MaskSpec, attention
from agentic_ring.cli import run
from agentic_ring.mesh import make_mesh, shape_with_ring
from evals.compile.compile_target import CompileTarget, compile_target
from evals.compile.hardware import HARDWARE

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)$")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]+)(\d+)(?:e\w+)?\[([\d,]*)\]")
_KERNELS = ("tpu_custom_call", "__cudnn$", "__gpu$xla.gpu.triton", "mosaic_gpu")
"""Custom calls that are a kernel's products."""


@dataclass(frozen=True)
class Instruction:
    """One line of a computation: its name, the type of its result, what it does, on what, and the rest."""

    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it takes."""
        return re.findall(r"%([\w.\-]+)", self.arguments)

    @property
    def called(self) -> list[str]:
        """The computations it runs."""
        branches = _BRANCHES.search(self.attributes)
        listed = re.findall(r"[\w.\-]+", branches[1]) if branches else []
        return [*_CALLED.findall(self.attributes), *listed]


@dataclass(frozen=True)
class Program:
    """The scheduled text of a compiled program, taken apart.

    Attributes:
      computations: instructions in the order in which they run, by computation.
      entry: the computation that a run starts with.
    """

    computations: dict[str, list[Instruction]]
    entry: str

    def matmuls(self, instruction: Instruction) -> int:
        """Matrix products that it runs, in itself and in what it calls; a kernel counts as one."""
        if instruction.opcode in ("dot", "convolution"):
            return 1
        if instruction.opcode == "custom-call":
            return int(any(target in instruction.attributes for target in _KERNELS))
        inner = (step for name in instruction.called for step in self.computations.get(name, ()))
        return self.trips(instruction) * sum(self.matmuls(step) for step in inner)

    def trips(self, instruction: Instruction) -> int:
        """How often it runs what it calls; 1 for a loop of unknown length."""
        if instruction.opcode != "while":
            return 1
        if known := _TRIPS.search(instruction.attributes):
            return int(known[1])
        # TPU programs do not say it. The loops of JAX count from 0 and go on while below a constant.
        condition = _CONDITION.search(instruction.attributes)
        steps = {step.name: step for step in self.computations.get(condition[1] if condition else "", ())}
        for step in steps.values():
            if step.opcode == "compare" and "direction=LT" in step.attributes:
                limits = [steps[name] for name in step.operands if name in steps]
                constants = [int(limit.arguments) for limit in limits if limit.opcode == "constant"]
                return constants[0] if constants else 1
        return 1

    def walk(self, name: str | None = None, times: int = 1) -> Iterator[tuple[str, int, list[Instruction]]]:
        """The entry and every computation reached through loops, branches and calls, with its runs."""
        name = name or self.entry
        yield name, times, self.computations[name]
        for instruction in self.computations[name]:
            if instruction.opcode in ("while", "conditional", "call"):
                for called in instruction.called:
                    yield from self.walk(called, times * self.trips(instruction))


def parse(text: str) -> Program:
    """Reads ``jax.stages.Compiled.as_text()``."""
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
    """One collective-permute of the program.

    Attributes:
      name: of the instruction that starts it.
      computation: where it stands: the entry, or the body of a loop.
      times: how often it runs in one run of the program.
      backward: whether JAX made it by transposing.
      array: type of what it sends, such as "bf16[2,1,8192,8,128]".
      size: bytes.
      cycle: devices until what is sent on and on comes back, 0 where that is not the same for all; the
        size of the ring for a hop, and none for an exchange that permutes the sequence once.
      matmuls: matrix products, or kernels, that run while it is in flight.
      meanwhile: what is scheduled while it is in flight, by opcode.
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
        """Whether there are products to hide it."""
        return self.matmuls > 0


def transfers(text: str) -> list[Transfer]:
    """Every collective-permute of a compiled program, in the order of its computations."""
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
    """What stands between the asynchronous instruction at ``place`` and its done; nothing for others."""
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
    """Hops of the ring that no product hides; positions and segment ids, which weigh nothing, left out."""
    return [
        transfer
        for transfer in transfers(text)
        if transfer.cycle == ring and not transfer.hidden and transfer.array.startswith(("f", "bf"))
    ]


def first_array(kind: str) -> tuple[str, int]:
    """The first array of a type, and its bytes."""
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


def compile_attention(
    machine: CompileTarget,
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 32,
    key_heads: int = 32,
    head_dim: int = 128,
    ring: int | None = None,
    causal: bool = True,
    kernel: str = "auto",
    dtype: str = "bfloat16",
) -> jax.stages.Compiled:
    """Attention and its gradients over a ring of the machine's devices; nothing runs, nothing is made.

    Args:
      machine: what to compile for.
      tokens: length of the whole sequence.
      batch: sequences.
      heads: of the queries.
      key_heads: of keys and values.
      head_dim: of each head.
      ring: devices of a ring; all where absent, else the others are on the data axis.
      causal: whether tokens attend to the past alone.
      kernel: one of ``agentic_ring.attention.KERNELS``.
      dtype: of q, k and v.

    Raises:
      DoesNotFitError: the program needs more memory than a device has.
    """
    mask = MaskSpec(causal=causal)
    mesh = make_mesh(shape_with_ring(ring, len(machine.devices)), devices=machine.devices)
    sharding = jax.NamedSharding(mesh, jax.P("data", "ring"))

    def array(n: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, tokens, n, head_dim), jnp.dtype(dtype), sharding=sharding)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple:
        output, vjp = jax.vjp(
            lambda q, k, v: attention(q, k, v, mesh=mesh, mask=mask, kernel=kernel, strategy="ring"), q, k, v
        )
        return output, vjp(d_output)

    lowered = jax.jit(both).lower(array(heads), array(key_heads), array(key_heads), array(heads))
    return machine.compile(lowered)


def main(
    hardware: Literal[tuple(HARDWARE)],  # pyright: ignore[reportInvalidTypeForm]
    tokens: int,
    topology: str | None = None,
    devices: int | None = None,
    batch: int = 1,
    heads: int = 32,
    key_heads: int = 32,
    head_dim: int = 128,
    ring: int | None = None,
    causal: bool = True,
    kernel: str = "auto",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    compiler_options: dict[str, str] = {},  # noqa: B006 (never changed)
) -> None:
    """Prints every transfer of compiled ring attention and what hides it.

    Args:
      hardware: what to compile for.
      tokens: length of the whole sequence.
      topology: arrangement of TPU chips, such as 4x4.
      devices: number of GPUs.
      batch: sequences.
      heads: of the queries.
      key_heads: of keys and values.
      head_dim: of each head.
      ring: devices of a ring; all where absent.
      causal: whether tokens attend to the past alone.
      kernel: which kernel computes a hop.
      dtype: of queries, keys and values.
      compiler_options: XLA flags and their values, such as
        xla_gpu_experimental_parallel_collective_overlap_limit 2, without which the GPU compiler keeps
        one transfer in flight at a time and a hop of the backward waits for the gradients.
    """
    jax.config.update("jax_platforms", "cpu")  # where JAX keeps its constants while it compiles
    machine = compile_target(hardware, topology, devices=devices)
    machine = replace(machine, compiler_options={**machine.compiler_options, **compiler_options})
    ring = ring or len(machine.devices)
    compiled = compile_attention(
        machine,
        tokens,
        batch=batch,
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        ring=ring,
        causal=causal,
        kernel=kernel,
        dtype=dtype,
    )
    text = compiled.as_text() or ""
    program = parse(text)
    table = Table("pass", "times", "sends", "MB", "kind", "products", "meanwhile", "in")
    for transfer in transfers(text):
        table.add_row(
            "backward" if transfer.backward else "forward",
            str(transfer.times),
            transfer.array,
            f"{transfer.size / 1e6:.1f}",
            "hop" if transfer.cycle == ring else "exchange",
            str(transfer.matmuls) if transfer.hidden else "none",
            ", ".join(f"{count} {opcode}" for opcode, count in transfer.meanwhile.most_common()),
            "entry" if transfer.computation == program.entry else "loop",
        )
    console = Console(width=200)
    console.print(table)
    for transfer in exposed(text, ring):
        console.print(
            f"not hidden: {transfer.name}, {transfer.size / 1e6:.1f} MB, {transfer.times} times, "
            f"{'backward' if transfer.backward else 'forward'}"
        )
    rates = machine.hardware
    sequences = batch / (len(machine.devices) // ring)
    products = 4 * sequences * heads * head_dim * (tokens / ring) ** 2 * (0.5 if causal else 1)
    block = 2 * sequences * key_heads * head_dim * (tokens / ring) * jnp.dtype(dtype).itemsize
    console.print(
        f"one hop forward: products {1e3 * products / rates.flops:.3f} ms "
        f"at {rates.flops / 1e12:.0f} TFLOP/s, transfer {1e3 * block / rates.link_bandwidth:.3f} ms "
        f"at {rates.link_bandwidth / 1e9:.0f} GB/s"
    )
    temporary: Any = compiled.memory_analysis()
    console.print(
        f"temporary memory {temporary.temp_size_in_bytes / 1e6:.0f} MB a device, "
        f"of which keys and values of one block are {block / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    run(main, description=__doc__)
