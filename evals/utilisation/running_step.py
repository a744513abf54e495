"""Runs a LLaMA training step on this machine: its program, a fresh state and a batch of random text."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from agentic_ring.attention import order
from agentic_ring.device_memory import DoesNotFitError, PlannedMemory, check_memory
from agentic_ring.models.llama import TokenBatch
from agentic_ring.training.optimizer import make_optimizer
from agentic_ring.training.train_step import init_state
from evals.compile.llama_step import LlamaStep


@dataclass(frozen=True)
class RunningStep:
    """A step on this machine's devices; it is compiled only once."""

    step: LlamaStep

    @cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled program."""
        return self.step.train_step.lower().compile()

    def updates(self, seed: int = 0) -> Callable[[], Any]:
        """Returns a function that runs one update after the other, from ``seed``'s parameters and text.

        Raises:
          DoesNotFitError: the step needs more memory than there is; nothing has run.
        """
        step, train_step, devices = self.step, self.step.train_step, len(self.step.devices)
        try:
            compiled = self.compiled
            check_memory(PlannedMemory.of(compiled).total * devices, devices)
            optimizer = make_optimizer(train_step.optimizer, steps=1)
            state = init_state(train_step.model, optimizer, seed, step.mesh, step.rules)
            batch = random_text(step, seed)
        except (DoesNotFitError, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, DoesNotFitError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = str(error).partition("\n")[0]
            raise DoesNotFitError(
                f"{step.model} with {step.method} attention over {step.context} tokens: {reason}; take a "
                "smaller model or fewer tokens per device; JAX uses 0.75 of a GPU's memory unless "
                "XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
            ) from error

        def update() -> Any:
            nonlocal state
            state, metrics = compiled(state, batch)
            return metrics

        return update


def random_text(step: LlamaStep, seed: int) -> TokenBatch:
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
    return jax.jit(make, out_shardings=shardings)(jax.random.key(seed))
