"""Settings that must be in place before any test module starts JAX or MuJoCo.

Every test runs on eight simulated CPU devices, so that each mesh of the library (rings of 1, 2, 4
and 8) fits into one process, on any machine.
"""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MUJOCO_GL"] = "disabled"
# One plot backend without a display, whatever the user has set.
os.environ["MPLBACKEND"] = "Agg"

# Many tests compile the same programs, some in processes of their own. A limited cache is also a locked one.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2**30))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

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
