"""Machines that need not be there: what they can do, and devices to compile for them.

XLA compiles for a described machine without one at hand, so whether a program fits, and how its
transfers are scheduled, can be asked on a laptop. A successful compile says nothing about speed.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import jax
from jax.experimental import topologies

from agentic_ring.errors import AgenticRingError, ArgumentError, UnknownNameError

GPUS_A_HOST = 8
"""Of a DGX or HGX board, within which NVLink connects every pair."""

GPU_MEMORY_FRACTION = 0.95
"""Of a GPU's memory for XLA, to be set as XLA_PYTHON_CLIENT_MEM_FRACTION (JAX takes 0.75 unless told); the
rest is for the driver, the CUDA context and NCCL's buffers."""


class CompilerMissingError(AgenticRingError, ImportError):
    """The compiler for this hardware is an optional dependency that is not installed."""


class DoesNotFitError(AgenticRingError, MemoryError):
    """A program needs more memory than a device has: ``needed`` bytes or more, where that is known."""

    def __init__(self, message: str, needed: float | None = None):
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class Hardware:
    """One device, as JAX counts them: a GPU, a TPU chip, or one of the two cores of a TPU chip.

    Attributes:
      name: as on the command line.
      platform: XLA's word.
      memory: bytes that a program may use: what the TPU compiler says when a program needs more, and
        the whole memory of a GPU, of which the driver keeps some hundred MB.
      flops: peak bfloat16 operations a second, matrices dense.
      memory_bandwidth: bytes a second.
      link_bandwidth: bytes a second that a device can send to its neighbour in a ring while it receives
        as much: one link of a TPU torus, all NVLinks of a GPU.
      target: further fields of XLA's description of a GPU.
      chip: arguments of the TPU topology beside its name.
    """

    name: str
    platform: Literal["tpu", "cuda"]
    memory: float
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    target: Mapping[str, Any] = field(default_factory=dict)
    chip: Mapping[str, Any] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """Bytes that a program is allowed: of a GPU's memory the share that a careful user gives JAX."""
        return self.memory * (GPU_MEMORY_FRACTION if self.platform == "cuda" else 1.0)

    @property
    def compiler_installed(self) -> bool:
        """Whether ``describe`` can be asked, in a process where JAX has not looked for devices yet."""
        packages = ("libtpu",) if self.platform == "tpu" else ("jax_cuda13_plugin", "jax_cuda12_plugin")
        return any(find_spec(package) for package in packages)

    @property
    def compiler_extra(self) -> str:
        """What to install where it is not."""
        return "aot" if self.platform == "tpu" else "cuda13"


_GIB = 2.0**30

_HOPPER = {
    "shared_memory_per_core": 233472,
    "shared_memory_per_block_optin": 232448,
    "core_count": 132,
    "fpus_per_core": 128,
    "l2_cache_size": 52428800,
    "clock_rate_ghz": 1.98,
    "cuda_compute_capability": "{ major: 9 feature_extension: ACCELERATED_FEATURES }",
}
_AMPERE = {
    "shared_memory_per_core": 167936,
    "shared_memory_per_block_optin": 166912,
    "core_count": 108,
    "fpus_per_core": 64,
    "l2_cache_size": 41943040,
    "clock_rate_ghz": 1.41,
    "cuda_compute_capability": "{ major: 8 }",
}
# Two cores of a chip as one device, as programs see them since v4.
_MEGACORE = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}

# Memory of TPUs: the limit in the out-of-memory message of libtpu 0.0.42.1. Their rates: the table of
# https://jax-ml.github.io/scaling-book/tpus (per chip; halved where a device is one of two cores), v7
# from https://cloud.google.com/tpu/docs/tpu7x. GPUs: https://www.nvidia.com/en-us/data-center/a100,
# /h100 and /h200, SXM variants; NVLink halved to one direction; memory and target fields from
# https://github.com/openxla/xla, xla/backends/gpu/target_config/specs.
HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware("a100", "cuda", 85100068864, 312e12, 2.039e12, 300e9, target=_AMPERE),
        Hardware("h100", "cuda", 84942979072, 989e12, 3.352e12, 450e9, target=_HOPPER),
        Hardware("h200", "cuda", 151397597184, 989e12, 4.8e12, 450e9, target=_HOPPER),
        Hardware("v3", "tpu", 15.48 * _GIB, 61.5e12, 0.45e12, 100e9),
        Hardware("v4", "tpu", 30.75 * _GIB, 275e12, 1.2e12, 45e9, chip=_MEGACORE),
        Hardware("v5e", "tpu", 15.75 * _GIB, 197e12, 0.81e12, 45e9),
        Hardware("v5p", "tpu", 95.74 * _GIB, 459e12, 2.8e12, 90e9),
        Hardware("v6e", "tpu", 31.25 * _GIB, 920e12, 1.6e12, 90e9),
        Hardware("tpu7x", "tpu", 94.75 * _GIB, 1153e12, 3.7e12, 100e9),
    )
}


