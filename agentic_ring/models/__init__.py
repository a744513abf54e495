from agentic_ring.extras import needs_extra

with needs_extra("models"):
    import flax  # noqa: F401
