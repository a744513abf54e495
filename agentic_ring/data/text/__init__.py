from agentic_ring.extras import needs_extra

with needs_extra("text"):
    import tokenizers  # noqa: F401
