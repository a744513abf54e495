"""Acting and writing with a trained model: what has been read is encoded once and kept on the ring."""

from agentic_ring.inference.policy import ContextBytes, InContextPolicy
from agentic_ring.inference.sampling import Sampling
from agentic_ring.inference.text import Completion, Document, DocumentBytes, Score, TextEngine, stop_at

__all__ = [
    "Completion",
    "ContextBytes",
    "Document",
    "DocumentBytes",
    "InContextPolicy",
    "Sampling",
    "Score",
    "TextEngine",
    "stop_at",
]
