"""Machines and compile targets: their devices, programs that do not fit, and errors that name the remedy."""

import jax
import jax.numpy as jnp
import pytest

from agentic_ring.device_memory import DoesNotFitError, PlannedMemory
from agentic_ring.errors import ArgumentError, UnknownNameError
from evals.compile.machines import HARDWARE, MACHINES, CompilerMissingError, compile_target, machine


def test_machines_are_named_once_and_gpus_counted_freely():
    assert all(named.name == name for name, named in MACHINES.items())
    assert machine("16xH100").devices == 16
    with pytest.raises(UnknownNameError, match="9xB300"):
        machine("9xB300")


@pytest.mark.parametrize(
    ("name", "topology", "devices", "error"),
    [
        ("h1000", None, 8, UnknownNameError),
        ("v5e", None, 16, ArgumentError),
        ("h100", "2x2", None, ArgumentError),
        ("h100", None, 12, ArgumentError),
        ("h100", None, 0, ArgumentError),
    ],
)
def test_arrangements_that_do_not_exist(name, topology, devices, error):
    with pytest.raises(error, match="h100" if error is UnknownNameError else f"{name}|{devices}"):
        compile_target(name, topology, devices=devices)


def target_or_error(name):
    gpu, topology = HARDWARE[name].platform == "cuda", "4x4" if HARDWARE[name].example == "4x4" else "2x2x1"
    try:
        return compile_target(name, None if gpu else topology, devices=16 if gpu else None)
    except CompilerMissingError as error:
        return error


@pytest.mark.parametrize("name", HARDWARE)
def test_devices_or_what_to_install(name):
    target = target_or_error(name)
    if isinstance(target, CompilerMissingError):
        assert f"agentic_ring[{HARDWARE[name].compiler_extra}]" in str(target)
    else:
        assert len(target.devices) == {"v3": 32, "tpu7x": 8, "v4": 4, "v5p": 4}.get(name, 16)


@pytest.mark.parametrize("name", ["v5e", "a100"])
def test_a_program_that_does_not_fit(name):
    target = target_or_error(name)
    if isinstance(target, CompilerMissingError):
        pytest.skip(str(target))
    if name == "v5e":
        with pytest.raises(ArgumentError, match="v5e:3x5"):
            compile_target("v5e", "3x5")
    sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
    x = jax.ShapeDtypeStruct((2**36,), jnp.float32, sharding=sharding)
    with pytest.raises(DoesNotFitError, match=name) as caught:
        target.compile(jax.jit(lambda x: x * 2).lower(x))
    assert caught.value.needed > target.hardware.limit
    small = jax.ShapeDtypeStruct((2**20,), jnp.float32, sharding=sharding)
    assert PlannedMemory.of(target.compile(jax.jit(lambda x: x * 2).lower(small))).total >= 2 * 4 * 2**20
