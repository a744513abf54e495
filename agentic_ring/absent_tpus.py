"""Keeps libtpu unloaded on machines without TPUs, where the extra ``aot`` brings it as a compiler."""

import importlib.util
from pathlib import Path

import jax

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
