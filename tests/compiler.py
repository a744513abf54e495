"""How XLA compiles the tests' programs."""

from importlib.metadata import version

OPTIMISED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_use_fusion_emitters": True,
}
"""XLA's defaults."""

QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Options without LLVM's optimisations and, where jaxlib still allows it, without MLIR's loop emitters.

Nor is a program cut into parts for LLVM: two workers keep two cores busy without that.

Generating machine code takes most of the suite's time. XLA plans the same transfers and the same memory for a
program that is compiled so.
"""
if version("jaxlib").startswith("0.10."):
    QUICK["xla_cpu_use_fusion_emitters"] = False

QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
"""The same as the variable XLA_FLAGS has it."""
