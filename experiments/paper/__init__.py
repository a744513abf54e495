"""The numbers of the Ring Attention paper (arXiv 2310.01889), from ``tables.json``."""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


@cache
def tables() -> dict:
    """The paper's tables that the project reproduces."""
    return json.loads(Path(__file__).with_name("tables.json").read_text())


def exorl_return(task: str) -> float | None:
    """Table 5: Agentic Transformer with ring attention on 128 trajectories; None for other tasks."""
    return next((row[-1] for row in tables()["table5_exorl_return"]["rows"] if row[0] == task), None)


def exorl_rows() -> dict[str, dict[str, Any]]:
    """Table 5: the paper's cells by our task, or ``total_average``, and by column.

    The paper does not say which target Jaco has.
    """
    table = tables()["table5_exorl_return"]
    columns = table["columns"][1:]
    rows = {task: dict(zip(columns, cells, strict=True)) for task, *cells in table["rows"]}
    return {"jaco_reach_top_left" if task == "jaco_reach" else task: cells for task, cells in rows.items()}


class Interconnect(NamedTuple):
    """A row of Table 2: peak bfloat16 operations and one-way bytes per second of a device and its links.

    The minimal block, and sequence per device, are in thousands of tokens, as printed.
    """

    name: str
    flops: float
    link_bandwidth: float
    block_k: float
    sequence_k: float


def interconnects() -> dict[str, Interconnect]:
    """Table 2, by name, such as "A100 NVLink"."""
    return {
        name: Interconnect(name, tflops * 1e12, bandwidth * 1e9, block, sequence)
        for name, tflops, _, bandwidth, block, sequence in tables()["table2_minimum_sequence"]["rows"]
    }


class MfuRow(NamedTuple):
    """A row of Table 4: tokens per batch, and per sequence with blockwise attention and in a ring.

    ``model`` and ``hardware`` are as printed, such as "7B" and "8x A100"; M and K are powers of two.
    """

    model: str
    hardware: str
    batch_tokens: int
    blockwise_context: int
    ring_context: int


def mfu_rows() -> list[MfuRow]:
    """Table 4."""
    return [
        MfuRow(model, hardware, int(batch.removesuffix("M")) * 2**20, blockwise * 2**10, ring * 2**10)
        for model, hardware, batch, blockwise, ring in tables()["table4_mfu"]["rows"]
    ]


def longest_contexts() -> dict[tuple[str, str], dict[str, int]]:
    """Table 3: maximum context in tokens, by (hardware, model) and method."""
    methods = ("vanilla", "memory_efficient", "blockwise", "ring")
    return {
        (hardware, model): {method: 1024 * k for method, k in zip(methods, contexts, strict=True)}
        for hardware, model, *contexts in tables()["table3_max_context_k_tokens"]["rows"]
    }


class RetrievalCurve(NamedTuple):
    """A model of Figure 3 with its context, as printed; its curve in words, and in numbers.

    A point is a context and the bounds of an accuracy, which differ only where just a bound is known.
    """

    model: str
    note: str
    points: tuple[tuple[int, float, float], ...]


def retrieval_curves() -> list[RetrievalCurve]:
    """Figure 3, read off the paper's plot, as it gives no numbers; K is 1024 tokens."""
    figure = tables()["figure3_line_retrieval"]
    ranges = {
        model: tuple((1024 * int(k.removesuffix("K")), *bounds) for k, bounds in points.items())
        for model, points in figure["read_off_in_numbers"].items()
    }
    return [RetrievalCurve(model, note, ranges[model]) for model, note in figure["read_off_the_plot"].items()]


RETURN_CAVEAT = (
    "The paper's column is not this quantity. Table 5 gives one number per task, without seeds or spread, "
    "and it cannot be a raw dm_control return: walker rewards stand >= walk >= run in every state, while the "
    "table has run 110 > stand 98 > walk 79, and uniform random actions already earn about 140 on stand. "
    "It is a normalised score whose reference is not stated; it is also the best of several trials. "
    "Only order and relative gaps can be compared, and this preset is far smaller than the paper's model."
)
