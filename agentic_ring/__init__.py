"""Ring attention, and the ring-attention Agentic Transformer.

    from agentic_ring import attention
    output = attention(query, key, value)
"""

from agentic_ring.attention import MaskSpec, attention, ring_attention

__all__ = ["MaskSpec", "attention", "ring_attention"]
