"""What a run costs at a server's prices, before it is asked and after."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from agentic_ring.errors import ConfigError
from agentic_ring.terminal.tables import TextTable


@dataclass(frozen=True)
class Prices:
    """Prices of a million tokens, in one currency.

    Attributes:
      prompt: price of the prompt.
      cached: price of those tokens of the prompt that the server had read before.
      answer: price of the answer, with reasoning.

    Raises:
      ConfigError: a price is negative or no number.
    """

    prompt: float
    cached: float
    answer: float

    def __post_init__(self) -> None:
        for name, price in vars(self).items():
            if not 0 <= price < float("inf"):
                raise ConfigError(f"the price of {name} tokens is {price}; give a number from 0 on")

    def cost(self, prompt_tokens: float, cached_tokens: float, answer_tokens: float) -> float:
        """The price of requests with so many tokens in all; cached ones are among those of the prompts."""
        read = (prompt_tokens - cached_tokens) * self.prompt + cached_tokens * self.cached
        return (read + answer_tokens * self.answer) / 1e6


class Forecast(NamedTuple):
    """What a set of cases will ask of a server: questions without an answer, tokens of all their prompts.

    ``repeated_tokens`` are those in documents that an earlier question has sent, ``answer_tokens`` the most
    that the answers may have.
    """

    requests: int
    prompt_tokens: int
    repeated_tokens: int
    answer_tokens: int


def forecast_table(forecasts: Mapping[str, Forecast], prices: Prices | None) -> TextTable:
    """Requests, tokens and, given prices, cost of each set and of all."""
    total = Forecast(*map(sum, zip(*forecasts.values(), strict=True)))
    rows = []
    for name, each in {**forecasts, "all": total}.items():
        row = {
            "cases": name,
            "requests": f"{each.requests:,}",
            "prompt tokens": f"{each.prompt_tokens:,}",
            "of them sent before": f"{each.repeated_tokens:,}",
            "answer tokens, at most": f"{each.answer_tokens:,}",
        }
        if prices is not None:
            for column, cached in (("cost without a cache", 0), ("with one", each.repeated_tokens)):
                row[column] = f"{prices.cost(each.prompt_tokens, cached, each.answer_tokens):,.2f}"
        rows.append(row)
    return TextTable("requests that this run would send", rows)
