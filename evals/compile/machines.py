"""Machines by name: the five of the paper's tables, and today's."""

from dataclasses import dataclass, replace

from agentic_ring.errors import UnknownNameError
from evals.compile.hardware import HARDWARE, Hardware, Machine, describe


@dataclass(frozen=True)
class NamedMachine:
    """A machine as people name it, and what is compiled for in its place.

    Attributes:
      name: as on the command line.
      hardware: of each device.
      devices: how many JAX sees.
      host_memory: bytes of its host's memory that a device may use.
      topology: of TPU chips; None for GPUs.
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

    def describe(self) -> Machine:
        """Its devices to compile for.

        Raises:
          CompilerMissingError: the compiler for the platform is not installed.
        """
        if self.topology is None:
            return describe(self.hardware.name, devices=self.devices)
        return describe(self.hardware.name, self.topology)


_A_CORE = "TPUs of this generation are named after their cores, and JAX sees each core as a device"
_HOSTS = "4 hosts of 8"
_TWO_A_CHIP = "128 chips, each of their two cores a device"
_A_CHIP = "1024 counts cores; since v4 the two cores of a chip are one device, so JAX sees 512"

# Memory of hosts, divided by their devices: NVIDIA's DGX A100 640GB, H100 and H200 systems (2 TB for 8 GPUs);
# Cloud TPU machine types, https://cloud.google.com/tpu/docs/v5e and its siblings (v3-8: 340 GB for 8 cores,
# v4: 407 GB for 4 chips, v5e: 192 for 4, v5p: 448 for 4, v6e: 720 for 4, TPU7x: 960 for 4 of two devices).
MACHINES: dict[str, NamedMachine] = {
    machine.name: machine
    for machine in (
        NamedMachine("8xA100", HARDWARE["a100"], 8, 250e9, paper="8x A100 NVLink"),
        NamedMachine(
            "32xA100", HARDWARE["a100"], 32, 250e9, paper="32x A100 InfiniBand", note="4 hosts of 8"
        ),
        NamedMachine("TPUv3-512", HARDWARE["v3"], 512, 42e9, "16x16", "TPUv3-512", _A_CORE),
        NamedMachine("TPUv4-1024", HARDWARE["v4"], 512, 101e9, "8x8x8", "TPUv4-1024", _A_CHIP),
        NamedMachine("TPUv5e-256", HARDWARE["v5e"], 256, 48e9, "16x16", "TPUv5e-256"),
        NamedMachine("4xH100", HARDWARE["h100"], 4, 250e9),
        NamedMachine("8xH100", HARDWARE["h100"], 8, 250e9),
        NamedMachine("8xH200", HARDWARE["h200"], 8, 250e9),
        NamedMachine("TPUv5p-256", HARDWARE["v5p"], 256, 112e9, "4x8x8", note="256 chips, a device each"),
        NamedMachine("TPUv6e-256", HARDWARE["v6e"], 256, 180e9, "16x16"),
        NamedMachine("TPU7x-256", HARDWARE["tpu7x"], 256, 120e9, "4x4x8", note=_TWO_A_CHIP),
    )
}


def machine(name: str) -> NamedMachine:
    """The machine of this name: one of ``MACHINES``, or any number of its GPUs, such as 16xH100.

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
