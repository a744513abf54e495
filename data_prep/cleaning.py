"""Cleans conversations that were copied out of a chat page.

The steps, in this order, follow FastChat's cleaning of ShareGPT, on which Vicuna was trained:

    HTML          converts answers that are HTML as a whole to Markdown
    page text     removes the page's own text: "1 / 2", "Copy code", "Copy123 chars / 45 words"
    ends          removes empty turns, answers before the first question, questions after the last answer
    alternation   rejects conversations in which user and assistant do not alternate
    length        rejects conversations of fewer than 16 characters
    blocked       rejects conversations with a phrase of ``BLOCKED``
    duplicates    rejects conversations whose id, or whose first question and answer, occurred before
"""

import hashlib
import re
from collections.abc import Sequence

from bs4 import BeautifulSoup, ParserRejectedMarkup, Tag
from markdownify import MarkdownConverter

from agentic_ring.data.text.chat import Turn
from data_prep.conversation_files import Conversation

BLOCKED = ("openai", "chatgpt", "too many requests")
"""Phrases by which a model would learn to take itself for another one, and a server's error message."""
LEAST_CHARACTERS = 16

_WHOLLY_HTML = re.compile(r"\s*<(div|p|ol|ul|pre|h[1-6]|table|blockquote)\b[^>]*>.*</\1>\s*", re.S | re.I)
_DROPPED_TAGS = ("script", "style", "button", "svg", "head")
_PAGER = re.compile(r"^[ \t]*\d+ / \d+[ \t]*$\n?", re.M)
_COUNTS = re.compile(r"Copy\d+ chars / \d+ words")
_AFTER_FENCE = re.compile(r"(^[ \t]*```[^\n`]*?)[ \t]*Copy code[ \t]*", re.M)
_ALONE = re.compile(r"^[ \t]*Copy code[ \t]*$\n?", re.M)


class Rejected(Exception):
    """A conversation is rejected; the message is the reason, the same for all conversations of its kind."""


class _Converter(MarkdownConverter):
    def convert_br(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        return " " if "_inline" in parent_tags else "\n"


def _code_language(block: Tag) -> str:
    """The language that the class of a ``<pre>`` block's code names; empty if it names none."""
    code = block.find("code")
    match = re.search(r"language-([\w+#-]+)", " ".join(code.get_attribute_list("class"))) if code else None
    return match[1] if match else ""


_CONVERTER = _Converter(
    autolinks=False,
    bullets="-",
    code_language_callback=_code_language,
    escape_asterisks=False,
    escape_underscores=False,
    heading_style="atx",
    wrap=True,  # joins lines, as white space means nothing in HTML,
    wrap_width=None,  # and breaks none
)


def is_html(text: str) -> bool:
    """Whether a text is HTML as a whole: one element from its first character to its last.

    A text that speaks of tags, or shows some in a fence, is not.
    """
    return _WHOLLY_HTML.fullmatch(text) is not None


def to_markdown(html: str) -> str:
    """An HTML fragment as Markdown, without scripts, styles and buttons.

    Raises:
      Rejected: the HTML is malformed or nested too deeply for its parser.
    """
    try:
        page = BeautifulSoup(html, "html.parser")
        for tag in page(_DROPPED_TAGS):
            tag.decompose()
        for block in page("pre"):
            # A page's own header of the block stands before the code, and is no part of it.
            if (code := block.find("code")) is not None:
                block.clear()
                block.append(code)
        return _CONVERTER.convert_soup(page)
    except (ParserRejectedMarkup, RecursionError, ValueError):
        raise Rejected("HTML that cannot be read") from None


def clean_text(turn: Turn) -> Turn:
    """A turn without markup and text of the chat page."""
    text = turn.text
    if turn.role == "assistant" and is_html(text):
        text = to_markdown(text)
    for debris in (_PAGER, _COUNTS, _ALONE):
        text = debris.sub("", text)
    return Turn(turn.role, _AFTER_FENCE.sub(r"\1", text).strip())


def clean_turns(turns: Sequence[Turn], blocked: Sequence[str] = BLOCKED) -> tuple[Turn, ...]:
    """The turns to train on: the system's if it comes first, then pairs of question and answer.

    Args:
      turns: as they were read.
      blocked: phrases of which none may occur, in upper or lower case.

    Raises:
      Rejected: nothing is left to train on.
    """
    cleaned = [turn for turn in map(clean_text, turns) if turn.text]
    if not cleaned:
        raise Rejected("empty")
    system = cleaned[:1] if cleaned[0].role == "system" else []
    spoken = cleaned[len(system) :]
    while spoken and spoken[0].role != "user":
        spoken.pop(0)
    while spoken and spoken[-1].role != "assistant":
        spoken.pop()
    if not spoken:
        raise Rejected("no answer")
    if any(turn.role != ("user", "assistant")[number % 2] for number, turn in enumerate(spoken)):
        raise Rejected("user and assistant do not alternate")
    if sum(len(turn.text) for turn in spoken) < LEAST_CHARACTERS:
        raise Rejected(f"fewer than {LEAST_CHARACTERS} characters")
    folded = "\n".join(turn.text for turn in spoken).casefold()
    if any(phrase.casefold() in folded for phrase in blocked):
        raise Rejected("a blocked phrase")
    return (*system, *spoken)


class Deduplicator:
    """Detects duplicate conversations by 16-byte digests of their ids and first pairs."""

    def __init__(self):
        self._keys: set[bytes] = set()
        self._pairs: set[bytes] = set()

    def check(self, conversation: Conversation) -> str:
        """Returns the key of a cleaned conversation: its id, or else the digest of its first pair.

        Raises:
          Rejected: its id, or its first question and answer, occurred before.
        """
        spoken = [turn.text for turn in conversation.turns if turn.role != "system"]
        pair = _digest("\0".join(spoken[:2]))
        key = pair.hex() if conversation.key is None else conversation.key
        if _digest(key) in self._keys:
            raise Rejected("a duplicate id")
        if pair in self._pairs:
            raise Rejected("a duplicate first question and answer")
        self._keys.add(_digest(key))
        self._pairs.add(pair)
        return key


def is_test(key: str, share: float) -> bool:
    """Whether a conversation belongs to the test split, which depends on its key only."""
    return int.from_bytes(_digest(key)[:8], "big") < share * 2**64


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
