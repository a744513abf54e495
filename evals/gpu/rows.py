"""The rows of a day with a GPU: what each one measures, and its goal.

A row names its function instead of importing it, so that a package which one row lacks stops no other, and
so that the process which starts the rows leaves the GPU to them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentic_ring.errors import UnknownNameError

HOPPER = ("h100", "h200")
"""Hardware of the goals in TFLOP/s; both have the same peak."""

HOP_TOKENS = tuple(1024 * thousands for thousands in (4, 8, 16, 32, 64, 128))
QUEUED_FLOPS = 2e13
"""Operations of the calls that are queued in a round: long beside the start of a call."""
SERVED = {
    "cudnn": ("bfloat16", "float16"),
    "xla": ("float32", "bfloat16"),
    "vanilla": ("float32", "bfloat16"),
    "splash": ("float32", "bfloat16"),
}
"""Dtypes of each kernel whose exactness is measured."""


@dataclass(frozen=True)
class Goal:
    """A bound of the value that a row finds.

    Attributes:
      bound: the bound.
      at_least: whether the value must be at least the bound; otherwise at most.
      hardware: names in ``evals.compile.hardware`` to which the goal applies; any device if empty.
    """

    bound: float
    at_least: bool
    hardware: tuple[str, ...] = ()

    def met(self, value: float) -> bool:
        """Whether the value reaches the goal."""
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"


@dataclass(frozen=True)
class Found:
    """The measurement of a row.

    Attributes:
      value: the number that the goal bounds.
      unit: unit of the value, as the table shows it.
      low, high: least and largest value of the rounds; where a row covers several cases, of the cases.
      details: further numbers and words by name, as JSON has them.
    """

    value: float
    unit: str
    low: float
    high: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
      name: path-like; its first part is the group.
      function: MODULE:NAME of a function that takes the settings and returns a ``Found``.
      settings: arguments of the function, as JSON has them. A row that was measured with other settings is
        measured again.
      goal: None for none.
      limit_seconds: longest time, after which the row has failed.
    """

    name: str
    function: str
    settings: Mapping[str, Any]
    goal: Goal | None = None
    limit_seconds: float = 180.0

    @property
    def group(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]


def all_rows(tiny: bool = False) -> list[Row]:
    """Returns every row.

    Args:
      tiny: sizes that a CPU computes in seconds. Times then have no goals; exactness keeps them.
    """
    return [
        *_exactness(tiny),
        *_hops(tiny),
        *_ring_of_one(tiny),
        *_steps(tiny),
        *_decoding(tiny),
        _main_job(tiny),
    ]


def choose_rows(rows: list[Row], names: list[str]) -> list[Row]:
    """Returns the rows with these names or below them: ``hop`` and ``hop/4096`` choose ``hop/4096/...``.

    Raises:
      UnknownNameError: a name that chooses no row.
    """
    for name in names:
        if not any(_below(row.name, name) for row in rows):
            raise UnknownNameError("row", name, tuple(dict.fromkeys(row.group for row in rows)))
    return [row for row in rows if not names or any(_below(row.name, name) for name in names)]


def _below(name: str, prefix: str) -> bool:
    return f"{name}/".startswith(f"{prefix.rstrip('/')}/")


def _exactness(tiny: bool) -> Iterator[Row]:
    sizes: dict[str, Any] = {"tokens": 2048, "head_dims": [64, 128], "kv_heads": [8, 2]}
    if tiny:
        sizes = {"tokens": 64, "head_dims": [8], "kv_heads": [2]}
    for kernel, dtypes in SERVED.items():
        for dtype in dtypes:
            for mask in ("causal", "full"):
                settings = {"kernel": kernel, "dtype": dtype, "causal": mask == "causal", **sizes}
                name = f"exactness/{kernel}/{dtype}/{mask}"
                yield Row(name, "evals.gpu.exactness:exactness", settings, Goal(1.0, at_least=False))


