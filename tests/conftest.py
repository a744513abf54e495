"""Settings that must be in place before any test module starts JAX or MuJoCo.

Every test runs on eight simulated CPU devices, so that each mesh of the library (rings of 1, 2, 4
and 8) fits into one process, on any machine.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MUJOCO_GL"] = "disabled"
# One plot backend without a display, whatever the user has set.
os.environ["MPLBACKEND"] = "Agg"

import jax
from hypothesis import HealthCheck, settings

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
