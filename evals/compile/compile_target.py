"""Compile targets: described devices for which XLA compiles ahead of time, without the hardware.

Whether a program fits, and how its transfers are scheduled, can so be found out on a laptop. A successful
compile says nothing about speed.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from agentic_ring.device_memory import DoesNotFitError, PlannedMemory
from agentic_ring.errors import AgenticRingError, ArgumentError, UnknownNameError
from evals.compile.hardware import HARDWARE, Hardware

GPUS_PER_HOST = 8
"""GPUs of a DGX or HGX board, within which NVLink connects every pair."""


class CompilerMissingError(AgenticRingError, ImportError):
    """The compiler for this hardware is an optional dependency that is not installed."""


@dataclass(frozen=True)
class CompileTarget:
    """Devices to compile for; nothing can run on them.

    Attributes:
      hardware: the specification of each device.
      devices: for ``agentic_ring.mesh.make_mesh``.
      compiler_options: options that the compiler needs where the hardware is absent.
    """

    hardware: Hardware
    devices: tuple[Any, ...]
    compiler_options: Mapping[str, Any]

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a program that was lowered for these devices.

        Raises:
          DoesNotFitError: the program needs more memory than a device has. The TPU compiler reports this
            itself; for GPUs the planned memory is compared with the limit.
        """
        limit, name = self.hardware.limit, self.hardware.name
        try:
            compiled = lowered.compile(compiler_options=dict(self.compiler_options))
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            if "RESOURCE_EXHAUSTED" not in reason:
                raise
            raise DoesNotFitError(f"does not fit {name}: {reason}", _bytes_used(reason)) from error
        needed = PlannedMemory.of(compiled).total
        if needed > limit:
            raise DoesNotFitError(
                f"does not fit {name}: needs {needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB", needed
            )
        return compiled


def _bytes_used(reason: str) -> float | None:
    """Reads the TPU compiler's message: "Used 37.50G of 15.75G hbm" or "temporaries (21.51G) exceeds"."""
    found = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", reason)
    return float(found[1]) * 2.0 ** (10 * ("KMGT".index(found[2]) + 1)) if found else None


def compile_target(name: str, topology: str | None = None, *, devices: int | None = None) -> CompileTarget:
    """Returns devices of one kind to compile for.

    Args:
      name: one of ``HARDWARE``.
      topology: arrangement of TPU chips, such as "4x4"; a v3 chip counts as two devices. Not for GPUs.
      devices: number of GPUs; more than 8 are spread over hosts of 8. Not for TPUs.

    Raises:
      UnknownNameError: no such hardware.
      ArgumentError: an arrangement that does not exist.
      CompilerMissingError: the compiler for the platform is not installed.
    """
    if name not in HARDWARE:
        raise UnknownNameError("hardware", name, tuple(HARDWARE))
    hardware = HARDWARE[name]
    if hardware.platform == "tpu":
        if topology is None or devices is not None:
            raise ArgumentError(f"{name} needs a topology of chips, such as {_example(name)!r}, and no count")
        return CompileTarget(hardware, _tpus(hardware, topology), {})
    if devices is None or topology is not None:
        raise ArgumentError(f"{name} needs a number of devices, such as 8, and no topology")
    # Autotuning times candidates on a GPU, and there is none. Without it XLA's own matrix products find no
    # tiles for some shapes, such as 3200 x 3200, so all are left to cuBLAS.
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return CompileTarget(hardware, _gpus(hardware, devices), options)


def _example(name: str) -> str:
    return "4x4" if name in ("v3", "v5e", "v6e") else "2x2x4"


def _tpus(hardware: Hardware, topology: str) -> tuple[Any, ...]:
    # Without these libtpu waits for the metadata server of a TPU host, and refuses a second process.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # Without these it warns that it found no such host.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    layout = f"{hardware.name}:{topology}"
    try:
        description = topologies.get_topology_desc(layout, platform="tpu", **hardware.chip)
    except jax.errors.JaxRuntimeError as error:
        raise ArgumentError(
            f"{layout} is no arrangement of TPU chips, try {hardware.name}:{_example(hardware.name)}; {error}"
        ) from error
    except (ImportError, RuntimeError) as error:
        raise CompilerMissingError(
            f"compiling for {hardware.name} needs libtpu; run: pip install 'agentic_ring[aot]'"
        ) from error
    return tuple(description.devices)


def _gpus(hardware: Hardware, count: int) -> tuple[Any, ...]:
    if count < 1 or (count > GPUS_PER_HOST and count % GPUS_PER_HOST):
        raise ArgumentError(f"{count} GPUs; choose 1 to {GPUS_PER_HOST}, or a multiple of {GPUS_PER_HOST}")
    hosts = max(1, count // GPUS_PER_HOST)
    # The plugin looks for a driver when it is loaded.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        description = topologies.get_topology_desc(
            hardware.name,
            platform="cuda",
            topology=f"1x{hosts}x{count // hosts}",  # slices x hosts x GPUs of a host
            target_config=_gpu_target_config(hardware),
        )
    except (ImportError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise CompilerMissingError(
            f"compiling for {hardware.name} needs JAX's CUDA plugin; run: pip install 'agentic_ring[cuda13]'"
        ) from error
    return tuple(description.devices)


def _gpu_target_config(hardware: Hardware) -> str:
    """Returns XLA's GpuTargetConfigProto as text."""
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "threads_per_core_limit": 2048,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "memory_bandwidth": int(hardware.memory_bandwidth),
        "device_memory_size": int(hardware.memory),
        **hardware.target,
    }
    fields = "\n".join(f"  {key}: {value}" for key, value in info.items())
    return (
        f"gpu_device_info {{\n{fields}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 }\n"
        f'device_description_str: "{hardware.name}"\n'
    )
