from agentic_ring.extras import needs_extra

with needs_extra("models"):
    import optax  # noqa: F401
