"""Compile targets: their devices, programs that do not fit, and errors that name the remedy."""

import jax
import jax.numpy as jnp
import pytest

from agentic_ring.device_memory import DoesNotFitError, PlannedMemory
from agentic_ring.errors import ArgumentError, UnknownNameError
from evals.compile.compile_target import CompilerMissingError, compile_target
from evals.compile.hardware import HARDWARE


def test_unknown_hardware_lists_the_known():
    with pytest.raises(UnknownNameError, match="h100"):
        compile_target("h1000", devices=8)


@pytest.mark.parametrize(
    ("name", "topology", "devices", "message"),
    [
        ("v5e", None, 16, "needs a topology"),
        ("h100", "2x2", None, "needs a number of devices"),
        ("h100", None, 12, "12 GPUs"),
        ("h100", None, 0, "0 GPUs"),
    ],
)
def test_arrangements_that_do_not_exist(name, topology, devices, message):
    with pytest.raises(ArgumentError, match=message):
        compile_target(name, topology, devices=devices)


def test_a_topology_that_does_not_divide_over_hosts():
    try:
        compile_target("v5e", "4x4")
    except CompilerMissingError as error:
        pytest.skip(str(error))
    with pytest.raises(ArgumentError, match="v5e:3x5"):
        compile_target("v5e", "3x5")


def target_or_error(name):
    gpu = HARDWARE[name].platform == "cuda"
    topology = None if gpu else "4x4" if name in ("v3", "v5e", "v6e") else "2x2x1"
    try:
        return compile_target(name, topology, devices=16 if gpu else None)
    except CompilerMissingError as error:
        return error


@pytest.mark.parametrize("name", HARDWARE)
def test_devices_or_what_to_install(name):
    target = target_or_error(name)
    if isinstance(target, CompilerMissingError):
        extra = "cuda13" if HARDWARE[name].platform == "cuda" else "aot"
        assert f"agentic_ring[{extra}]" in str(target)
    else:
        assert len(target.devices) == {"v3": 32, "tpu7x": 8, "v4": 4, "v5p": 4}.get(name, 16)


@pytest.mark.parametrize("name", ["v5e", "a100"])
def test_a_program_that_does_not_fit(name):
    target = target_or_error(name)
    if isinstance(target, CompilerMissingError):
        pytest.skip(str(target))
    sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
    x = jax.ShapeDtypeStruct((2**36,), jnp.float32, sharding=sharding)
    with pytest.raises(DoesNotFitError, match=f"does not fit {name}"):
        target.compile(jax.jit(lambda x: x * 2).lower(x))
    small = jax.ShapeDtypeStruct((2**20,), jnp.float32, sharding=sharding)
    assert PlannedMemory.of(target.compile(jax.jit(lambda x: x * 2).lower(small))).total >= 2 * 4 * 2**20
