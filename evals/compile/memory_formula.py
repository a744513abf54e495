"""Bytes of a LLaMA training step from its sizes alone: where a search starts, and a check on compilers.

All counts are of one device. A *unit* is one array [tokens of a device, width] in the compute dtype; how
many are alive at once was counted in the compilers' plans of the backward of a layer. TPUs keep more of them
than GPUs, and more where memory is ample; they lay it out in lanes of 128, so that a head of 100 takes 128.
"""

from dataclasses import dataclass

from evals.compile.llama_step import CHUNK, Shape

WHOLE_UNITS = {"cuda": 4, "tpu": 9}
"""Alive beside the attention of a layer: its input, what is kept of the heads, and gradients of both."""
RING_FLOAT32 = 7
"""Blocks that a ring holds in float32: dq, and d_key and d_value summed, sent and received."""
LOCAL_FLOAT32 = 3
"""dq, d_key and d_value of attention on one device."""

SCORE_BYTES = 7
"""For each pair of tokens and head under vanilla attention: scores, probabilities and their gradient, which
compilers hold in float32 or narrower and not all at once."""


@dataclass(frozen=True)
class MemoryFormula:
    """A step of ``llama_step``.

    Attributes:
      shape: the model's sizes.
      method, remat: see ``LlamaStep``.
      devices: that share parameters and, in a ring, the sequence.
      itemsize: bytes of the compute dtype.
      platform: "cuda" or "tpu".
    """

    shape: Shape
    method: str
    remat: str
    devices: int
    itemsize: int
    platform: str

    @property
    def parameters(self) -> int:
        """Of the whole model, norms left out."""
        shape = self.shape
        key_share = (shape.kv_heads or shape.heads) / shape.heads
        layer = shape.width * (shape.width * (2 + 2 * key_share) + 3 * shape.ffn_width)
        return round(shape.layers * layer + 2 * shape.vocab_size * shape.width)

    def constant(self) -> float:
        """What does not depend on the context: the train state, its gradients, and gathered weights."""
        shape = self.shape
        feedforward = 3 * shape.width * shape.ffn_width
        vocabulary = shape.width * shape.vocab_size
        gathered = feedforward * (2 * self.itemsize + 4) + vocabulary * (self.itemsize + 12)
        logits = 3 * CHUNK * shape.vocab_size * 4
        return 16 * self.parameters / self.devices + gathered + logits

    def per_token(self) -> float:
        """Bytes for each token of a device, scores of vanilla attention left out."""
        shape = self.shape
        unit = shape.width * self.itemsize
        kept = 2 if self.remat == "offload" else shape.layers
        if self.method == "ring":
            blocks = (9 + RING_FLOAT32 * 4 / self.itemsize) / shape.head_groups
        else:
            blocks = 5 + LOCAL_FLOAT32 * 4 / self.itemsize
        feedforward = (
            6 * shape.ffn_width * self.itemsize if self.method in ("vanilla", "memory_efficient") else 0
        )
        # The feedforward's backward and the attention's do not overlap in time.
        return unit * (kept + WHOLE_UNITS[self.platform]) + max(unit * blocks, feedforward)

    def bytes(self, context: int) -> float:
        """Of a device, for sequences of this many tokens: one a device, or one in all for a ring."""
        tokens = context / self.devices if self.method == "ring" else context
        scores = SCORE_BYTES * self.shape.heads * tokens**2 if self.method == "vanilla" else 0
        return self.constant() + self.per_token() * tokens + scores

    def longest(self, limit: float, least: int = 1024) -> int:
        """The longest power of two whose bytes stay within the limit, but at least ``least``."""
        context = least
        while self.bytes(2 * context) <= limit:
            context *= 2
        return context