def _hops(tiny: bool) -> Iterator[Row]:
    for tokens in (64,) if tiny else HOP_TOKENS:
        for head_dim in (8,) if tiny else (64, 128):
            for mask in ("causal", "full"):
                yield from _hop(tiny, tokens, head_dim, mask, kv_heads=4)
    if not tiny:
        yield from _hop(tiny, 16_384, 128, "causal", kv_heads=16)


def _hop(tiny: bool, tokens: int, head_dim: int, mask: str, kv_heads: int) -> Iterator[Row]:
    for direction, bound in (("forward", 600), ("forward+backward", 450)):
        sizes = _sizes(tiny, tokens, head_dim, mask, kv_heads)
        settings = {
            **sizes,
            "direction": direction,
            **_timing(tiny, tokens),
            "peer": "xla" if tiny else "cudnn",
        }
        aim = not tiny and (tokens, head_dim, mask) == (16_384, 128, "causal")
        heads = f"{sizes['heads']}x{kv_heads}x{head_dim}"
        yield Row(
            f"hop/{tokens}/{heads}/{mask}/{direction}",
            "evals.gpu.kernel_speed:hop",
            settings,
            Goal(bound, at_least=True, hardware=HOPPER) if aim else None,
        )


def _ring_of_one(tiny: bool) -> Iterator[Row]:
    for tokens in (64,) if tiny else (16_384, 131_072):
        for direction in ("forward", "forward+backward"):
            sizes = _sizes(tiny, tokens, 8 if tiny else 128, "causal", kv_heads=4)
            yield Row(
                f"ring_of_1/{tokens}/{direction}",
                "evals.gpu.kernel_speed:ring_of_one",
                {**sizes, "direction": direction, **_timing(tiny, tokens)},
                None if tiny else Goal(1.03, at_least=False),
            )


def _sizes(tiny: bool, tokens: int, head_dim: int, mask: str, kv_heads: int) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "heads": 8 if tiny else 16,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "causal": mask == "causal",
        "dtype": "float32" if tiny else "bfloat16",
        "kernel": "xla" if tiny else "cudnn",
    }


def _timing(tiny: bool, tokens: int) -> dict[str, int]:
    if tiny:
        return {"rounds": 1, "calls": 1}
    flops = 4 * tokens**2 * 16 * 128
    return {"rounds": 5, "calls": max(1, min(50, round(QUEUED_FLOPS / flops)))}


def _steps(tiny: bool) -> Iterator[Row]:
    # With 8 layers of the 8B model an update takes about as long as one of the whole 1B model.
    for model, most_layers in (("tiny", 2),) if tiny else (("1B", 16), ("8B", 8)):
        context = 128 if tiny else 131_072
        precision = "float32" if tiny else "bfloat16"
        yield Row(
            f"train_step/{model}/{context}",
            "evals.gpu.train_step:train_step",
            {
                "model": model,
                "context": context,
                "precision": precision,
                "most_layers": most_layers,
                "rounds": 1 if tiny else 3,
            },
            None if tiny else Goal(50.0, at_least=True),
            limit_seconds=420.0,
        )


def _decoding(tiny: bool) -> Iterator[Row]:
    for cached in (256,) if tiny else (131_072, 524_288):
        for dtype in ("bfloat16", "float32"):
            timing = {"rounds": 1 if tiny else 15, "calls": 1 if tiny else 10}
            yield Row(
                f"decode/{cached}/{dtype}",
                "evals.gpu.decode:decode",
                {"cached": cached, "query_dtype": dtype, **timing},
                None if tiny else Goal(1.3, at_least=False),
            )


def _main_job(tiny: bool) -> Row:
    preset, minutes = ("demo", 0.05) if tiny else ("small", 1.0)
    settings = {"preset": preset, "minutes": minutes, "num_trajectories": 1 if tiny else None}
    return Row(f"main_job/{preset}", "evals.gpu.main_job:main_job", settings, limit_seconds=600.0)
