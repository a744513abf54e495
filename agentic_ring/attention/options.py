"""The static options of an attention call: what is compiled into the program."""

from dataclasses import dataclass
from typing import Literal, get_args

from agentic_ring.attention.mask import MaskSpec
from agentic_ring.errors import ArgumentError, UnknownNameError

Strategy = Literal["local", "ring", "all_gather", "ulysses", "ulysses_ring"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
"""How devices share a sequence; see ``strategies``."""

Layout = Literal["contiguous", "striped", "block_striped", "zigzag"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
"""The order in which the ring holds a sequence; see ``ring.layout``."""

Schedule = Literal["unidirectional", "bidirectional"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
"""In which directions blocks of keys travel round the ring; see ``ring.transport``."""


@dataclass(frozen=True)
class AttentionOptions:
    """The static options of one call; each is described at ``attention``.

    Raises:
      ArgumentError: an option of the wrong type or out of range.
      UnknownNameError: an unknown strategy, schedule or layout.
    """

    mask: MaskSpec = MaskSpec(causal=True)
    scale: float | None = None
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    strategy: Strategy | Literal["auto"] = "auto"
    schedule: Schedule = "unidirectional"
    layout: Layout | Literal["auto"] = "auto"
    permuted: bool = False
    kernel: str = "auto"
    query_chunk: int | None = None
    key_chunk: int | None = None
    return_logsumexp: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.mask, MaskSpec):
            raise ArgumentError(
                f"mask is a {type(self.mask).__name__}; expected MaskSpec(...): attention takes no mask "
                "array; describe the mask by MaskSpec, positions and segment_ids"
            )
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ArgumentError(f"soft_cap is {self.soft_cap}; it must be above 0, or None for no cap")
        if not 0 <= self.dropout_rate < 1:
            raise ArgumentError(f"dropout_rate is {self.dropout_rate}; it must be at least 0 and below 1")
        for kind, name, known in (
            ("strategy", self.strategy, ("auto", *STRATEGIES)),
            ("schedule", self.schedule, SCHEDULES),
            ("layout", self.layout, ("auto", *LAYOUTS)),
        ):
            if name not in known:
                raise UnknownNameError(kind, name, known)
        if self.scale is not None:
            object.__setattr__(self, "scale", float(self.scale))
        object.__setattr__(self, "dropout_rate", float(self.dropout_rate))
