"""Environments, trials one after another with everything in context, and their returns."""

from agentic_ring.extras import needs_extra

with needs_extra("rl"):
    import gymnasium as gymnasium
