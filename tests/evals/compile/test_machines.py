"""Machines and compile targets: their devices, programs that do not fit, and errors that name the remedy."""

import jax
import jax.numpy as jnp
import pytest

from agentic_ring.device_memory import DoesNotFitError, PlannedMemory
from agentic_ring.errors import ArgumentError
from evals.compile.machines import HARDWARE, CompilerMissingError, compile_target, machine


def test_numbers_of_gpus_that_no_hosts_have_are_refused():
    assert machine("16xH100").devices == 16
    for name in ("12xH100", "0xH100"):
        with pytest.raises(ArgumentError, match=f"{machine(name).devices} h100; choose 1 to 8"):
            machine(name).compile_target()


@pytest.mark.parametrize("name", HARDWARE)
def test_devices_and_what_fits_them_or_what_to_install(name):
    hardware, topology = HARDWARE[name], "4x4" if name in ("v3", "v5e", "v6e") else "2x2x1"
    arrangement = 16 if hardware.platform == "cuda" else topology
    if not hardware.compiler_installed:
        with pytest.raises(CompilerMissingError, match=rf"agentic_ring\[{hardware.compiler_extra}\]"):
            compile_target(hardware, arrangement)
        return
    target = compile_target(hardware, arrangement)
    assert len(target.devices) == {"v3": 32, "tpu7x": 8, "v4": 4, "v5p": 4}.get(name, 16)
    if name in ("v5e", "a100"):
        sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
        large, small = (
            jax.jit(lambda x: x * 2).lower(jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding))
            for size in (2**36, 2**20)
        )
        with pytest.raises(DoesNotFitError, match=name) as caught:
            target.compile(large)
        assert caught.value.needed > target.hardware.limit
        assert PlannedMemory.of(target.compile(small)).total >= 2 * 4 * 2**20
