"""Training steps: utilisation of a LLaMA's update, and tokens per second of the main job's."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.data.chain_batch import ChainBatch
from agentic_ring.data.tasks import parse_task
from agentic_ring.device_memory import DoesNotFitError, PlannedMemory
from agentic_ring.errors import NonFiniteLossError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.agentic_transformer import TOKENS_PER_STEP, AgenticTransformerConfig
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.timing import Spread, square_product, square_product_flops, time_interleaved
from agentic_ring.training.optimizer import OptimizerConfig, make_optimizer
from agentic_ring.training.train_step import init_state
from evals.benchmarks.rows import Line
from evals.compile.llama_step import LlamaStep, Precision
from evals.compile.step_memory import chain_step
from evals.utilisation.flops import step_flops
from evals.utilisation.measured_mfu import known_peak
from evals.utilisation.running_step import RunningStep


def llama_update(model: str, context: int, precision: Precision, layers: int, rounds: int) -> list[Line]:
    """Times updates on one sequence of ``context`` tokens, with remat "attention", on one device.

    Args:
      model: one of ``llama_step.SHAPES``.
      context: tokens of the sequence.
      precision: type of matrix products and activations.
      layers: layers of the step, if they fit; otherwise a quarter fewer, until they do.
      rounds: number of timed updates.

    Returns:
      Percent of the peak (see ``known_peak``) by this project's count of operations. The details hold the
      other counts, the number of layers, and the bytes that the compiler planned for the step beside the most
      that this process has had in use, where the runtime says so.
    """
    step = LlamaStep(model, "blockwise", context, (jax.devices()[0],), precision, remat="attention")
    running, update = largest_that_fits(step, layers)
    losses: list[Any] = []
    products, seconds = time_interleaved(
        rounds, square_product(precision), lambda: losses.append(update()) or losses[-1]
    )
    _check_losses(model, losses)
    peak, source = known_peak(jnp.dtype(precision).itemsize)
    peak = peak or square_product_flops() / Spread.of(products).median
    config = running.step.config
    flops = step_flops(config.transformer, config.vocab_size, context, running.step.batch)
    spread = Spread.of(seconds)
    details = {f"mfu_{name}": 100 * work / (spread.median * peak) for name, work in vars(flops).items()}
    details |= {"seconds": spread.median, "tokens_per_second": context * running.step.batch / spread.median}
    details |= {"layers": config.transformer.layers, "loss": float(losses[-1]["loss"]), "peak": source}
    details |= {"planned_bytes": PlannedMemory.of(running.compiled).total}
    details |= {"peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")}
    details |= {"cudnn": "__cudnn" in (running.compiled.as_text() or "")}
    share = Spread.of(100 * flops.model / (x * peak) for x in seconds)
    return [Line("update", model, share, "% of peak", details=details)]


def largest_that_fits(step: LlamaStep, layers: int) -> tuple[RunningStep, Callable[[], Any]]:
    """Returns the step with at most ``layers`` layers, as many as fit, and a function that runs one update.

    Raises:
      DoesNotFitError: not even one layer fits.
    """
    while True:
        running = RunningStep(replace(step, layers=layers))
        try:
            return running, running.updates()
        except DoesNotFitError:
            if layers == 1:
                raise
        layers = max(1, layers * 3 // 4)


def chain_update(
    width: int, layers: int, trajectories: int, decisions: int, chains: int, rounds: int
) -> list[Line]:
    """Times updates of an Agentic Transformer on chains of walker, on one device; values do not matter.

    Args:
      width, layers: sizes of the transformer.
      trajectories, decisions: trajectories of a chain, and steps of a trajectory.
      chains: number of chains in a batch.
      rounds: number of timed updates.
    """
    domain, mesh = parse_task("walker_run").domain, make_mesh(MeshShape(ring=1), jax.devices()[:1])
    stack = TransformerConfig(width=width, layers=layers, heads=2, ffn_width=2 * width, remat="attention")
    config = AgenticTransformerConfig(stack, domain.observation_dim, domain.action_dim, decisions)
    step = chain_step(config, OptimizerConfig(), chains, trajectories * decisions, mesh)
    compiled = step.lower().compile()
    state = init_state(step.model, make_optimizer(step.optimizer, steps=1), 0, mesh, step.rules)
    batch = _chains_of_zeros(step.batch(mesh, step.rules), decisions)
    losses: list[Any] = []

    def update() -> Any:
        nonlocal state
        state, metrics = compiled(state, batch)
        losses.append(metrics)
        return metrics

    (seconds,) = time_interleaved(rounds, update)
    _check_losses("the Agentic Transformer", losses)
    tokens = chains * trajectories * decisions * TOKENS_PER_STEP
    details = {"tokens_per_update": tokens, "parameters": step.model.parameter_count()}
    rate = Spread.of(tokens / x for x in seconds)
    return [Line("update", "Agentic Transformer", rate, "tokens/s", details=details)]


def _chains_of_zeros(shapes: ChainBatch, decisions: int) -> ChainBatch:
    """Chains [B, S] in the order of one device; every step bears loss."""
    zeros: Any = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), shapes)
    place = zeros.steps.position + jnp.arange(zeros.weight.shape[1], dtype=jnp.int32)
    steps = replace(zeros.steps, timestep=place % decisions, trajectory=place // decisions, position=place)
    return replace(zeros, steps=steps, weight=zeros.weight + 1)


def _check_losses(model: str, losses: Sequence[Any]) -> None:
    loss = float(losses[-1]["loss"])
    if not math.isfinite(loss):
        raise NonFiniteLossError(f"the loss of {model} is {loss} after {len(losses)} updates")
