"""Policies and text generation with trained models; keys and values are cached over the ring."""

from agentic_ring.extras import needs_extra

with needs_extra("models"):
    import flax  # noqa: F401
