"""Hardware specifications, machines by name, and compile targets: described devices to compile for.

XLA compiles ahead of time for devices that are not here. Whether a program fits, and how its transfers are
scheduled, can so be found out on a laptop. A successful compile says nothing about speed.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental import topologies

from agentic_ring.device_memory import DoesNotFitError, PlannedMemory
from agentic_ring.errors import AgenticRingError, ArgumentError, UnknownNameError

GPU_MEMORY_FRACTION = 0.95
"""Share of a GPU's memory that XLA may use, by XLA_PYTHON_CLIENT_MEM_FRACTION (JAX's default is 0.75); the
rest is for the driver, the CUDA context and NCCL's buffers."""
GPUS_PER_HOST = 8
"""GPUs of a DGX or HGX board, within which NVLink connects every pair."""


class CompilerMissingError(AgenticRingError, ImportError):
    """The compiler for this hardware is an optional dependency that is not installed."""


@dataclass(frozen=True)
class Hardware:
    """Specification of one device as JAX counts them: a GPU, a TPU chip, or one of the two cores of a chip.

    Attributes:
      memory: bytes of a device; of a TPU those that the compiler says a program may use, of a GPU all, of
        which the driver keeps some hundred MB.
      flops: peak dense bfloat16 operations per second.
      memory_bandwidth: bytes per second.
      link_bandwidth: bytes per second that a device can send to its neighbour in a ring while it receives
        as many: one link of a TPU torus, all NVLinks of a GPU.
      description: further fields of XLA's description of a GPU, or arguments of a TPU's topology.
    """

    name: str
    platform: Literal["tpu", "cuda"]
    memory: float
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    description: Mapping[str, Any] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """Bytes that a program may use: all of a TPU's, of a GPU's the share that JAX is told to take."""
        return self.memory * (GPU_MEMORY_FRACTION if self.platform == "cuda" else 1.0)

    @property
    def compiler_installed(self) -> bool:
        """Whether programs can be compiled for it here, if JAX has not looked for devices yet."""
        packages = ("libtpu",) if self.platform == "tpu" else ("jax_cuda13_plugin", "jax_cuda12_plugin")
        return any(find_spec(package) for package in packages)

    @property
    def compiler_extra(self) -> str:
        """The extra of this package that installs the compiler."""
        return "aot" if self.platform == "tpu" else "cuda13"


_GIB = 2.0**30
_DATA = json.loads(Path(__file__).with_name("hardware.json").read_text())
_GPU_FIELDS = _DATA["gpu_fields"]
# Two cores of a chip as one device, as programs see them since v4.
_MEGACORE = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}

# Memory of TPUs: the limit in the out-of-memory message of libtpu 0.0.42.1. Their rates: the table of
# https://jax-ml.github.io/scaling-book/tpus (per chip; halved where a device is one of two cores), v7
# from https://cloud.google.com/tpu/docs/tpu7x. GPUs: https://www.nvidia.com/en-us/data-center/a100,
# /h100 and /h200, SXM variants; NVLink halved to one direction; memory and fields from
# https://github.com/openxla/xla, xla/backends/gpu/target_config/specs.
HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware("a100", "cuda", 85100068864, 312e12, 2.039e12, 300e9, _GPU_FIELDS["a100"]),
        Hardware("h100", "cuda", 84942979072, 989e12, 3.352e12, 450e9, _GPU_FIELDS["h100"]),
        Hardware("h200", "cuda", 151397597184, 989e12, 4.8e12, 450e9, _GPU_FIELDS["h100"]),
        Hardware("v3", "tpu", 15.48 * _GIB, 61.5e12, 0.45e12, 100e9),
        Hardware("v4", "tpu", 30.75 * _GIB, 275e12, 1.2e12, 45e9, _MEGACORE),
        Hardware("v5e", "tpu", 15.75 * _GIB, 197e12, 0.81e12, 45e9),
        Hardware("v5p", "tpu", 95.74 * _GIB, 459e12, 2.8e12, 90e9),
        Hardware("v6e", "tpu", 31.25 * _GIB, 920e12, 1.6e12, 90e9),
        Hardware("tpu7x", "tpu", 94.75 * _GIB, 1153e12, 3.7e12, 100e9),
    )
}
"""Every kind of device by its name."""

DEVICE_KINDS: dict[str, str] = _DATA["device_kinds"]
"""Names of hardware by JAX's complete device kind: an H100 on another board has another peak."""

# Autotuning times candidates on a GPU, and there is none. Without it XLA's own matrix products find no tiles
# for some shapes, such as 3200 x 3200, so all are left to cuBLAS.
_COMPILER_OPTIONS = {"tpu": {}, "cuda": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}}


