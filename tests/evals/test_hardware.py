"""The table of machines, and errors that say what to install or to write."""

import pytest

from agentic_ring.errors import ArgumentError, UnknownNameError
from evals.hardware import HARDWARE, CompilerMissingError, describe


def test_unknown_hardware_lists_the_known():
    with pytest.raises(UnknownNameError, match="h100"):
        describe("h1000", devices=8)


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
        describe(name, topology, devices=devices)


def test_a_topology_that_does_not_divide_over_hosts():
    try:
        describe("v5e", "4x4")
    except CompilerMissingError as error:
        pytest.skip(str(error))
    with pytest.raises(ArgumentError, match="v5e:3x5"):
        describe("v5e", "3x5")


@pytest.mark.parametrize("name", HARDWARE)
def test_devices_or_what_to_install(name):
    arrangement = {"topology": "4x4"} if name in ("v3", "v5e", "v6e") else {"topology": "2x2x1"}
    gpu = HARDWARE[name].platform == "cuda"
    try:
        machine = describe(name, **({"devices": 16} if gpu else arrangement))
    except CompilerMissingError as error:
        assert f"agentic_ring[{'cuda13' if gpu else 'tpu'}]" in str(error)
        return
    chips = {"v3": 32, "tpu7x": 8, "v4": 4, "v5p": 4}
    assert len(machine.devices) == chips.get(name, 16)
