import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from agentic_ring.errors import DataError
from agentic_ring.token_units import parse_tokens, short_tokens
from evals.lines.documents import plan_documents
from evals.lines.token_counts import estimated_tokens, token_counter


@pytest.fixture
def tokenizer_folder(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_counts_with_bos_and_neither_cuts_nor_fills_up(tokenizer_folder):
    for path in (tokenizer_folder, tokenizer_folder / "tokenizer.json"):
        assert token_counter(path)("one two three four five six") == 7


def test_a_folder_without_tokenizer_and_a_file_that_is_none_are_named(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer.json does not exist"):
        token_counter(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"tokenizer.json cannot be read as a tokenizer"):
        token_counter(tmp_path)


def test_the_estimate_is_a_little_above_llamas_tokens_a_line():
    # LLaMA has 23.18 on average in LongChat's files.
    document = plan_documents("LRT-NL", "4k", 0, 1, 1)[0]
    lines = estimated_tokens(document.build(2000).text) - estimated_tokens(document.build(1000).text)
    assert 23.18 < lines / 1000 < 24.2
    assert token_counter(None) is estimated_tokens


@pytest.mark.parametrize("text", ["4k", "12k", "512k", "1m", "500000", "1"])
def test_tokens_are_written_as_they_are_read(text):
    assert short_tokens(parse_tokens(text)) == text


def test_the_shortest_way_to_write_tokens_is_taken():
    assert short_tokens(4096) == "4k"
    assert short_tokens(1024 * 1024) == "1m"
    assert parse_tokens("512k") == 524288
