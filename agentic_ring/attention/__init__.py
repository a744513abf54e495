"""Exact attention over sequences longer than one device can hold, in JAX.

``attention`` takes global arrays; ``ring_attention`` is for code that is inside ``jax.shard_map``
already; ``attention_fn`` is for modules of Flax; ``reference_attention`` is the oracle that all are
compared with.

From ``attention`` to a kernel a call passes seven modules:

    api               checks the arguments
    plan              decides mesh axes, strategy (choose_strategy), layout and kernel (kernels.registry),
                      pads the arrays and shards them over the mesh
    strategies        exchanges heads for tokens (Ulysses), moves tokens into the layout
    ring.derivative   forward and backward as one function with a custom derivative
    ring.transport    brings the blocks of keys of other devices
    ring.hop          cuts a hop into tiles whose mask is known
    kernels.*         computes a tile, forward or backward

The arrays travel as one pytree, ``inputs.AttentionInputs``, what is static as one
``inputs.AttentionOptions``. ``cache`` has attention to a key/value cache for inference.
"""

from agentic_ring.attention.api import (
    attention,
    attention_with_prefix,
    latent_attention,
    merge_attention,
    ring_attention,
)
from agentic_ring.attention.flax_attention import attention_fn
from agentic_ring.attention.inputs import LAYOUTS, SCHEDULES, STRATEGIES, Layout, Schedule, Strategy
from agentic_ring.attention.kernels.registry import KERNELS
from agentic_ring.attention.mask import MaskSpec, hidden_outside
from agentic_ring.attention.reference import reference_attention
from agentic_ring.attention.ring.layout import inverse_order, order, padded_length, shard_order
from agentic_ring.attention.scores import alibi_slopes

__all__ = [
    "KERNELS",
    "LAYOUTS",
    "SCHEDULES",
    "STRATEGIES",
    "Layout",
    "MaskSpec",
    "Schedule",
    "Strategy",
    "alibi_slopes",
    "attention",
    "attention_fn",
    "attention_with_prefix",
    "hidden_outside",
    "inverse_order",
    "latent_attention",
    "merge_attention",
    "order",
    "padded_length",
    "reference_attention",
    "ring_attention",
    "shard_order",
]