@dataclass(frozen=True)
class Machine:
    """Devices to compile for; they run nothing.

    Attributes:
      hardware: what each of them is.
      devices: for ``agentic_ring.mesh.make_mesh``.
      compiler_options: what the compiler must be told where there is no machine.
    """

    hardware: Hardware
    devices: tuple[Any, ...]
    compiler_options: Mapping[str, Any]

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a program that was lowered for these devices.

        Raises:
          DoesNotFitError: it needs more memory than a device has. The TPU compiler says so by itself;
            for GPUs what it plans is compared with the memory.
        """
        limit, name = self.hardware.limit, self.hardware.name
        try:
            compiled = lowered.compile(compiler_options=dict(self.compiler_options))
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            if "RESOURCE_EXHAUSTED" not in reason:
                raise
            raise DoesNotFitError(f"does not fit {name}: {reason}", _bytes_used(reason)) from error
        needed = planned_bytes(compiled)
        if needed > limit:
            raise DoesNotFitError(
                f"does not fit {name}: needs {needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB", needed
            )
        return compiled


def _bytes_used(reason: str) -> float | None:
    """From the TPU compiler's words, "Used 37.50G of 15.75G hbm" or "temporaries (21.51G) exceeds"."""
    found = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", reason)
    return float(found[1]) * 2.0 ** (10 * ("KMGT".index(found[2]) + 1)) if found else None


def planned_bytes(compiled: jax.stages.Compiled) -> int:
    """What a program needs of a device at once: arguments, results and everything between."""
    plan: Any = compiled.memory_analysis()
    results = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return plan.argument_size_in_bytes + results + plan.temp_size_in_bytes


def describe(name: str, topology: str | None = None, *, devices: int | None = None) -> Machine:
    """A machine by the name of its devices and their arrangement.

    Args:
      name: one of ``HARDWARE``.
      topology: of TPU chips, such as "4x4"; a v3 chip counts as two devices. Not for GPUs.
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
        return Machine(hardware, _tpus(hardware, topology), {})
    if devices is None or topology is not None:
        raise ArgumentError(f"{name} needs a number of devices, such as 8, and no topology")
    # Tuning times candidates on a GPU, and there is none; untuned, XLA's own matrix products find no tiles
    # for some shapes, such as 3200 x 3200, so that all are left to cuBLAS.
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return Machine(hardware, _gpus(hardware, devices), options)


def _example(name: str) -> str:
    return "4x4" if name in ("v3", "v5e", "v6e") else "2x2x4"


def _tpus(hardware: Hardware, topology: str) -> tuple[Any, ...]:
    # Elsewhere libtpu would wait for the metadata server of a TPU host, and refuse a second process.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # Nor need it warn that it found no such host.
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
    if count < 1 or (count > GPUS_A_HOST and count % GPUS_A_HOST):
        raise ArgumentError(f"{count} GPUs; choose 1 to {GPUS_A_HOST}, or a multiple of {GPUS_A_HOST}")
    hosts = max(1, count // GPUS_A_HOST)
    # The plugin looks for a driver when it is loaded.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        description = topologies.get_topology_desc(
            hardware.name,
            platform="cuda",
            topology=f"1x{hosts}x{count // hosts}",  # slices x hosts x GPUs of a host
            target_config=_target_config(hardware),
        )
    except (ImportError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise CompilerMissingError(
            f"compiling for {hardware.name} needs JAX's CUDA plugin; run: pip install 'agentic_ring[cuda13]'"
        ) from error
    return tuple(description.devices)


def _target_config(hardware: Hardware) -> str:
    """XLA's GpuTargetConfigProto as text."""
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
