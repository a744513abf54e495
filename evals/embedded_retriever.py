"""Where the small retriever that comes with the project lies; ``experiments/train_retriever.py`` makes it."""

from pathlib import Path

EMBEDDED = Path(__file__).parent / "retriever"
