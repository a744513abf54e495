"""Hardware specifications: memory, compute rate and bandwidths of each kind of GPU and TPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

GPU_MEMORY_FRACTION = 0.95
"""Share of a GPU's memory that XLA may use, to be set as XLA_PYTHON_CLIENT_MEM_FRACTION (JAX's default is
0.75); the rest is for the driver, the CUDA context and NCCL's buffers."""


@dataclass(frozen=True)
class Hardware:
    """Specification of one device as JAX counts them: a GPU, a TPU chip, or one of the two cores of a chip.

    Attributes:
      name: as on the command line.
      platform: XLA's name of the platform.
      memory: bytes of a device; of a TPU those that the compiler says a program may use, of a GPU all, of
        which the driver keeps some hundred MB.
      flops: peak dense bfloat16 operations per second.
      memory_bandwidth: bytes per second.
      link_bandwidth: bytes per second that a device can send to its neighbour in a ring while it receives
        as many: one link of a TPU torus, all NVLinks of a GPU.
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
"""Every kind of device by its name."""

_DEVICE_KINDS = {
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
}
"""Names of hardware by JAX's complete device kind: an H100 on another board has another peak."""


def hardware_of(device_kind: str) -> Hardware | None:
    """Returns the specification of a device of this machine by JAX's name of its kind, if it is known."""
    name = _DEVICE_KINDS.get(device_kind)
    return None if name is None else HARDWARE[name]
