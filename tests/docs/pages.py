"""The Markdown pages of the documentation, cut into code blocks, links and headings; and the notebooks."""

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted(
            path for name in ("agentic_ring", "data_prep", "evals") for path in (ROOT / name).rglob("*.md")
        ),
        ROOT / "experiments/README.md",
    )
)
NOTEBOOKS = tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb")))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


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
    return [
        Block(match[1], match[2], text(page).count("\n", 0, match.start(2)) + 1)
        for match in _FENCE.finditer(text(page))
    ]


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", text(page))


def inline_code(page: str) -> list[str]:
    return _INLINE.findall(prose(page))


def links(page: str) -> list[str]:
    return _LINK.findall(_INLINE.sub("", prose(page)))


def anchors(page: str) -> list[str]:
    """What a link may name after ``#``, by the rule of GitHub."""
    headings = [_LINK.sub("]", heading) for heading in _HEADING.findall(prose(page))]
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
