"""Does a program, or what it keeps, fit the devices that are here? Asked before it runs."""

import jax

from agentic_ring.provenance import hardware
from evals.compile.hardware import DoesNotFitError, planned_bytes

MEMORY_SHARE = 0.6
"""Of the memory of a machine without an accelerator; the rest is for the inputs and other programs."""


def check_fits_here(compiled: jax.stages.Compiled, devices: int) -> None:
    """Compares what a program plans with what there is.

    Args:
      compiled: the program.
      devices: that it runs on; simulated ones share the machine's memory.

    Raises:
      DoesNotFitError: there is less; nothing where that cannot be told.
    """
    check_bytes_here(planned_bytes(compiled) * devices, devices)


def check_bytes_here(needed: float, devices: int) -> None:
    """Compares bytes on all of these devices together with what there is.

    Raises:
      DoesNotFitError: there is less; nothing where that cannot be told.
    """
    stats, gib = jax.devices()[0].memory_stats(), hardware()["memory_gib"]
    if stats and "bytes_limit" in stats:
        limit = stats["bytes_limit"]
        needed /= devices
    elif jax.default_backend() == "cpu" and gib is not None:
        limit = MEMORY_SHARE * gib * 2**30
    else:
        return
    if needed > limit:
        raise DoesNotFitError(f"needs {needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB", needed)
