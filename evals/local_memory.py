"""Does a compiled program fit the devices that are here? Asked before it runs."""

import jax

from agentic_ring.provenance import hardware
from evals.hardware import DoesNotFitError, planned_bytes

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
    stats, gib = jax.devices()[0].memory_stats(), hardware()["memory_gib"]
    needed = planned_bytes(compiled)
    if stats and "bytes_limit" in stats:
        limit = stats["bytes_limit"]
    elif jax.default_backend() == "cpu" and gib is not None:
        limit = MEMORY_SHARE * gib * 2**30
        needed *= devices
    else:
        return
    if needed > limit:
        raise DoesNotFitError(f"needs {needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB", needed)
