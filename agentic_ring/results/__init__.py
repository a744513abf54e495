"""Figures with intervals, and the files that hold them: results.json and tables of rows."""

from agentic_ring.extras import needs_extra

with needs_extra("models"):
    import rich as rich
