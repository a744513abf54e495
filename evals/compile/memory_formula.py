"""Memory of a LLaMA training step by formula: the start of a search, and a check on compilers.

All counts are per device. A *unit* is one array [tokens of a device, width] in the compute dtype. The number
of units that are alive at once was counted in the compilers' plans of a layer's backward pass. TPUs keep
more of them than GPUs, and more where memory is ample; they pad to lanes of 128, so a head of 100 takes 128.
"""

from dataclasses import dataclass

from evals.compile.llama_step import CHUNK, Shape

WHOLE_UNITS = {"cuda": 4, "tpu": 9}
"""Units alive beside the attention of a layer: its input, what is kept of the heads, gradients of both."""
RING_FLOAT32 = 7
"""Blocks that a ring holds in float32: dQ, and dK and dV that are summed, sent and received."""
LOCAL_FLOAT32 = 3
"""Blocks that attention on one device holds in float32: dQ, dK and dV."""

SCORE_BYTES = 7
"""Bytes per pair of tokens and head under vanilla attention: scores, probabilities and their gradient, which
compilers hold in float32 or narrower and not all at once."""


@dataclass(frozen=True)
class MemoryFormula:
    """Memory of a ``LlamaStep`` as a function of its context.

    Attributes:
      shape: sizes of the model.
      method, remat: see ``LlamaStep``.
      devices: number of devices that share the parameters and, in a ring, the sequence.
      itemsize: bytes per number of the compute dtype.
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
        """Number of parameters, without those of norms."""
        shape = self.shape
        key_share = (shape.kv_heads or shape.heads) / shape.heads
        layer = shape.width * (shape.width * (2 + 2 * key_share) + 3 * shape.ffn_width)
        return round(shape.layers * layer + 2 * shape.vocab_size * shape.width)

    def constant(self) -> float:
        """Returns the bytes that do not depend on the context: state, gradients and gathered weights."""
        shape = self.shape
        feedforward = 3 * shape.width * shape.ffn_width
        vocabulary = shape.width * shape.vocab_size
        gathered = feedforward * (2 * self.itemsize + 4) + vocabulary * (self.itemsize + 12)
        logits = 3 * CHUNK * shape.vocab_size * 4
        return 16 * self.parameters / self.devices + gathered + logits

    def per_token(self) -> float:
        """Returns the bytes per token of a device, without the scores of vanilla attention."""
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
        """Returns the bytes per device for one sequence per device, or for one in total with a ring."""
        tokens = context / self.devices if self.method == "ring" else context
        scores = SCORE_BYTES * self.shape.heads * tokens**2 if self.method == "vanilla" else 0
        return self.constant() + self.per_token() * tokens + scores

    def longest(self, limit: float, least: int = 1024) -> int:
        """Returns the longest context that fits: ``least`` times a power of two, and at least ``least``."""
        context = least
        while self.bytes(2 * context) <= limit:
            context *= 2
        return context
