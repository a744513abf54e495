"""Training steps on one device: utilisation of a LLaMA's, and time of the Agentic Transformer's."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentic_ring.device_memory import PlannedMemory
from agentic_ring.errors import NonFiniteLossError
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.agentic_transformer import AgenticTransformerConfig
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.timing import Spread, square_product, square_product_flops, time_interleaved
from agentic_ring.training.optimizer import OptimizerConfig
from evals.benchmarks.rows import Line
from evals.compile.llama_step import LlamaStep, Precision
from evals.compile.step_memory import chain_step
from evals.utilisation.measured_mfu import known_peak, repeated, updates
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
    devices = tuple(jax.devices()[:1])
    step = LlamaStep(model, "blockwise", context, devices, precision, remat="attention", layers=layers)
    update = updates(step)
    losses: list[Any] = []
    products, seconds = time_interleaved(
        rounds, square_product(precision), lambda: losses.append(update()) or losses[-1]
    )
    peak, source = known_peak(jnp.dtype(precision).itemsize)
    peak = peak or square_product_flops() / Spread.of(products).median
    sizes, spread = Step.of(step), Spread.of(seconds)
    details = {f"mfu_{name}": 100 * work / (spread.median * peak) for name, work in sizes.flops.items()}
    details |= {"seconds": spread.median, "tokens_per_second": sizes.tokens / spread.median}
    details |= {"layers": sizes.stack.layers, "peak": source}
    details |= _loss_and_memory(model, losses, step.compiled)
    details |= {"cudnn": "__cudnn" in (step.compiled.as_text() or "")}
    share = Spread.of(100 * sizes.flops["model"] / (x * peak) for x in seconds)
    return [Line("update", model, share, "% of peak", details=details)]


def chain_update(
    trajectories: int, decisions: int, transformer: Mapping[str, Any], rounds: int
) -> list[Line]:
    """Times updates of the Agentic Transformer on one chain, its last trajectory to learn, on one device.

    Args:
      trajectories: number of trajectories of the chain.
      decisions: steps of each of them; a step is 4 tokens.
      transformer: arguments of ``TransformerConfig``.

    Returns seconds. The details hold tokens, and the bytes that the compiler planned for the step beside the
    most that this process has had in use, where the runtime says so.
    """
    config = AgenticTransformerConfig(TransformerConfig(**transformer), 24, 6, decisions)
    steps, mesh = trajectories * decisions, make_mesh(MeshShape(), jax.devices()[:1])
    step = chain_step(config, OptimizerConfig(1e-4), 1, steps, mesh)
    number, random = np.arange(steps, dtype=np.int32), np.random.default_rng(0)
    known: dict[str, np.ndarray] = {
        "trajectory": number // decisions,
        "timestep": number % decisions,
        "position": number,
        "weight": number >= steps - decisions,
    }

    def values(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        found = known[name] if name in known else random.uniform(-1, 1, shape.shape)
        return jax.device_put(np.reshape(found, shape.shape).astype(shape.dtype), shape.sharding)

    with jax.set_mesh(mesh):
        compiled, shapes = step.lower().compile(), step.batch(mesh, step.rules)
        update = repeated(step, compiled, lambda: jax.tree_util.tree_map_with_path(values, shapes))
        losses: list[Any] = []
        (seconds,) = time_interleaved(rounds, lambda: losses.append(update()) or losses[-1])
    spread, tokens = Spread.of(seconds), steps * config.tokens_per_step
    details = {"tokens": tokens, "tokens_per_second": tokens / spread.median}
    details |= {"parameters": step.model.parameter_count()}
    details |= _loss_and_memory("the Agentic Transformer", losses, compiled)
    return [Line("update", f"{trajectories} trajectories", spread, details=details)]


def _loss_and_memory(model: str, metrics: Sequence[Any], compiled: jax.stages.Compiled) -> dict[str, Any]:
    """The last loss, which must be finite, and bytes that were planned and that were in use at most."""
    loss = float(metrics[-1]["loss"])
    if not math.isfinite(loss):
        raise NonFiniteLossError(f"the loss of {model} is {loss} after {len(metrics)} updates")
    in_use = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"loss": loss, "planned_bytes": PlannedMemory.of(compiled).total, "peak_bytes": in_use}
