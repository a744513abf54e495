"""Numbers of tokens with units, such as 64k and 1m: parsing and formatting."""

from agentic_ring.errors import ArgumentError


def parse_tokens(text: str) -> int:
    """Parses a number of tokens such as "2048k", "1m" or "4096".

    Raises:
      ArgumentError: the text is none of these.
    """
    units = {"k": 1024, "m": 1024**2}
    digits, unit = (text[:-1], text[-1].lower()) if text[-1:].lower() in units else (text, "")
    if not digits.isdecimal() or int(digits) < 1:
        raise ArgumentError(f"a context of {text!r}; give tokens as 4096, 2048k or 1m")
    return int(digits) * units.get(unit, 1)


def thousands(tokens: int) -> str:
    """Formats tokens for tables, in units of 1024 if it is a multiple: "64K", "32768K" or "5000"."""
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}K"


def short_tokens(tokens: int) -> str:
    """Formats tokens for ``parse_tokens``, as short as possible: "2m", "4k" or "5000"."""
    for unit, letter in ((1024**2, "m"), (1024, "k")):
        if tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)
