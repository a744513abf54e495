"""The Markdown pages of the documentation, cut into code blocks, links and headings; and the notebooks."""

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


def _found(*patterns: str) -> tuple[str, ...]:
    return tuple(str(path.relative_to(ROOT)) for each in patterns for path in sorted(ROOT.glob(each)))


FOLDERS = ("docs", "agentic_ring", "data_prep", "evals")
PAGES = _found("*.md", *(f"{folder}/**/*.md" for folder in FOLDERS), "experiments/README.md")
NOTEBOOKS = _found("docs/notebooks/*.ipynb")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block of code: the language named after the fence, or empty, and where the code begins."""

    language: str
    code: str
    line: int


@cache
def text(page: str) -> str:
    """The page; of a notebook the cells that are Markdown."""
    content = (ROOT / page).read_text()
    if page in NOTEBOOKS:
        cells = json.loads(content)["cells"]
        content = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return content


def blocks(page: str) -> list[Block]:
    found = _FENCE.finditer(text(page))
    return [Block(match[1], match[2], text(page).count("\n", 0, match.start(2)) + 1) for match in found]


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", text(page))


def inline_code(page: str) -> list[str]:
    return _INLINE.findall(prose(page))


def links(page: str) -> list[str]:
    return _LINK.findall(_INLINE.sub("", prose(page)))


def anchors(page: str) -> list[str]:
    """What a link may name after ``#``, by the rule of GitHub."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", _LINK.sub("]", each).lower()).replace(" ", "-") for each in headings]
