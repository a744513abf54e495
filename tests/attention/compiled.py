"""Reading a compiled program: how often it permutes, and under what."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Permutes(NamedTuple):
    """Executions of collective-permute in one run of a program."""

    floats: int
    integers: int
    conditional: int  # instructions, of either kind, that not every device need reach


def computations(compiled: jax.stages.Compiled) -> tuple[str, dict[str, list[str]]]:
    """The name of the entry, and the instructions of each computation by its name."""
    text = compiled.as_text()
    bodies, name = {}, ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header[1]
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    assert entry, "the program has no entry"
    return entry[1], bodies


def permutes(compiled: jax.stages.Compiled) -> Permutes:
    """Counts permutes by walking the computations of the program, loops times their trip count."""
    entry, bodies = computations(compiled)

    def walk(name: str, times: int, conditional: bool) -> Iterator[Permutes]:
        for line in bodies[name]:
            if " collective-permute(" in line or " collective-permute-start(" in line:
                is_float = re.search(r"= \(?(f32|bf16)\[", line) is not None
                yield Permutes(times * is_float, times * (not is_float), int(conditional))
            elif " while(" in line:
                trips = _TRIPS.search(line)
                body = re.search(r"body=%?([\w.\-]+)", line)
                assert body
                # How often a loop of unknown length runs is a condition: a device may run it less.
                yield from walk(body[1], times * int(trips[1]) if trips else 1, conditional or not trips)
            elif " conditional(" in line:
                branches = re.search(r"branch_computations=\{([^}]*)\}", line)
                pair = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
                for branch in re.findall(r"[\w.\-]+", branches[1]) if branches else pair:
                    yield from walk(branch, times, True)
            elif call := re.search(r" call\(.*to_apply=%?([\w.\-]+)", line):
                yield from walk(call[1], times, conditional)

    found = [Permutes(0, 0, 0), *walk(entry, 1, False)]
    return Permutes(*map(sum, zip(*found, strict=True)))


def conditionals(compiled: jax.stages.Compiled) -> int:
    """Conditional instructions in a program, wherever they stand."""
    return len(re.findall(r" conditional\(", compiled.as_text()))
