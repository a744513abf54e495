"""The numbers of the Ring Attention paper (arXiv 2310.01889), from ``tables.json``."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@cache
def tables() -> dict:
    """The paper's tables that the project reproduces."""
    return json.loads(Path(__file__).with_name("tables.json").read_text())


def exorl_return(task: str) -> float | None:
    """Table 5: Agentic Transformer with ring attention on 128 trajectories; None for other tasks."""
    return next((row[-1] for row in tables()["table5_exorl_return"]["rows"] if row[0] == task), None)


def exorl_rows() -> dict[str, dict[str, Any]]:
    """Table 5: the paper's cells by our task and by column; the paper does not say which target Jaco has."""
    table = tables()["table5_exorl_return"]
    return {
        "jaco_reach_top_left" if task == "jaco_reach" else task: dict(
            zip(table["columns"][1:], cells, strict=True)
        )
        for task, *cells in table["rows"]
        if task != "total_average"
    }


def exorl_averages() -> dict[str, Any]:
    """Table 5's last row, by column."""
    table = tables()["table5_exorl_return"]
    return dict(zip(table["columns"][1:], table["rows"][-1][1:], strict=True))


@dataclass(frozen=True)
class Interconnect:
    """A row of Table 2.

    Attributes:
      name: hardware and its links, such as "A100 NVLink".
      flops: peak bfloat16 operations per second per device.
      link_bandwidth: bytes per second, one way.
      block_k: minimal block size in thousands of tokens, as printed.
      sequence_k: minimal sequence length per device, likewise.
    """

    name: str
    flops: float
    link_bandwidth: float
    block_k: float
    sequence_k: float


def interconnects() -> dict[str, Interconnect]:
    """Table 2, by name."""
    return {
        name: Interconnect(name, tflops * 1e12, bandwidth * 1e9, block, sequence)
        for name, tflops, _, bandwidth, block, sequence in tables()["table2_minimum_sequence"]["rows"]
    }


@dataclass(frozen=True)
class MfuRow:
    """A row of Table 4; K and M are powers of two.

    Attributes:
      model: size, such as "7B".
      hardware: as printed, such as "8x A100".
      batch_tokens: tokens per batch.
      blockwise_context: tokens per sequence with blockwise attention on one device.
      ring_context: tokens per sequence with ring attention.
    """

    model: str
    hardware: str
    batch_tokens: int
    blockwise_context: int
    ring_context: int

    @property
    def ratio(self) -> int:
        """How many times longer the ring's sequences are."""
        return self.ring_context // self.blockwise_context


def mfu_rows() -> list[MfuRow]:
    """Table 4."""
    return [
        MfuRow(model, hardware, int(batch.removesuffix("M")) * 2**20, blockwise * 2**10, ring * 2**10)
        for model, hardware, batch, blockwise, ring in tables()["table4_mfu"]["rows"]
    ]


def longest_contexts() -> dict[tuple[str, str], dict[str, int]]:
    """Table 3: maximum context in tokens, by (hardware, model) and method."""
    table = tables()["table3_max_context_k_tokens"]
    methods = ("vanilla", "memory_efficient", "blockwise", "ring")
    return {
        (hardware, model): {method: 1024 * k for method, k in zip(methods, contexts, strict=True)}
        for hardware, model, *contexts in table["rows"]
    }


@dataclass(frozen=True)
class RetrievalPoint:
    """An accuracy of Figure 3 as a range; ``low`` and ``high`` differ only where just a bound is known."""

    context: int
    low: float
    high: float


@dataclass(frozen=True)
class RetrievalCurve:
    """A model of Figure 3.

    Attributes:
      model: as printed, with its context.
      note: description of the curve in the plot.
      points: the same in numbers, at the contexts that the note names.
    """

    model: str
    note: str
    points: tuple[RetrievalPoint, ...]


# The notes of tables.json in numbers. "To 64K" includes the shorter contexts of the plot.
_READ_OFF = {
    "Vicuna-13B (16K)": {"4K": (1.0, 1.0), "12K": (0.6, 0.6)},
    "GPT-3.5-turbo (16K)": dict.fromkeys(("4K", "8K", "12K", "16K"), (1.0, 1.0)),
    "Claude-2 (100K)": {
        **dict.fromkeys(("4K", "8K", "12K", "16K", "64K"), (1.0, 1.0)),
        "100K": (0.9, 0.9),
    },
    "Ring Attention-13B (512K)": dict.fromkeys(
        ("4K", "8K", "12K", "16K", "64K", "100K", "200K", "500K"), (0.9, 1.0)
    ),
}


def retrieval_curves() -> list[RetrievalCurve]:
    """Figure 3, read off the paper's plot, as it gives no numbers; K is 1024 tokens."""
    notes = tables()["figure3_line_retrieval"]["read_off_the_plot"]
    return [
        RetrievalCurve(
            model,
            note,
            tuple(
                RetrievalPoint(1024 * int(context.removesuffix("K")), low, high)
                for context, (low, high) in _READ_OFF[model].items()
            ),
        )
        for model, note in notes.items()
    ]


RETURN_CAVEAT = (
    "The paper's column is not this quantity. Table 5 gives one number per task, without seeds or spread, "
    "and it cannot be a raw dm_control return: walker rewards stand >= walk >= run in every state, while the "
    "table has run 110 > stand 98 > walk 79, and uniform random actions already earn about 140 on stand. "
    "It is a normalised score whose reference is not stated; it is also the best of several trials. "
    "Only order and relative gaps can be compared, and this preset is far smaller than the paper's model."
)
