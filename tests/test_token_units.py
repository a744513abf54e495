import pytest

from agentic_ring.errors import ArgumentError
from agentic_ring.token_units import parse_tokens, short_tokens


@pytest.mark.parametrize("text", ["4k", "12k", "512k", "1m", "500000", "1"])
def test_tokens_are_written_as_they_are_read(text):
    assert short_tokens(parse_tokens(text)) == text


@pytest.mark.parametrize(
    ("text", "tokens"), [("4096", 4096), ("2048k", 2**21), ("2048K", 2**21), ("1m", 2**20), ("512k", 2**19)]
)
def test_tokens_are_read(text, tokens):
    assert parse_tokens(text) == tokens


def test_the_shortest_way_to_write_tokens_is_taken():
    assert short_tokens(4096) == "4k"
    assert short_tokens(1024 * 1024) == "1m"


@pytest.mark.parametrize("text", ["", "k", "2g", "-1k", "0", "1.5k"])
def test_other_texts_are_no_context(text):
    with pytest.raises(ArgumentError, match="a context of"):
        parse_tokens(text)
