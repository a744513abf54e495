"""The rows of the benchmark: what each measures, at which sizes, and how its results are kept.

A row names its function instead of importing it, so that a package which one row lacks stops no other, and
so that the process which starts the rows leaves the devices to them.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from agentic_ring.errors import AgenticRingError, ArgumentError, UnknownNameError
from agentic_ring.provenance import provenance
from agentic_ring.results.rows import origin_columns, read_rows, write_rows
from agentic_ring.results.timing import Spread
from agentic_ring.terminal.tables import TextTable


class UnsupportedError(AgenticRingError):
    """A contender cannot compute the problem, or its package is missing; the message says why."""


@dataclass(frozen=True)
class Line:
    """Result of one contender in one case of a row, a part of the problem such as "forward"."""

    case: str
    contender: str
    value: Spread | None
    """Measured value; None for a contender that was left out."""
    unit: str = "s"
    ratios: Mapping[str, Spread] = field(default_factory=dict)
    """Seconds over those of another contender in the same round, by its name; below 1 is faster."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers and words by name, as JSON has them."""
    limit: float | None = None
    """Largest value that is right; None where any is."""
    left_out: str = ""
    """Reason why there is no value."""


@dataclass(frozen=True)
class Row:
    """One measurement, made in a process of its own."""

    name: str
    """Path-like, such as "attention/8192"; its beginnings choose several rows."""
    description: str
    function: str
    """MODULE:NAME in this package; called with the settings, returns the lines."""
    settings: Mapping[str, Any]
    """Arguments of the function, as JSON has them."""
    tiny: Mapping[str, Any]
    """Settings that differ at the sizes of ``--tiny``."""
    devices: int = 1
    """Number of devices, simulated on a CPU."""
    threads: bool = True
    """False for a CPU device that computes with one thread each."""
    limit_seconds: float = 3600.0
    """Longest time of the process."""

    @property
    def needs_gpu(self) -> bool:
        """Whether its full sizes are those of a GPU."""
        return self.name.startswith("gpu")

    def sized(self, tiny: bool) -> dict[str, Any]:
        """Returns the arguments of the function."""
        return {**self.settings, **(self.tiny if tiny else {})}


HEADS = {"heads": 4, "kv_heads": 4, "head_dim": 64}
HEADS_TINY = {"heads": 2, "kv_heads": 2, "head_dim": 8, "rounds": 1}
TINY_STEP = {"model": "tiny", "context": 32, "precision": "float32", "layers": 1, "rounds": 1}


def all_rows() -> list[Row]:
    """Returns every row: those of a CPU, which also run on accelerators, and those of a day with a GPU."""
    return [*_cpu_rows(), *_gpu_rows()]