@dataclass(frozen=True)
class CompileTarget:
    """Devices to compile for, on which nothing can run."""

    hardware: Hardware
    devices: tuple[Any, ...]

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a program that was lowered for these devices; a DoesNotFitError if it needs more memory.

        The TPU compiler reports this itself; for GPUs the planned memory is compared with the limit.
        """
        limit, name = self.hardware.limit, self.hardware.name
        try:
            compiled = lowered.compile(compiler_options=_COMPILER_OPTIONS[self.hardware.platform])
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            if "RESOURCE_EXHAUSTED" not in reason:
                raise
            # "Used 37.50G of 15.75G hbm" or "temporaries (21.51G) exceeds"
            used = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", reason)
            needed = float(used[1]) * 2.0 ** (10 * ("KMGT".index(used[2]) + 1)) if used else None
            raise DoesNotFitError(f"does not fit {name}: {reason}", needed) from error
        needed = PlannedMemory.of(compiled).total
        if needed > limit:
            message = f"does not fit {name}: needs {needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB"
            raise DoesNotFitError(message, needed)
        return compiled


def compile_target(hardware: Hardware, arrangement: str | int) -> CompileTarget:
    """Returns devices of one kind to compile for.

    Args:
      arrangement: topology of TPU chips, such as "4x4", where a v3 chip counts as two devices; or number of
        GPUs, of which more than 8 are spread over hosts of 8.
    """
    name, platform = hardware.name, hardware.platform
    if isinstance(arrangement, str):
        # Without the first two libtpu waits for the metadata server of a TPU host, and refuses a second
        # process; without the others it warns that it found no such host.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        layout, arguments = f"{name}:{arrangement}", hardware.description
    else:
        if arrangement < 1 or arrangement % min(arrangement, GPUS_PER_HOST):
            raise ArgumentError(
                f"{arrangement} {name}; choose 1 to {GPUS_PER_HOST} GPUs, or a multiple of {GPUS_PER_HOST}"
            )
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # its plugin looks for a driver
        layout, arguments = name, _gpu_description(hardware, arrangement)
    try:
        devices = topologies.get_topology_desc(layout, platform=platform, **arguments).devices
    except (ImportError, RuntimeError, NotImplementedError, AssertionError) as error:
        if platform == "tpu" and isinstance(error, jax.errors.JaxRuntimeError):
            raise
        raise CompilerMissingError(
            f"the compiler for {name} is missing; run: pip install 'agentic_ring[{hardware.compiler_extra}]'"
        ) from error
    return CompileTarget(hardware, tuple(devices))


def _gpu_description(hardware: Hardware, count: int) -> dict[str, str]:
    """Returns the arguments of a topology of ``count`` GPUs."""
    memory = {"memory_bandwidth": int(hardware.memory_bandwidth), "device_memory_size": int(hardware.memory)}
    info = _GPU_FIELDS["every"] | memory | hardware.description
    fields = " ".join(f"{key}: {value}" for key, value in info.items())
    config = (  # XLA's GpuTargetConfigProto as text
        f'gpu_device_info {{ {fields} }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} '
        f'device_description_str: "{hardware.name}"'
    )
    hosts = max(1, count // GPUS_PER_HOST)
    return {"topology": f"1x{hosts}x{count // hosts}", "target_config": config}  # slices x hosts x GPUs


@dataclass(frozen=True)
class NamedMachine:
    """A machine by its usual name, such as 8xA100 or TPUv5e-256.

    Attributes:
      devices: number of devices that JAX sees.
      host_memory: bytes of the host's memory per device.
      topology: arrangement of TPU chips; None for GPUs.
      paper: its name in the paper's Tables 3 and 4, if it is there.
      note: how the name maps to devices, where that is not plain.
    """

    name: str
    hardware: Hardware
    devices: int
    host_memory: float
    topology: str | None = None
    paper: str | None = None
    note: str = ""

    def compile_target(self) -> CompileTarget:
        """Returns the machine's devices to compile for; see ``compile_target`` for errors."""
        return compile_target(self.hardware, self.topology or self.devices)


_CORE_DEVICES = "TPUs of this generation are named after their cores, and JAX sees each core as a device"
_MEGACORE_DEVICES = "1024 counts cores; since v4 the two cores of a chip are one device, so JAX sees 512"
_TWO_PER_CHIP = "128 chips, each of their two cores a device"
_A100, _H100 = HARDWARE["a100"], HARDWARE["h100"]

# Host memory per device: NVIDIA's DGX A100 640GB, H100 and H200 systems (2 TB for 8 GPUs);
# Cloud TPU machine types, https://cloud.google.com/tpu/docs/v5e and its siblings (v3-8: 340 GB for 8 cores,
# v4: 407 GB for 4 chips, v5e: 192 for 4, v5p: 448 for 4, v6e: 720 for 4, TPU7x: 960 for 4 of two devices).
MACHINES: dict[str, NamedMachine] = {
    machine.name: machine
    for machine in (
        NamedMachine("8xA100", _A100, 8, 250e9, paper="8x A100 NVLink"),
        NamedMachine("32xA100", _A100, 32, 250e9, paper="32x A100 InfiniBand", note="4 hosts of 8"),
        NamedMachine("TPUv3-512", HARDWARE["v3"], 512, 42e9, "16x16", "TPUv3-512", _CORE_DEVICES),
        NamedMachine("TPUv4-1024", HARDWARE["v4"], 512, 101e9, "8x8x8", "TPUv4-1024", _MEGACORE_DEVICES),
        NamedMachine("TPUv5e-256", HARDWARE["v5e"], 256, 48e9, "16x16", "TPUv5e-256"),
        NamedMachine("4xH100", _H100, 4, 250e9),
        NamedMachine("8xH100", _H100, 8, 250e9),
        NamedMachine("8xH200", HARDWARE["h200"], 8, 250e9),
        NamedMachine("TPUv5p-256", HARDWARE["v5p"], 256, 112e9, "4x8x8", note="256 chips, a device each"),
        NamedMachine("TPUv6e-256", HARDWARE["v6e"], 256, 180e9, "16x16"),
        NamedMachine("TPU7x-256", HARDWARE["tpu7x"], 256, 120e9, "4x4x8", note=_TWO_PER_CHIP),
    )
}


def machine(name: str) -> NamedMachine:
    """Returns the machine of this name: one of ``MACHINES``, or any number of its GPUs, such as 16xH100."""
    if name in MACHINES:
        return MACHINES[name]
    count, _, gpu = name.partition("x")
    like = MACHINES.get(f"8x{gpu}")
    if not count.isdecimal() or like is None:
        raise UnknownNameError("hardware", name, tuple(MACHINES))
    return replace(like, name=name, devices=int(count), paper=None)
