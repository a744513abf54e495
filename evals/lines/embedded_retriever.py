"""Where the small retriever that comes with the project lies; ``experiments/train_retriever.py`` makes it."""

from pathlib import Path

from evals.lines.keys import KeyKind

EMBEDDED = Path(__file__).parents[1] / "retriever"

EMBEDDED_KEYS: tuple[KeyKind, ...] = ("LRT-NL",)
"""The keys that it was trained on."""
