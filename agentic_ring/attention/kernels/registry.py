"""Which kernel runs: the table of kernels, the platforms they serve, and the choice of "auto".

To add a kernel: write its file, add its constructor to ``_KERNELS`` and its name to the orders of
the platforms it serves.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentic_ring.attention.kernels.cudnn import CudnnKernel
from agentic_ring.attention.kernels.interface import Gradients, Kernel, Saved, SoftmaxState, Tile
from agentic_ring.attention.kernels.splash import SplashKernel
from agentic_ring.attention.kernels.vanilla import VanillaKernel
from agentic_ring.attention.kernels.xla import XlaKernel
from agentic_ring.errors import ArgumentError, UnknownNameError
from agentic_ring.mesh import mesh_platform

_log = logging.getLogger(__name__)

_KERNELS: dict[str, Callable[..., Kernel]] = {
    "xla": XlaKernel,
    "vanilla": VanillaKernel,
    "cudnn": CudnnKernel,
    "splash": SplashKernel,
}
_PLATFORM = {"cudnn": "gpu", "splash": "tpu"}
"""Kernels that run on one platform only."""
_ORDER: dict[str, tuple[str, ...]] = {"cpu": ("xla",), "gpu": ("cudnn", "xla"), "tpu": ("splash", "xla")}
"""What ``auto`` tries, best first, by platform."""

KERNELS: tuple[str, ...] = ("auto", *_KERNELS)


def select_kernel(
    name: str,
    query_chunk: int | None = None,
    key_chunk: int | None = None,
    platform: str | None = None,
    run: int | None = None,
) -> Kernel:
    """The kernel of this name; "auto" is the first of the platform's that serves the case.

    The platform ("cpu", "gpu" or "tpu") is that of the ambient mesh where absent. ``run`` is the tokens of a
    stripe, where the sequence lies in stripes; see ``XlaKernel``.

    Raises:
      UnknownNameError: no kernel bears the name.
      ArgumentError: a kernel for another platform; a chunk size below 1, or for a kernel without chunks.
    """
    platform = mesh_platform() if platform is None else platform
    if platform != _PLATFORM.get(name, platform):
        raise ArgumentError(
            f"kernel is {name!r}, which runs on {_PLATFORM[name]} devices, but these are {platform}; leave "
            f"kernel out, or choose one of: {', '.join(n for n in KERNELS if n not in _PLATFORM)}"
        )
    if name != "auto" and name not in _KERNELS:
        raise UnknownNameError("kernel", name, ("auto", *_KERNELS))
    for argument, size in (("query_chunk", query_chunk), ("key_chunk", key_chunk)):
        if size is not None and name not in ("auto", "xla"):
            raise ArgumentError(f"{argument} is {size}, but the {name} kernel has no chunks; leave it out")
        if size is not None and size < 1:
            raise ArgumentError(f"{argument} is {size}; it must be at least 1")

    def make(name: str) -> Kernel:
        if name != "xla":
            return _KERNELS[name]()
        return XlaKernel(query_chunk, key_chunk, run, all_streams=platform != "cpu")

    if name != "auto":
        return make(name)
    return FirstThatServes(tuple((candidate, make(candidate)) for candidate in _ORDER[platform]))


def hardware_kernels(name: str) -> "FirstThatServes":
    """The kernel of this name if it runs on one platform only; of "auto" those that do. Perhaps none."""
    kernel = select_kernel(name)
    candidates = kernel.candidates if isinstance(kernel, FirstThatServes) else ((name, kernel),)
    return FirstThatServes(tuple(pair for pair in candidates if pair[0] in _PLATFORM))


@dataclass(frozen=True)
class FirstThatServes:
    """A kernel that passes each case to the first of ``candidates``, (name, kernel) pairs, that takes it."""

    candidates: tuple[tuple[str, Kernel], ...]

    def forward(self, tile: Tile) -> SoftmaxState:
        return self._first("forward", tile)

    def backward(self, tile: Tile, saved: Saved) -> Gradients:
        return self._first("backward", tile, saved)

    def _first(self, direction: str, *arguments: Any) -> Any:
        refusals = []
        for name, kernel in self.candidates:
            try:
                result = getattr(kernel, direction)(*arguments)
            except NotImplementedError as refusal:
                refusals.append(f"{name}: {refusal}")
                continue
            log_once(f"attention {direction} runs the {name} kernel", *refusals)
            return result
        raise NotImplementedError("no kernel serves this case; " + "; ".join(refusals))


@functools.cache
def log_once(choice: str, *refusals: str) -> None:
    """Says which kernel runs, and why not others; the same only once."""
    _log.info("%s%s", choice, "".join(f"; not {refusal}" for refusal in refusals))