def _cpu_rows() -> Iterator[Row]:
    strategies = ["ring", "all_gather", "ulysses", "ulysses_ring"]
    contenders = [*strategies, "one device", "jax.nn", "ringattention"]
    for tokens in (8192, 32_768):
        yield Row(
            f"attention/{tokens}",
            "strategies of 8 devices, one device, jax.nn and ringattention",
            "attention:plain",
            {"tokens": tokens, "devices": 8, "contenders": contenders, **HEADS, "rounds": 5},
            {"tokens": 16, "devices": 2, "contenders": ["ring", *contenders[3:]], **HEADS_TINY},
            devices=8,
        )
    yield Row(
        "packed/16384",
        "rows of packed documents on one device and a ring of 2, by layout, and ringattention",
        "attention:packed",
        {"tokens": 16_384, "documents": [512, 2048, 8192], "rings": [1, 2], **HEADS, "rounds": 5},
        {"tokens": 64, "documents": [16], "rings": [2], **HEADS_TINY},
        devices=2,
        threads=False,
    )
    dtypes = {"dtypes": ["float32", "bfloat16", "int8"], "query_dtypes": ["float32"]}
    yield Row(
        "decode/524288",
        "one token with 512K in the cache, against reading the cache once",
        "attention:decode",
        {"cached": 524_288, **dtypes, **HEADS, "rounds": 15, "calls": 1},
        {"cached": 64, "dtypes": ["int8"], **HEADS_TINY},
    )
    yield Row(
        "train_step/100M",
        "update of a LLaMA on 4K tokens, share of the rate of a matrix product",
        "training:llama_update",
        {"model": "100M", "context": 4096, "precision": "float32", "layers": 12, "rounds": 3},
        TINY_STEP,
    )
    walker = {"task": "walker_run", "action_repeat": 4, "environments": 16, "decisions": 20, "rounds": 5}
    cartpole = {"task": "cartpole_swingup", "action_repeat": 100, "environments": 2, "decisions": 2}
    yield Row(
        "rollouts/walker_run",
        "16 environments with random actions, and with a policy with trajectories in its cached context",
        "rollouts:rollouts",
        {"trajectories": [4, 32, 128], "width": 128, "layers": 3, **walker},
        {"trajectories": [2], "width": 16, "layers": 1, **cartpole, "rounds": 1},
        devices=2,
    )
    # The 3 key heads of smollm2 cannot be shared by 2 devices.
    for model, cached, devices in (("47M", 4096, 2), ("47M", 16_384, 2), ("smollm2", 1024, 1)):
        yield Row(
            f"llama/{'' if model == '47M' else f'{model}/'}{cached}",
            "prefill, decoding and questions about a cached document, against transformers",
            "llama:llama",
            {"model": model, "cached": cached, "devices": devices, "new_tokens": 32, "rounds": 5},
            {"model": "tiny", "cached": 32, "new_tokens": 4, "rounds": 1},
            devices=devices,
        )


def _gpu_rows() -> Iterator[Row]:
    sizes = {"tokens": 2048, "head_dims": [64, 128], "kv_heads": [8, 2], "masks": ["causal", "full"]}
    for kernel, dtype in {"cudnn": "float16", "xla": "float32", "vanilla": "float32"}.items():
        yield Row(
            f"gpu/exactness/{kernel}",
            "output and gradients against the reference in float64, over the tolerance",
            "exactness:exactness",
            {"kernel": kernel, "dtypes": ["bfloat16", dtype], **sizes},
            {"dtypes": [dtype], "tokens": 32, "head_dims": [8], "kv_heads": [2], "masks": ["causal"]},
            limit_seconds=90,
        )
    kernels = {"kv_heads": 16, "dtype": "bfloat16", "kernel": "cudnn", "jax_nn": "cudnn", "rounds": 5}
    cpu = {"tokens": 32, "dtype": "float32", "kernel": "xla", "jax_nn": "xla", "calls": 1, **HEADS_TINY}
    for tokens, head_dim, calls, others in (
        (16_384, 128, 10, ["emulated ring of 8", "ringattention"]),
        (16_384, 64, 20, []),
        (131_072, 128, 1, []),
    ):
        problem = {"tokens": tokens, "heads": 16, "head_dim": head_dim, "calls": calls, **kernels}
        yield Row(
            f"gpu/attention/{tokens}x{head_dim}",
            "attention and a ring on one GPU, and JAX's own cuDNN attention",
            "attention:plain",
            {"contenders": ["one device", "ring", "jax.nn", *others], **problem},
            cpu,
            limit_seconds=80,
        )
    for model, layers in (("1B", 16), ("8B", 8)):  # 8 layers of the 8B model take as long as the 1B model
        yield Row(
            f"gpu/train_step/{model}",
            "update on one sequence of 128K tokens, share of the peak",
            "training:llama_update",
            {"model": model, "context": 131_072, "precision": "bfloat16", "layers": layers, "rounds": 2},
            TINY_STEP,
            limit_seconds=140,
        )
    dtypes = {"dtypes": ["bfloat16"], "query_dtypes": ["bfloat16", "float32"]}
    heads_8b = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    for cached in (131_072, 524_288):
        yield Row(
            f"gpu/decode/{cached}",
            "one token with a bfloat16 cache and heads of Llama-3-8B, against reading the cache once",
            "attention:decode",
            {"cached": cached, **dtypes, **heads_8b, "rounds": 15, "calls": 10},
            {"cached": 64, "calls": 1, **HEADS_TINY},
            limit_seconds=50,
        )
    # The sizes of exorl_at_ring.py's preset paper; minutes, so that it is no part of the day.
    sizes = {"width": 1024, "layers": 24, "heads": 16, "ffn_width": 3328, "rope_theta": 1e7}
    yield Row(
        "gpu_paper/chain_step",
        "update of the paper's model on one chain of 128 trajectories, 512K tokens",
        "training:chain_update",
        {
            "trajectories": 128,
            "decisions": 1000,
            "transformer": {**sizes, "dtype": "bfloat16", "ffn_chunk": 4096},
            "rounds": 1,
        },
        {
            "trajectories": 2,
            "decisions": 8,
            "transformer": {"width": 16, "layers": 1, "heads": 2, "ffn_width": 16},
        },
        limit_seconds=600,
    )


