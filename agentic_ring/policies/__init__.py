"""Policies of trained Agentic Transformers: those that are shipped, those of runs, and how to use them."""
