"""Machines by name, such as 8xA100 or TPUv5e-256: the paper's five and current ones."""

from dataclasses import dataclass, replace

from agentic_ring.errors import UnknownNameError
from evals.compile.compile_target import CompileTarget, compile_target
from evals.compile.hardware import HARDWARE, Hardware


@dataclass(frozen=True)
class NamedMachine:
    """A machine by its usual name, and its devices as JAX counts them.

    Attributes:
      name: as on the command line.
      hardware: specification of each device.
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
        """Returns the machine's devices to compile for.

        Raises:
          CompilerMissingError: the compiler for the platform is not installed.
        """
        if self.topology is None:
            return compile_target(self.hardware.name, devices=self.devices)
        return compile_target(self.hardware.name, self.topology)


_CORE_DEVICES = "TPUs of this generation are named after their cores, and JAX sees each core as a device"
_MEGACORE = "1024 counts cores; since v4 the two cores of a chip are one device, so JAX sees 512"
_TWO_PER_CHIP = "128 chips, each of their two cores a device"

# Host memory per device: NVIDIA's DGX A100 640GB, H100 and H200 systems (2 TB for 8 GPUs);
# Cloud TPU machine types, https://cloud.google.com/tpu/docs/v5e and its siblings (v3-8: 340 GB for 8 cores,
# v4: 407 GB for 4 chips, v5e: 192 for 4, v5p: 448 for 4, v6e: 720 for 4, TPU7x: 960 for 4 of two devices).
MACHINES: dict[str, NamedMachine] = {
    machine.name: machine
    for machine in (
        NamedMachine("8xA100", HARDWARE["a100"], 8, 250e9, paper="8x A100 NVLink"),
        NamedMachine(
            "32xA100", HARDWARE["a100"], 32, 250e9, paper="32x A100 InfiniBand", note="4 hosts of 8"
        ),
        NamedMachine("TPUv3-512", HARDWARE["v3"], 512, 42e9, "16x16", "TPUv3-512", _CORE_DEVICES),
        NamedMachine("TPUv4-1024", HARDWARE["v4"], 512, 101e9, "8x8x8", "TPUv4-1024", _MEGACORE),
        NamedMachine("TPUv5e-256", HARDWARE["v5e"], 256, 48e9, "16x16", "TPUv5e-256"),
        NamedMachine("4xH100", HARDWARE["h100"], 4, 250e9),
        NamedMachine("8xH100", HARDWARE["h100"], 8, 250e9),
        NamedMachine("8xH200", HARDWARE["h200"], 8, 250e9),
        NamedMachine("TPUv5p-256", HARDWARE["v5p"], 256, 112e9, "4x8x8", note="256 chips, a device each"),
        NamedMachine("TPUv6e-256", HARDWARE["v6e"], 256, 180e9, "16x16"),
        NamedMachine("TPU7x-256", HARDWARE["tpu7x"], 256, 120e9, "4x4x8", note=_TWO_PER_CHIP),
    )
}


def machine(name: str) -> NamedMachine:
    """Returns the machine of this name: one of ``MACHINES``, or any number of its GPUs, such as 16xH100.

    Raises:
      UnknownNameError: there is none.
    """
    count, _, gpu = name.partition("x")
    like = MACHINES.get(f"8x{gpu}")
    if name not in MACHINES and count.isdecimal() and like is not None:
        return replace(like, name=name, devices=int(count), paper=None)
    if name not in MACHINES:
        raise UnknownNameError("hardware", name, tuple(MACHINES))
    return MACHINES[name]
