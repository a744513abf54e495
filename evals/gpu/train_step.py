"""Utilisation of a training step of a LLaMA that is cut to as many layers as one device's memory holds."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.device_memory import HOST_SHARE, DoesNotFitError, PlannedMemory, memory_limit
from agentic_ring.errors import NonFiniteLossError
from evals.compile.llama_step import LlamaStep, Precision
from evals.compile.memory_formula import MemoryFormula
from evals.gpu.rows import Found
from evals.speed.attention_benchmark import square_product, square_product_flops
from evals.speed.interleaved import Spread, time_interleaved
from evals.utilisation.flops import step_flops
from evals.utilisation.measured_mfu import known_peak
from evals.utilisation.running_step import RunningStep


def train_step(model: str, context: int, precision: Precision, most_layers: int, rounds: int) -> Found:
    """Times updates on one sequence of ``context`` tokens, with remat "attention", on one device.

    Args:
      model: one of ``llama_step.SHAPES``.
      context: tokens of the sequence.
      precision: type of matrix products and activations.
      most_layers: layers of the step, if they fit.
      rounds: number of timed updates.

    Returns:
      Percent of the peak (see ``known_peak``) by this project's count of operations. The details hold the
      other counts, the number of layers, and the bytes that the compiler planned for the step beside the most
      that this process has had in use, where the runtime says so.
    """
    step = LlamaStep(model, "blockwise", context, (jax.devices()[0],), precision, remat="attention")
    running, update = largest_that_fits(step, most_layers)
    losses: list[Any] = []
    multiply = square_product(precision)
    jax.block_until_ready(multiply())  # the step has run once as well
    timed = (multiply, lambda: losses.append(update()) or losses[-1])
    products, seconds = time_interleaved(rounds, *timed, warm_up=0)
    loss = float(losses[-1]["loss"])
    if not math.isfinite(loss):
        raise NonFiniteLossError(
            f"the loss of {model} over {context} tokens is {loss} after {len(losses)} updates"
        )
    peak, source = known_peak(jnp.dtype(precision).itemsize)
    peak = peak or square_product_flops() / Spread.of(products).median
    config = running.step.config
    flops = step_flops(config.transformer, config.vocab_size, context, running.step.batch)
    spread = Spread.of(seconds)
    details = {f"mfu_{name}": 100 * work / (spread.median * peak) for name, work in vars(flops).items()}
    details |= {"seconds": spread.median, "tokens_per_second": context * running.step.batch / spread.median}
    details |= {"layers": config.transformer.layers, "all_layers": step.shape.layers, "loss": loss}
    details["planned_bytes"] = PlannedMemory.of(running.compiled).total
    details["peak_bytes"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    details |= {"peak": source, "cudnn": "__cudnn" in (running.compiled.as_text() or "")}
    value, low, high = (100 * flops.model / (s * peak) for s in (spread.median, spread.high, spread.low))
    return Found(value, "% of peak", low, high, details)


def largest_that_fits(step: LlamaStep, most_layers: int) -> tuple[RunningStep, Callable[[], Any]]:
    """Returns the step with as many layers as fit the device, and a function that runs one update.

    Args:
      step: the step; its number of layers is not read.
      most_layers: layers, at most.

    Raises:
      DoesNotFitError: not even one layer fits.
    """
    layers = min(most_layers, _estimated_layers(step))
    while True:
        running = RunningStep(replace(step, layers=layers))
        try:
            update = running.updates()
            jax.block_until_ready(update())
            return running, update
        except (DoesNotFitError, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, DoesNotFitError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            if layers == 1:
                raise
        layers = max(1, layers * 3 // 4)


def _estimated_layers(step: LlamaStep) -> int:
    """Layers that fit by formula; a start, as the compiler has the last word."""
    limit, itemsize = memory_limit(1, HOST_SHARE) or math.inf, jnp.dtype(step.precision).itemsize
    layers = step.shape.layers
    while layers > 1:
        shape = replace(step.shape, layers=layers)
        formula = MemoryFormula(shape, step.method, step.remat, len(step.devices), itemsize, "cuda")
        # With remat "attention" a layer keeps the output of attention as well as its input.
        outputs = layers * step.context * shape.width * itemsize
        if formula.bytes(step.context) + outputs <= limit:
            break
        layers -= 1
    return layers
