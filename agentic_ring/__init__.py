"""Ring attention, and the ring-attention Agentic Transformer.

    from agentic_ring import attention
    output = attention(query, key, value)

runs on one device, or under the mesh of ``jax.set_mesh`` with the sequence sharded over its ring.
``ring_attention`` does so inside ``jax.shard_map``, and ``agentic_ring.attention.attention_fn`` inside
Flax's attention modules. ``python -m agentic_ring`` says how a call would run on the devices at hand.
"""

from agentic_ring.attention import MaskSpec, attention, ring_attention

__all__ = ["MaskSpec", "attention", "ring_attention"]
