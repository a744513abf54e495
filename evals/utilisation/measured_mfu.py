"""LLaMA training steps on this machine: their model FLOPs utilisation, and the ratio to the expected time.

A step's utilisation is its operations over those that the devices could do at their peak: the published
peak where it is known for the dtype, else the rate of a product of square matrices before each step, the
median of those of the same round. The expected time of a step follows from its operations (the model's own)
at the rate of the blockwise step.

Simulated devices share one processor, so steps are comparable where they do the same work on its cores.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.attention import order
from agentic_ring.device_memory import DoesNotFitError, PlannedMemory, check_memory
from agentic_ring.errors import ArgumentError
from agentic_ring.models.llama import TokenBatch
from agentic_ring.results.timing import Spread, square_product, square_product_flops, time_interleaved
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import init_state
from evals.compile.llama_step import LlamaStep
from evals.compile.machines import DEVICE_KINDS, HARDWARE
from evals.compile.step_memory import TrainStep
from evals.utilisation.projection import Rates, Step, reached_rates


def updates(step: LlamaStep) -> Callable[[], Any]:
    """Returns a function that runs one update after the other, from random parameters on random text.

    A step that needs more memory than there is is a DoesNotFitError, before anything runs.
    """
    try:
        return repeated(step.train_step, step.compiled, partial(random_text, step))
    except (DoesNotFitError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, DoesNotFitError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).partition("\n")[0]
        raise DoesNotFitError(
            f"{step.model} with {step.method} attention over {step.context} tokens: {reason}; take a "
            "smaller model or fewer tokens per device; JAX uses 0.75 of a GPU's memory unless "
            "XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
        ) from error


def repeated(
    step: TrainStep, compiled: jax.stages.Compiled, make_batch: Callable[[], Any]
) -> Callable[[], Any]:
    """Returns a function that runs one compiled update after the other on a batch; it returns the metrics.

    A step that needs more memory than there is is a DoesNotFitError, before anything runs.
    """
    devices = step.mesh.size
    check_memory(PlannedMemory.of(compiled).total * devices, devices)
    state = init_state(step.model, make_optimizer(step.optimizer, steps=1), 0, step.mesh, step.rules)
    batch = make_batch()

    def update() -> Any:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics

    return update


def random_text(step: LlamaStep) -> TokenBatch:
    """Returns a batch with one text per row, in the token order of the step's devices."""
    shapes = step.train_step.batch(step.mesh, step.rules)
    rows, length = shapes.tokens.shape
    ring = prod(step.mesh.shape[axis] for axis in step.rules.sequence)
    places = jnp.asarray(order(shapes.layout, length, ring))

    def make(key: jax.Array) -> TokenBatch:
        text = jax.random.randint(key, (rows, length + 1), 0, step.config.vocab_size, jnp.int32)
        tokens, targets = text[:, places], text[:, places + 1]
        return TokenBatch(tokens, targets, jnp.ones((rows, length)), places[None], None, shapes.layout)

    shardings: Any = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    return jax.jit(make, out_shardings=shardings)(jax.random.key(0))


def measure(steps: Sequence[LlamaStep], turns: int) -> tuple[list[dict[str, Any]], Rates]:
    """Times the blockwise step and others, each after a product of square matrices, in ``turns`` rounds.

    Returns a row of a CSV file for each step, and the rates that a device reached in the first, the blockwise
    one. Medians are followed by their minimum and maximum: ``seconds`` per update, ``mfu_paper`` and so on by
    each count of operations, and ``over_blockwise_rate``, actual over expected seconds, but for blockwise.
    """
    if turns < 1:
        raise ArgumentError(f"turns is {turns}; it must be at least 1")
    blockwise = Step.of(steps[0])
    product = partial(square_product, {2: jnp.bfloat16, 4: jnp.float32}[blockwise.itemsize])
    times = _times([[product, partial(updates, step)] for step in steps], turns)
    known, _ = known_peak(blockwise.itemsize)
    peaks = [known or square_product_flops() / median(products) for products in zip(*times[::2], strict=True)]
    rows: list[dict[str, Any]] = []
    for step, seconds in zip(steps, times[1::2], strict=True):
        sizes, flops = Step.of(step), Step.of(step).flops
        row: dict[str, Any] = {"method": step.method, **sizes.columns()}
        row["tokens_a_second"] = sizes.tokens / median(seconds)
        row |= {f"flops_{count}": operations for count, operations in flops.items()}
        row |= Spread.of(seconds).cells("seconds")
        devices = 1 if simulated() else sizes.devices
        for count, operations in flops.items():
            shares = (operations / (t * peak * devices) for t, peak in zip(seconds, peaks, strict=True))
            row |= Spread.of(shares).cells(f"mfu_{count}")
        if rows:
            more = flops["model"] / blockwise.flops["model"]
            expected = [more * base for base in times[1]]
            row |= Spread.ratio(seconds, expected).cells("over_blockwise_rate")
        rows.append(row)
    sharing = blockwise.devices if simulated() else 1
    return rows, reached_rates(blockwise, median(times[1]), median(peaks) / sharing)


def simulated() -> bool:
    """Whether devices share one processor."""
    return jax.default_backend() == "cpu"


def known_peak(itemsize: int) -> tuple[float | None, str]:
    """Returns the peak operations per second of one device, if known, and a description of the peak."""
    name = DEVICE_KINDS.get(jax.devices()[0].device_kind)
    if name is not None and itemsize == 2:
        peak = HARDWARE[name].flops
        return peak, f"{peak / 1e12:g} TFLOP/s, the peak of {name} in bfloat16"
    where = "of all cores together" if simulated() else "of one device"
    return None, f"the rate of a matrix product {where}, measured beside each step"


def _times(makers: Sequence[Sequence[Callable[[], Callable[[], Any]]]], turns: int) -> list[list[float]]:
    """Returns the seconds of each function in each round."""
    if simulated():
        # One shared machine: all are interleaved, so that its changes affect all of them.
        return time_interleaved(turns, *(make() for group in makers for make in group))
    # Steadier devices, all of whose memory one step may need.
    return [seconds for group in makers for seconds in time_interleaved(turns, *(make() for make in group))]
