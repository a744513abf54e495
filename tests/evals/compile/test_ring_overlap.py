"""Overlap of a ring's transfers with compute, in the schedule of a program compiled for a TPU."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from agentic_ring.attention import attention
from agentic_ring.mesh import MeshShape, make_mesh
from evals.compile.machines import CompilerMissingError, compile_target

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
PRODUCT = re.compile(r' (?:dot|convolution)\(|custom_call_target="tpu_custom_call"')


class Hop(NamedTuple):
    """A permute after which an array is back on its device in ``ring`` repetitions."""

    times: int
    backward: bool
    floats: bool
    overlapped: bool


class Schedule:
    """The lines of each computation of ``jax.stages.Compiled.as_text()``, in the order in which they run."""

    def __init__(self, text: str):
        self.lines = {name: body.splitlines() for _, name, body in COMPUTATION.findall(text)}
        self.entry = next(name for entry, name, _ in COMPUTATION.findall(text) if entry)

    def called(self, line: str) -> list[str]:
        names = CALLED.findall(line) + re.findall(r"[\w.\-]+", " ".join(BRANCHES.findall(line)))
        return [name for name in names if name in self.lines]

    def computes(self, line: str) -> bool:
        """Whether a line, or what it calls, is a matrix product or a kernel."""
        inner = (other for name in self.called(line) for other in self.lines[name])
        return bool(PRODUCT.search(line)) or any(self.computes(other) for other in inner)

    def trips(self, line: str) -> int:
        """How often a loop runs, which counts from 0 up to a constant; 1 for other lines."""
        condition = re.search(r"condition=%?([\w.\-]+)", line)
        lines = self.lines[condition[1]] if condition else []
        limits = [int(limit) for line in lines for limit in re.findall(r" constant\((\d+)\)", line)]
        return limits[0] if len(limits) == 1 else 1

    def hops(self, ring: int, name: str = "", times: int = 1) -> Iterator[Hop]:
        lines = self.lines[name or self.entry]
        for place, line in enumerate(lines):
            if re.search(r" (?:while|conditional|call)\(", line):
                for called in self.called(line):
                    yield from self.hops(ring, called, times * self.trips(line))
            if not (start := re.search(r"%?([\w.\-]+) = (\S+).* collective-permute(-start)?\(", line)):
                continue
            target = dict(re.findall(r"\{(\d+),(\d+)\}", line))
            if {cycle(target, device) for device in target} != {ring}:
                continue  # brings the sequence into another order
            between = []
            if start[3]:
                done = rf" collective-permute-done\(.*%{re.escape(start[1])}\)"
                last = next(n for n, other in enumerate(lines) if n > place and re.search(done, other))
                between = lines[place + 1 : last]
            floats = re.match(r"\(?(f|bf)\d", start[2]) is not None
            yield Hop(times, "transpose(" in line, floats, any(map(self.computes, between)))


def cycle(target: dict[str, str], start: str) -> int:
    device, length = target[start], 1
    while device != start and device in target and length <= len(target):
        device, length = target[device], length + 1
    return length


@pytest.mark.slow
def test_every_hop_on_a_tpu_overlaps_compute():
    """Except the final transfer of dK and dV, after which nothing is left to compute."""
    try:
        target = compile_target("v5e", "4x4")
    except CompilerMissingError as error:
        pytest.skip(str(error))
    ring = len(target.devices)
    mesh = make_mesh(MeshShape(ring=ring), devices=target.devices)
    sequence = jax.NamedSharding(mesh, jax.P(None, "ring"))
    q, k = (
        jax.ShapeDtypeStruct((1, 16 * 1024, heads, 128), jnp.bfloat16, sharding=sequence) for heads in (4, 2)
    )

    def both(q, k, v, d_output):
        output, transpose = jax.vjp(lambda q, k, v: attention(q, k, v, mesh=mesh, strategy="ring"), q, k, v)
        return output, transpose(d_output)

    text = target.compile(jax.jit(both).lower(q, k, k, q)).as_text()
    found = list(Schedule(text).hops(ring))
    assert sum(hop.times for hop in found if not hop.backward) >= ring - 1
    late = [hop for hop in found if hop.floats and not hop.overlapped]
    assert len(late) <= 1
    assert all(hop.backward and hop.times == 1 for hop in late)
