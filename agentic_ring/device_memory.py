"""Memory that compiled programs need per device, and the memory that the devices of this machine have."""

from dataclasses import dataclass
from typing import Any

import jax

from agentic_ring.errors import AgenticRingError
from agentic_ring.provenance import hardware

HOST_SHARE = 0.6
"""Share of the host's memory that a program on a CPU may use; the rest is for inputs and other programs."""


class DoesNotFitError(AgenticRingError, MemoryError):
    """A program needs more memory than there is: at least ``needed`` bytes, where that is known."""

    def __init__(self, message: str, needed: float | None = None):
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class PlannedMemory:
    """Bytes per device that the compiler plans for a program."""

    state: int
    """Arguments and results; those of a training step are parameters, optimiser state and batch. A result
    that takes the place of a donated argument does not count again."""
    temporary: int
    """Everything else that is alive at the same time."""
    host: int = 0
    """Bytes in the host's memory, such as what ``remat="offload"`` keeps there."""

    @property
    def total(self) -> int:
        """Bytes that a device must have."""
        return self.state + self.temporary

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "PlannedMemory":
        """Reads the plan of a compiled program."""
        plan: Any = compiled.memory_analysis()
        return cls(
            state=plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes,
            temporary=plan.temp_size_in_bytes,
            host=plan.host_temp_size_in_bytes + plan.host_argument_size_in_bytes,
        )


def bytes_limit(device: Any) -> int | None:
    """Returns the bytes that programs may use on a device, or None where its runtime does not say."""
    return (device.memory_stats() or {}).get("bytes_limit")


def memory_limit(devices: int, host_share: float) -> float | None:
    """Returns the bytes that programs may use on ``devices`` devices together, or None where unknown.

    Simulated devices share the host's memory, of which ``host_share`` counts where JAX computes on the CPU.
    """
    limit, host_gib = bytes_limit(jax.devices()[0]), hardware()["memory_gib"]
    if limit is not None:
        return limit * devices
    if jax.default_backend() == "cpu" and host_gib is not None:
        return host_share * host_gib * 2**30
    return None


def check_memory(needed: float, devices: int) -> None:
    """Raises a ``DoesNotFitError`` if it is known that ``needed`` bytes do not fit on ``devices`` devices."""
    limit = memory_limit(devices, HOST_SHARE)
    if limit is not None and needed > limit:
        raise DoesNotFitError(f"needs {needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB", needed)
