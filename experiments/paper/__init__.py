"""The figures of the Ring Attention paper (arXiv 2310.01889), from ``tables.json``."""

import json
from functools import cache
from pathlib import Path


@cache
def tables() -> dict:
    """Every table of the paper that the project reproduces."""
    return json.loads(Path(__file__).with_name("tables.json").read_text())


def exorl_return(task: str) -> float | None:
    """Table 5, Agentic Transformer with ring attention on 128 trajectories; None for other tasks."""
    return next((row[-1] for row in tables()["table5_exorl_return"]["rows"] if row[0] == task), None)


def longest_contexts() -> dict[tuple[str, str], dict[str, int]]:
    """Table 3: tokens by (hardware, model) and method."""
    table = tables()["table3_max_context_k_tokens"]
    methods = ("vanilla", "memory_efficient", "blockwise", "ring")
    return {
        (hardware, model): {method: 1024 * k for method, k in zip(methods, contexts, strict=True)}
        for hardware, model, *contexts in table["rows"]
    }


RETURN_CAVEAT = (
    "The paper's column is not this quantity. Table 5 gives one number a task, without seeds or spread, and "
    "it cannot be a raw dm_control return: walker pays stand >= walk >= run in every state, while the "
    "table has run 110 > stand 98 > walk 79, and uniform random actions alone earn about 140 on stand. "
    "It is some normalised score whose reference is not stated; it is also the best of several trials. "
    "Only order and relative gaps can be compared, and this preset is far smaller than the paper's model."
)
