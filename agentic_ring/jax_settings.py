"""Settings of JAX that some machines need: no TPU library without TPUs, no cached programs of CPU rings."""

import importlib.util
import warnings
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

_ACCELERATORS = ("accel*", "vfio/[0-9]*", "nvidia*", "kfd", "dxg")
"""Device files of TPUs (the first two) and of GPUs, below /dev."""


def skip_absent_tpus(devices: Path = Path("/dev")) -> None:
    """Restricts JAX to the CPU where libtpu is installed and the machine has no accelerator.

    Call before anything asks JAX for its devices. JAX would ask libtpu for TPUs, which waits for a metadata
    server and prints errors about hosts that are not there. A choice of the user (JAX_PLATFORMS) stays.
    """
    if jax.config.values["jax_platforms"] or importlib.util.find_spec("libtpu") is None:
        return
    if not any(any(devices.glob(pattern)) for pattern in _ACCELERATORS):
        jax.config.update("jax_platforms", "cpu")


def disable_cache_for_cpu_rings(platform: str, devices: int) -> None:
    """Switches JAX's compilation cache off, with a warning, before programs of several CPU devices.

    Where XLA for CPUs loads such a program, devices can meet in different transfers: 200 of 1,100 runs of one
    loaded ring returned wrong values (jaxlib 0.10.2); on jaxlib 0.12.0 88 of 400 did, and XLA ended two of
    three processes. Compiled, the same ring erred in none of 4,200 runs (docs/notebook.md). ``devices`` are
    those that a program spans, of all processes.
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
