"""HTML to Markdown, for answers that were copied out of a web page as HTML.

Only what a chat page is made of: paragraphs, headings, emphasis, code, lists, quotes, links and tables.
Other tags leave their text; scripts, styles and buttons go.
"""

import re
from html.parser import HTMLParser

_WHOLLY_HTML = re.compile(r"\s*<(div|p|ol|ul|pre|h[1-6]|table|blockquote)\b[^>]*>.*</\1>\s*", re.S | re.I)
_DROPPED = frozenset({"script", "style", "button", "svg", "head"})
_BLOCKS = frozenset({"p", "div", "table", "blockquote", "ul", "ol", "pre", "section", "article"})
_HEADINGS = {f"h{level}": "#" * level for level in range(1, 7)}
_MARKS = {"strong": "**", "b": "**", "em": "*", "i": "*", "del": "~~", "s": "~~"}


def is_html(text: str) -> bool:
    """Whether a text is HTML as a whole: an element from its first character to its last.

    A text that speaks of tags, or shows some in a fence, is not.
    """
    return _WHOLLY_HTML.fullmatch(text) is not None


def to_markdown(html: str) -> str:
    """The text of an HTML fragment with Markdown's marks."""
    writer = _Writer()
    writer.feed(html)
    writer.close()
    return writer.markdown()


class _Writer(HTMLParser):
    """Collects Markdown as the parser walks through the tags."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self._out: list[str] = []
        self._dropped = 0
        self._code: list[str] | None = None  # of the <pre> that is open
        self._language: str | None = None  # of the <code> met in it
        self._lists: list[int | None] = []  # the number of the next item; None where it has a dash
        self._links: list[str] = []
        self._quotes: list[int] = []  # where each open quote begins
        self._cells = 0
        self._header = False

    def markdown(self) -> str:
        return "".join(self._out).strip()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self._dropped += tag in _DROPPED
        if self._dropped:
            return
        if self._code is not None:
            self._in_code(tag, attributes)
        elif tag in _HEADINGS:
            self._break(2)
            self._out.append(f"{_HEADINGS[tag]} ")
        elif tag in _MARKS or tag == "code":
            self._out.append(_MARKS.get(tag, "`"))
        elif tag == "br":
            self._out.append("\n")
        elif tag == "a":
            self._links.append(attributes.get("href", ""))
            self._out.append("[")
        elif tag == "img":
            self._out.append(f"![{attributes.get('alt', '')}]({attributes.get('src', '')})")
        elif tag == "tr":
            self._cells, self._header = 0, False
            self._break(1)
            self._out.append("|")
        elif tag in ("td", "th"):
            self._cells += 1
            self._header |= tag == "th"
            self._out.append(" ")
        elif tag == "li":
            self._open_item()
        elif tag in _BLOCKS:
            self._open_block(tag, attributes)

    def handle_endtag(self, tag: str) -> None:
        if tag in _DROPPED:
            self._dropped = max(0, self._dropped - 1)
        elif self._dropped:
            return
        elif self._code is not None:
            if tag == "pre":
                self._close_code(self._code)
        elif tag in _MARKS or tag == "code":
            self._out.append(_MARKS.get(tag, "`"))
        elif tag == "a" and self._links:
            self._out.append(f"]({self._links.pop()})")
        elif tag in ("td", "th"):
            self._out.append(" |")
        elif tag == "tr" and self._header:
            self._out.append("\n|" + " --- |" * self._cells)
        elif tag in _HEADINGS or tag in _BLOCKS:
            self._close_block(tag)

    def handle_data(self, data: str) -> None:
        if self._dropped:
            return
        if self._code is not None:
            self._code.append(data)
            return
        text = re.sub(r"\s+", " ", data)
        self._out.append(text.lstrip() if self._newlines() else text)

    def _in_code(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "code":
            # A page's own header of the block stands before the code, and is no part of it.
            self._code = []
            language = re.search(r"language-([\w+#-]+)", attributes.get("class", ""))
            self._language = language[1] if language else None

    def _close_code(self, code: list[str]) -> None:
        self._break(2)
        self._out.append(f"```{self._language or ''}\n{''.join(code).strip(chr(10))}\n```")
        self._code = self._language = None
        self._break(2)

    def _open_item(self) -> None:
        self._break(1)
        number = self._lists[-1] if self._lists else None
        if number is not None:
            self._lists[-1] = number + 1
        self._out.append("   " * (len(self._lists) - 1) + ("- " if number is None else f"{number}. "))

    def _open_block(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "pre":
            self._code = []
        elif tag in ("ul", "ol"):
            self._break(1 if self._lists else 2)
            start = attributes.get("start", "1")
            self._lists.append(int(start) if tag == "ol" and start.isdecimal() else None)
        elif not (self._lists and re.search(r"(- |\d+\. )$", "".join(self._out[-1:]))):
            self._break(2)
        if tag == "blockquote":
            self._quotes.append(len(self._out))

    def _close_block(self, tag: str) -> None:
        if tag in ("ul", "ol") and self._lists:
            self._lists.pop()
        if tag == "blockquote" and self._quotes:
            start = self._quotes.pop()
            said = "".join(self._out[start:]).strip()
            self._out[start:] = ["\n".join(f"> {line}".rstrip() for line in said.split("\n"))]
        self._break(1 if self._lists else 2)

    def _newlines(self) -> int:
        """How many newlines what is written ends with; nothing written counts as two."""
        ends = 0
        for text in reversed(self._out):
            rest = text.rstrip("\n")
            ends += len(text) - len(rest)
            if rest:
                return ends
        return 2

    def _break(self, newlines: int) -> None:
        """Ends the line, or the paragraph, unless that has been done."""
        self._out.append("\n" * max(0, newlines - self._newlines()))
