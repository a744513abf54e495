"""Profiles a program with ``jax.profiler`` and lists the kernels that took the most time."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from agentic_ring.errors import DataError

_CONTAINERS = re.compile(r"^(while|conditional|call)(\.|$)")
"""Operations whose time is that of the operations in them."""


class KernelTime(NamedTuple):
    """Time of one kernel, or of one operation on a device without kernels, such as a CPU.

    ``name`` lacks the trailing number of the instance; ``seconds`` are of all runs on all devices, without
    those of nested operations; ``share`` is that of the seconds of all kernels.
    """

    name: str
    seconds: float
    runs: int
    share: float


def trace(directory: Path, run: Callable[[], Any]) -> list[KernelTime]:
    """Saves a profile of one run of a compiled program, for XProf or Perfetto, and returns its kernels."""
    # A profile for Perfetto keeps a million events: Python's own calls would displace kernels.
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(directory), profiler_options=options):
        jax.block_until_ready(run())
    return kernel_times(directory)


def kernel_times(directory: Path) -> list[KernelTime]:
    """Returns the kernels of the latest profile under ``directory``, longest first; a DataError without."""
    found = max(directory.glob("plugins/profile/*/*.xplane.pb"), default=directory / "*.xplane.pb")
    try:
        profile = ProfileData.from_serialized_xspace(found.read_bytes())
    except (OSError, RuntimeError) as error:
        raise DataError(f"{found} is no profile of jax.profiler: {error!r:.200}; trace again") from error
    runs: defaultdict[str, list[float]] = defaultdict(list)
    for events in _lines(profile):
        for name, own in _own_seconds(events):
            runs[name].append(own)
    total = sum(map(sum, runs.values()))
    if not total:
        raise DataError(f"{found} shows no kernels; trace a step that computes on a device")
    kernels = [KernelTime(name, sum(own), len(own), sum(own) / total) for name, own in runs.items()]
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


def _lines(profile: Any) -> list[list[Any]]:
    """Returns the events of each stream of a GPU, of a TPU's operations, or of the threads of a CPU."""
    lines = [(plane.name, line) for plane in profile.planes for line in plane.lines]
    for name in ("Stream", "XLA Ops"):
        found = [line for plane, line in lines if plane.startswith("/device:") and line.name.startswith(name)]
        if found:
            return [list(line.events) for line in found]
    return [[e for e in line.events if any(key == "hlo_op" for key, _ in e.stats)] for _, line in lines]


def _own_seconds(events: list[Any]) -> Iterator[tuple[str, float]]:
    """Yields each computing event's name and seconds, without those of events nested in it."""
    timed = sorted((event.start_ns, -event.duration_ns, event.name) for event in events)
    own = [-negative for _, negative, _ in timed]
    enclosing: list[int] = []
    for index, (start, negative, _) in enumerate(timed):
        while enclosing and timed[enclosing[-1]][0] - timed[enclosing[-1]][1] <= start:
            enclosing.pop()
        if enclosing:
            own[enclosing[-1]] += negative
        enclosing.append(index)
    for (_, _, name), left in zip(timed, own, strict=True):
        short = name.partition(" = ")[0].removeprefix("%")  # a TPU's operation has its whole text as a name
        if not _CONTAINERS.match(short):
            yield re.sub(r"(\.\d+)+$", "", short), max(0.0, left) / 1e9
