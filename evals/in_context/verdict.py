"""Did the model learn in context? A verdict from figures alone, so that no one is tempted to lean.

Learning in context is claimed only if all of these hold, each with 95% intervals apart:

* the last of several trials, one after another, beats the first;
* it beats every control;

and if a trial behind a context of the right task returns at least ``MARGIN`` more than behind one of
another task.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from evals.common.intervals import Interval
from evals.common.results import short_number

MARGIN = 0.2


@dataclass(frozen=True)
class Check:
    """One condition of a claim.

    Attributes:
      claim: in words.
      better, worse: what is compared.
      holds: whether it is so.
    """

    claim: str
    better: Interval
    worse: Interval
    holds: bool

    def __str__(self) -> str:
        found = f"{in_words(self.better)} against {in_words(self.worse)}"
        return f"{'yes' if self.holds else 'NO '}  {self.claim}: {found}"


@dataclass(frozen=True)
class Verdict:
    """All conditions of a claim."""

    checks: tuple[Check, ...]

    @property
    def claimed(self) -> bool:
        """Whether all of them hold."""
        return all(check.holds for check in self.checks)

    def __str__(self) -> str:
        found = "learns in context" if self.claimed else "learning in context is NOT shown"
        return "\n".join([f"verdict: {found}", *map(str, self.checks)])


def judge(
    first: Interval, last: Interval, controls: Mapping[str, Interval], right: Interval, wrong: Interval
) -> Verdict:
    """The verdict on one task, or on several pooled on one scale.

    Args:
      first, last: of the trials one after another.
      controls: by name.
      right, wrong: a trial behind stored trajectories of the right task, and of another.
    """
    return Verdict(
        (
            Check("last trial above the first", last, first, _apart(last, first)),
            *(
                Check(f"last trial above {name}", last, control, _apart(last, control))
                for name, control in controls.items()
            ),
            Check(
                f"context of the right task above the wrong one's by {MARGIN:.0%}",
                right,
                wrong,
                right.value > 0 and right.value >= (1 + MARGIN) * wrong.value,
            ),
        )
    )


def _apart(better: Interval, worse: Interval) -> bool:
    """Whether the intervals do not meet; a single run, which has none, shows nothing."""
    return better.low is not None and worse.high is not None and better.low > worse.high


def in_words(interval: Interval) -> str:
    """Such as "0.876 (0.76 to 0.977)"."""
    if interval.low is None or interval.high is None:
        return short_number(interval.value)
    return f"{short_number(interval.value)} ({short_number(interval.low)} to {short_number(interval.high)})"
