"""Table 2: minimum block and sequence length whose compute overlaps the whole transfer of a hop.

The compute of a hop grows with the square of the block length c and its transfer only linearly, so there is
a minimum c. The paper counts all pairs, 4 d c^2 operations at the peak rate, against 4 c d bytes of keys
and values in bfloat16: c = F / B, and a sequence of 6 blocks per device (arXiv 2310.01889, section 3.2).
This project's hops compute half of the pairs, so they need longer blocks; its backward pass also sends
gradients, and computes more.
"""

from dataclasses import dataclass

from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.terminal.tables import TextTable
from evals.utilisation.projection import hop_bytes, hop_operations
from experiments import paper

BLOCKS_PER_DEVICE = 6
"""Blocks that the paper counts: queries, outputs, two of keys and two of values."""

BFLOAT16_BYTES = 2


@dataclass(frozen=True)
class MinimumBlock:
    """Tokens of a block whose compute takes as long as its transfer: the paper's, and of our causal ring."""

    paper: float
    forward: float
    backward: float

    @property
    def paper_sequence(self) -> float:
        """The paper's minimum sequence length per device."""
        return BLOCKS_PER_DEVICE * self.paper

    @property
    def block(self) -> float:
        """Minimum block of this project for both passes."""
        return max(self.forward, self.backward)


def minimum_block(stack: TransformerConfig, operations_per_second: float, link: float) -> MinimumBlock:
    """Returns the minimum block for bfloat16 keys and values.

    Args:
      stack: shape of the model: query heads are computed, key heads are sent.
      operations_per_second: rate of a device in attention; the peak in the paper.
      link: bytes per second to the next device.
    """

    def balance(*, backward: bool) -> float:
        """Solves c^2 operations / rate = c bytes / link, with both taken at c = 1."""
        work = hop_operations(stack, 1, backward=backward) / operations_per_second
        return hop_bytes(stack, 1, BFLOAT16_BYTES, backward=backward) / link / work

    # All pairs are twice those of a causal hop, and the paper has a key head for each query head.
    grouped = stack.heads / stack.key_value_heads
    return MinimumBlock(
        paper=balance(backward=False) / 2 * grouped,
        forward=balance(backward=False),
        backward=balance(backward=True),
    )


def minimum_table(stack: TransformerConfig) -> TextTable:
    """Returns Table 2: the paper's figures beside those of the same formula and of this project."""
    rows = []
    for link in paper.interconnects().values():
        found = minimum_block(stack, link.flops, link.link_bandwidth)
        rows.append(
            {
                "interconnect": link.name,
                "block, paper": f"{link.block_k:g}K",
                "F / B": f"{found.paper / 1e3:.1f}K",
                "sequence, paper": f"{link.sequence_k:g}K",
                "6 F / B": f"{found.paper_sequence / 1e3:.1f}K",
                "ours, forward": f"{found.forward / 1e3:.1f}K",
                "ours, backward": f"{found.backward / 1e3:.1f}K",
            }
        )
    notes = (
        "K is 1000 tokens; at the peak rate and in bfloat16, as in the paper. At lower rates shorter "
        "blocks suffice.",
        "The paper's InfiniBand row is inconsistent: 6 x 24.5 = 147, and 312 / 12.5 = 24.96.",
        "Ours: half of the pairs, as a causal mask needs, and float32 gradients in the backward pass.",
        "The links of the paper's TPU rows are those of a whole chip; one ring uses one link each way.",
    )
    return TextTable("Minimum block and sequence length per device (Table 2)", rows, notes)
