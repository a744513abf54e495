import pytest

from agentic_ring.token_units import parse_tokens, short_tokens


@pytest.mark.parametrize("text", ["4k", "12k", "512k", "1m", "500000", "1"])
def test_tokens_are_written_as_they_are_read(text):
    assert short_tokens(parse_tokens(text)) == text


def test_the_shortest_way_to_write_tokens_is_taken():
    assert short_tokens(4096) == "4k"
    assert short_tokens(1024 * 1024) == "1m"
    assert parse_tokens("512k") == 524288
