"""Settings that must be in place before any test module starts JAX or MuJoCo.

Every test runs on eight simulated CPU devices, so that each mesh of the library (rings of 1, 2, 4
and 8) fits into one process, on any machine.
"""

import os
from functools import partialmethod
from pathlib import Path

from tests.compiler import OPTIMISED, QUICK_FLAGS

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MUJOCO_GL"] = "disabled"
# One plot backend without a display, whatever the user has set.
os.environ["MPLBACKEND"] = "Agg"

# Many tests compile the same programs, some in processes of their own. A limited cache is also a locked one.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2**30))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

# `XLA_FLAGS= make test` tests the machine code that users run, as .ci/run does in some of its runs.
os.environ.setdefault("XLA_FLAGS", QUICK_FLAGS)

import jax
import pytest
from hypothesis import HealthCheck, settings

from tests.trust.daily_seed import daily_seed

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# The first example of a property usually compiles, so a deadline per example would measure XLA.
settings.register_profile(
    "agentic_ring",
    deadline=None,
    max_examples=50,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("agentic_ring")


@pytest.fixture
def full_compiler(monkeypatch) -> None:
    """Compiles lowered programs (`lowered.compile()`) with XLA's default optimisations."""
    changed = {name: value for name, value in OPTIMISED.items() if name in os.environ["XLA_FLAGS"]}
    compile_fully = partialmethod(jax.stages.Lowered.compile, compiler_options=changed)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_fully)


def pytest_report_header() -> str:
    """Names the seed of the random trials of tests/trust."""
    return f"AGENTIC_RING_TRUST_SEED={daily_seed()}"


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints what trials recorded as their property "trust": rows of the tables in docs/reliability.md."""
    rows = [
        value
        for report in terminalreporter.getreports("passed")
        for name, value in getattr(report, "user_properties", ())
        if name == "trust"
    ]
    for row in dict.fromkeys(rows):
        terminalreporter.write_line(row)
