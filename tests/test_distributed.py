"""A job whose processes do not find each other ends with one message."""

import os
import subprocess
import sys

import pytest

from agentic_ring.distributed import join_processes
from agentic_ring.errors import EXIT_PROCESS_LOST, ConfigError


@pytest.mark.parametrize("address", ["node0", "node0:", "10.0.0.1:http"])
def test_an_address_without_a_port_is_named(address, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # which joining changes
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"ADDRESS is '{address}', expected HOST:PORT"):
        join_processes()


def test_a_process_that_does_not_come_is_told():
    code = "from agentic_ring import distributed; distributed.JOIN_SECONDS = 2; distributed.join_processes()"
    job = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:29873", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "0"}
    options = {"capture_output": True, "text": True, "timeout": 60, "check": False}
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | job, **options)
    assert ended.returncode == EXIT_PROCESS_LOST
    assert "error: not all processes of the job have come within 2 s; see that each" in ended.stderr
    assert "Traceback" not in ended.stderr
