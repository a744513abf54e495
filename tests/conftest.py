"""Settings that must be in place before any test module starts JAX or MuJoCo.

Every test runs on eight simulated CPU devices, so that each mesh of the library (rings of 1, 2, 4
and 8) fits into one process, on any machine.
"""

import gc
import os
from functools import partialmethod

from tests.compiler import OPTIMISED, QUICK_FLAGS

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MUJOCO_GL"] = "disabled"
# One plot backend without a display, whatever the user has set.
os.environ["MPLBACKEND"] = "Agg"

# No programs from disk, nor in the processes that tests start: rings come back damaged
# (agentic_ring.jax_settings).
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

# `XLA_FLAGS= make test` tests the machine code that users run, as .ci/run does for attention.
os.environ.setdefault("XLA_FLAGS", QUICK_FLAGS)

import jax
import pytest
from hypothesis import HealthCheck, settings

from tests.trust.daily_seed import daily_seed

# Tracing makes objects by the million and few cycles; at the default threshold of 700 the collector takes
# 7% of the time.
gc.set_threshold(50_000, 20, 20)

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
    """Prints what trials recorded as "trust": rows of docs/reliability.md."""
    reports = terminalreporter.getreports("passed")
    recorded = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    for row in dict.fromkeys(value for name, value in recorded if name == "trust"):
        terminalreporter.write_line(row)
