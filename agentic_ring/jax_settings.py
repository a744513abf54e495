"""Settings of JAX that some machines need: no TPU library without TPUs, no cached programs of CPU rings."""

import importlib.util
import warnings
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def skip_absent_tpus(devices: Path = Path("/dev")) -> None:
    """Restricts JAX to the CPU where libtpu is installed and the machine has no accelerator.

    Call before anything asks JAX for its devices. JAX would ask libtpu for TPUs, which waits for a metadata
    server and prints errors about hosts that are not there. A choice of the user (JAX_PLATFORMS) stays.
    """
    if jax.config.values["jax_platforms"] or importlib.util.find_spec("libtpu") is None:
        return
    of_tpus, of_gpus = ("accel*", "vfio/[0-9]*"), ("nvidia*", "kfd", "dxg")
    if not any(any(devices.glob(pattern)) for pattern in (*of_tpus, *of_gpus)):
        jax.config.update("jax_platforms", "cpu")


def disable_cache_for_cpu_rings(platform: str, devices: int) -> None:
    """Switches JAX's compilation cache off, with a warning, before programs of several CPU devices.

    Where XLA for CPUs loads such a program, devices can meet in different transfers: a loaded ring returned
    wrong values in 18% of its runs or ended the process, a compiled one never (docs/notebook.md). ``devices``
    are those that a program spans, of all processes.
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
