"""Utilisation of a LLaMA's training step on one device."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.device_memory import PlannedMemory
from agentic_ring.errors import NonFiniteLossError
from agentic_ring.results.timing import Spread, square_product, square_product_flops, time_interleaved
from evals.benchmarks.rows import Line
from evals.compile.llama_step import LlamaStep, Precision
from evals.utilisation.measured_mfu import known_peak, updates
from evals.utilisation.projection import Step


def llama_update(model: str, context: int, precision: Precision, layers: int, rounds: int) -> list[Line]:
    """Times updates on one sequence of ``context`` tokens, with remat "attention", on one device.

    Args:
      model: one of ``llama_step.SHAPES``, with as many ``layers`` as fit the device.
      precision: type of matrix products and activations.

    Returns percent of the peak (see ``known_peak``) by this project's count of operations. The details hold
    the other counts, the number of layers, and the bytes that the compiler planned for the step beside the
    most that this process has had in use, where the runtime says so.
    """
    device = jax.devices()[0]
    step = LlamaStep(model, "blockwise", context, (device,), precision, remat="attention", layers=layers)
    update = updates(step)
    losses: list[Any] = []
    products, seconds = time_interleaved(
        rounds, square_product(precision), lambda: losses.append(update()) or losses[-1]
    )
    loss = float(losses[-1]["loss"])
    if not math.isfinite(loss):
        raise NonFiniteLossError(f"the loss of {model} is {loss} after {len(losses)} updates")
    peak, source = known_peak(jnp.dtype(precision).itemsize)
    peak = peak or square_product_flops() / Spread.of(products).median
    sizes, spread = Step.of(step), Spread.of(seconds)
    details = {f"mfu_{name}": 100 * work / (spread.median * peak) for name, work in sizes.flops.items()}
    details |= {"seconds": spread.median, "tokens_per_second": sizes.tokens / spread.median}
    details |= {"layers": sizes.stack.layers, "loss": loss, "peak": source}
    details |= {"planned_bytes": PlannedMemory.of(step.compiled).total}
    details |= {"peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use")}
    details |= {"cudnn": "__cudnn" in (step.compiled.as_text() or "")}
    share = Spread.of(100 * sizes.flops["model"] / (x * peak) for x in seconds)
    return [Line("update", model, share, "% of peak", details=details)]