def choose_rows(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Returns the rows with these names or below them: ``gpu`` chooses ``gpu/decode/...``."""
    chosen = {}
    for name in names:
        found = [row for row in rows if f"{row.name}/".startswith(f"{name.rstrip('/')}/")]
        if not found:
            raise UnknownNameError("row", name, tuple(row.name for row in rows))
        chosen |= {row.name: row for row in found}
    return list(chosen.values())


def measure(row: Row, tiny: bool, path: Path) -> None:
    """Measures a row in this process, and writes its lines to the CSV file in place of older ones.

    If every contender was left out, it is an UnsupportedError after the file has the reasons.
    """
    if row.needs_gpu and not tiny and jax.default_backend() != "gpu":
        raise ArgumentError(
            f"{row.name} needs a GPU, and JAX finds {jax.default_backend()}; add --tiny to try the row here"
        )
    module, _, function = row.function.partition(":")
    settings = row.sized(tiny)
    lines = getattr(importlib.import_module(f"evals.benchmarks.{module}"), function)(**settings)
    source = {"settings": json.dumps(settings), **origin_columns(provenance())}
    found = [{"row": row.name, **_columns(line), **source} for line in lines]
    kept = [other for other in read_rows(path) if other["row"] != row.name] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, [*kept, *found])
    if all(line.value is None for line in lines):
        raise UnsupportedError("; ".join(dict.fromkeys(line.left_out for line in lines)))


def _columns(line: Line) -> dict[str, Any]:
    none = dict.fromkeys(("value", "value_low", "value_high"))
    ratios = {name: [x.median, x.low, x.high] for name, x in line.ratios.items()}
    columns = {"case": line.case, "contender": line.contender}
    columns |= none if line.value is None else line.value.cells("value")
    columns |= {"unit": line.unit, "ratios": json.dumps(ratios), "limit": line.limit}
    return columns | {"left_out": line.left_out, "details": json.dumps(line.details)}


def is_wrong(line: Mapping[str, str]) -> bool:
    """Whether a file's line has a value beyond its limit; NaN is."""
    return bool(line["value"] and line["limit"]) and not float(line["value"]) <= float(line["limit"])


def line_table(lines: Sequence[Mapping[str, str]]) -> TextTable:
    """Returns the table of a file's lines, with the contenders that were left out below it."""
    shown, notes = [], []
    for line in lines:
        name = f"{line['row']}, {line['case']}, {line['contender']}"
        if line["left_out"]:
            notes.append(f"{name}: left out, {line['left_out']}")
            continue
        median, low, high = (float(line[column]) for column in ("value", "value_low", "value_high"))
        ratios = json.loads(line["ratios"]).items()
        shown.append(
            {
                "row, case, contender": name,
                "value": f"{median:.4g} {line['unit']}{' WRONG' if is_wrong(line) else ''}",
                "min to max": f"{low:.4g} to {high:.4g}",
                "time over that of": ", ".join(f"{other} {ratio[0]:.2f}" for other, ratio in ratios),
            }
        )
    return TextTable("Benchmark", shown, notes)
