"""The smallest block of tokens whose hop hides its transfer, and the sequence that goes with it (Table 2).

A hop on a block of c tokens computes c^2 times something and sends c times something, so there is a
least c. The paper counts all pairs, 4 d c^2 operations at the peak rate, against 4 c d bytes of
keys and values in bfloat16: c = F / B, and 6 blocks a device for the sequence (arXiv 2310.01889,
section 3.2). This project's hops compute half of the pairs, so they need more; its backward sends
gradients as well, and computes more.
"""

from dataclasses import dataclass

from agentic_ring.models.transformer import TransformerConfig
from evals.utilisation.projection import hop_bytes, hop_operations

BLOCKS_A_DEVICE = 6
"""That the paper counts: one of queries and outputs each, two of keys, two of values."""

BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class MinimumBlock:
    """Tokens of a block from which compute takes as long as the transfer.

    Attributes:
      paper: by the paper's count.
      forward: of this project's causal, balanced ring.
      backward: likewise.
    """

    paper: float
    forward: float
    backward: float

    @property
    def paper_sequence(self) -> float:
        """The paper's minimal sequence a device."""
        return BLOCKS_A_DEVICE * self.paper

    @property
    def block(self) -> float:
        """That hides both directions here."""
        return max(self.forward, self.backward)


def minimum_block(stack: TransformerConfig, operations_a_second: float, link: float) -> MinimumBlock:
    """For bfloat16 keys and values.

    Args:
      stack: its query heads compute, its key heads are sent.
      operations_a_second: of a device in attention; its peak in the paper.
      link: bytes a second to the next device.
    """

    def balance(*, backward: bool) -> float:
        """Where c^2 operations / rate = c bytes / link, both taken at c = 1."""
        work = hop_operations(stack, 1, backward=backward) / operations_a_second
        return hop_bytes(stack, 1, BFLOAT16_BYTES, backward=backward) / link / work

    # All pairs are twice those of a causal hop, and the paper has a key head for each query head.
    grouped = stack.heads / stack.key_value_heads
    return MinimumBlock(
        paper=balance(backward=False) / 2 * grouped,
        forward=balance(backward=False),
        backward=balance(backward=True),
    )
