"""Ring attention, and the ring-attention Agentic Transformer.

    from agentic_ring import attention
    output = attention(query, key, value)

runs on one device, or under the mesh of ``jax.set_mesh`` with the sequence sharded over its ring.
``ring_attention`` does so inside ``jax.shard_map``, and ``agentic_ring.attention.attention_fn`` inside
Flax's attention modules. ``python -m agentic_ring`` says how a call would run on the devices at hand.

    policy = agentic_ring.load_policy("walker")
    policy.tell(task="walker_run")

is a trained Agentic Transformer with ``reset()``, ``act(observation)`` and ``receive(reward, done)``. Runs in
which trajectories tell the task give one with ``tell``.
``make_env_and_datasets("walker_run")`` gives an environment and trajectories.
"""

import importlib
from typing import TYPE_CHECKING, Any

from agentic_ring.attention import MaskSpec, attention, ring_attention

if TYPE_CHECKING:
    from agentic_ring.data.task_datasets import make_env_and_datasets
    from agentic_ring.policies.acting import Policy
    from agentic_ring.policies.policy import load_policy

__all__ = ["MaskSpec", "Policy", "attention", "load_policy", "make_env_and_datasets", "ring_attention"]
_MODULES = {
    "Policy": "agentic_ring.policies.acting",
    "load_policy": "agentic_ring.policies.policy",
    "make_env_and_datasets": "agentic_ring.data.task_datasets",
}
"""Modules that are imported when a name is first used: attention needs JAX and NumPy only."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
