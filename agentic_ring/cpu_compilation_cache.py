"""Keeps programs of several CPU devices out of JAX's compilation cache, from which they come back damaged."""

import warnings

import jax
from jax.experimental.compilation_cache import compilation_cache


def disable_cache_for_cpu_rings(platform: str, devices: int) -> None:
    """Switches JAX's compilation cache off, with a warning, before programs of several CPU devices.

    Where XLA for CPUs loads such a program, devices can meet in different transfers: 200 of 1,100 runs of one
    loaded ring returned wrong values (jaxlib 0.10.2); on jaxlib 0.12.0 88 of 400 did, and XLA ended two of
    three processes. Compiled, the same ring erred in none of 4,200 runs (docs/notebook.md).

    Args:
      platform: "cpu", "gpu" or "tpu".
      devices: those that a program spans, of all processes.
    """
    settings = jax.config.values
    folder = settings["jax_compilation_cache_dir"]
    if platform != "cpu" or devices == 1 or not folder or not settings["jax_enable_compilation_cache"]:
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks only once in a process whether there is a cache
    warnings.warn(
        f"JAX's compilation cache ({folder}) is off in this process: a program of {devices} CPU devices that "
        "is loaded from it can return wrong values or end the process. Unset JAX_COMPILATION_CACHE_DIR, or "
        "set JAX_ENABLE_COMPILATION_CACHE=false, to be rid of this warning.",
        RuntimeWarning,
        stacklevel=3,
    )
