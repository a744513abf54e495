"""Matplotlib's drawings as SVG that stands in a page: its colours follow the page, its text stays text."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas

from evals.common.plots import BLUE, GREEN, GREY, ORANGE, PINK

# In points, which the page scales to the column: as small as a phone's, so that 9 points stay readable.
WIDTH, HEIGHT = 370, 250
INK = "#000000"
VARIABLES = {
    INK: "--ink",
    BLUE: "--blue",
    ORANGE: "--orange",
    GREEN: "--green",
    PINK: "--pink",
    GREY: "--grey",
}
"""The page's variable for each colour that a chart may use."""
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "legend.fontsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@contextmanager
def chart(parts: list[str], description: str, height: int = HEIGHT) -> Iterator[Axes]:
    """Axes to draw on; at the block's end the chart is added to ``parts`` as an ``<svg>`` element.

    Args:
      parts: of the page.
      description: what can be seen, for readers who cannot.
      height: in points.
    """
    # The salt keeps the names of markers and clips apart from those of the page's other charts.
    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": description}
    with matplotlib.rc_context(style):
        canvas = Canvas(figsize=(WIDTH / 72, height / 72), layout="constrained")
        FigureCanvasSVG(canvas)
        axes = canvas.add_subplot()
        yield axes
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", transparent=True)
    parts.append(_for_page(buffer.getvalue(), description))


def _for_page(svg: str, description: str) -> str:
    """The element alone: without prologue and metadata, names of groups, fixed size and fixed colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # as it numbers them, two charts would share them
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    opening = f'<svg class="chart" {view_box[0]} role="img" aria-label="{escape(description)}">'
    svg = re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1)
    for colour, variable in VARIABLES.items():
        svg = re.sub(colour, f"var({variable})", svg, flags=re.IGNORECASE)
    return svg
