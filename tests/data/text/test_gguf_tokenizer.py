"""A GGUF file's tokenizer gives the ids of the one that it was made from, and its chat template."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from agentic_ring.data.text.chat import Turn, chat_template
from agentic_ring.data.text.tokenizer import RememberingTokenizer, Tokenizer
from agentic_ring.errors import AgenticRingError
from tests.data.text.tokenizers_for_tests import byte_fallback, byte_level
from tests.models.gguf_cases import tokenizer_fields, write_gguf

TEXTS = (
    "The capital of France is Paris.",
    " It's 12345 and  I'LL say:\n\n  don't\t\r\n <|eot_id|>the user</s> é e\u0301 日本語 🙂",
    "line 12: REGISTER_CONTENT is <4821>\n   ",
    "",
)
# As published in tokenizer.json of these models.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PUBLISHED = {
    "gpt-2": WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), TO_BYTES]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN_2), "isolated"), TO_BYTES]),
}


def written(folder: Path, fields: dict[str, Any], **others: Any) -> Path:
    return write_gguf(folder / "a.gguf", fields | others, {"token_embd.weight": np.zeros((2, 2), np.float32)})


@pytest.mark.parametrize("pre", PUBLISHED)
def test_bytes_are_merged_within_the_words_of_the_named_pre_tokenizer(pre, tmp_path):
    original = byte_level()
    original._backend.pre_tokenizer = PUBLISHED[pre]
    if pre == "qwen2":
        original._backend.normalizer = normalizers.NFC()
    fields = tokenizer_fields(original, pre=pre, add_bos_token=None)
    read = RememberingTokenizer.load(written(tmp_path, fields))
    assert isinstance(read, RememberingTokenizer)
    for text in TEXTS:
        assert read.encode(text) == original.encode(text)
        assert read.decode(read.encode(text)) == original.decode(original.encode(text))
    assert (read.bos, read.special_ids) == (original.bos, original.special_ids)
    assert read.add_bos == (pre == "llama-bpe")
    # Beside the end of a text, the end of a turn.
    assert [read.token(number) for number in read.eos_ids] == ["</s>", "<|eot_id|>"]


def best_pairs(text: str, scores: dict[str, float]) -> list[str]:
    """As SentencePiece defines it: the pair that forms the best token is merged, the leftmost of equals."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores.get(a + b, -np.inf), -at) for at, (a, b) in enumerate(pairwise(parts))]
        score, at = max(pairs, default=(-np.inf, 0))
        if score == -np.inf:
            return [
                byte
                for part in parts
                for byte in ([part] if part in scores else map("<0x{:02X}>".format, part.encode()))
            ]
        parts[-at : 2 - at] = ["".join(parts[-at : 2 - at])]


def test_characters_are_merged_by_score_and_others_written_as_bytes(tmp_path):
    original = byte_fallback()
    fields = tokenizer_fields(original, model="llama", pre="default", add_bos_token=None, merges=None)
    read = Tokenizer.load(written(tmp_path, fields))
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    of_token = dict(zip(tokens, scores, strict=True))
    for text in (TEXTS[0], TEXTS[2], "  two spaces, é 日本 🙂", "assistant assistance"):
        ids = read.encode(text)
        assert [read.token(number) for number in ids] == best_pairs(text, of_token)
        assert read.decode(ids) == text
    assert read.add_bos
    assert read.byte_ids == original.byte_ids
    assert read.encode("a</s>b") == [*read.encode("a"), *original.eos_ids, *read.encode("b")]
    read = Tokenizer.load(written(tmp_path, fields | {"tokenizer.ggml.add_space_prefix": False}))
    assert [read.token(number) for number in read.encode("a b")] == ["a", "▁", "b"]
    assert read.decode(read.encode(" a b")) == " a b"
    read = Tokenizer.load(written(tmp_path, fields | {"general.architecture": "phi3"}))
    assert read.encode("</s>\n a") == [*original.eos_ids, *read.encode("a")]


def test_the_chat_template_comes_from_the_file(tmp_path):
    source = "{{ bos_token }}{% for turn in messages %}{{ turn.content }}{{ eos_token }}{% endfor %}"
    file = written(tmp_path, tokenizer_fields(byte_level()), **{"tokenizer.chat_template": source})
    read = Tokenizer.load(file)
    assert chat_template("tokenizer", read).prompt([Turn("user", "Why?")]) == "<s>Why?</s>"
    read.save(tmp_path)
    assert Tokenizer.load(tmp_path).chat_template == source
    assert Tokenizer.load(tmp_path).encode(TEXTS[1]) == read.encode(TEXTS[1])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": None}, r"a\.gguf has no tokenizer.ggml.model; take a file .* with the model's tokenizer"),
        ({"model": "t5"}, "tokenizer.ggml.model in .*'t5'; choose one of: gpt2, llama"),
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre in .*'kimi-k2'; choose one of: default, gpt-2"),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"merges": ["no pair"]}, "cannot be used"),
        ({"model": "llama", "scores": [0.5]}, "400 tokens and 1 scores"),
        ({"token_type": [1, 1]}, "not one type for each token"),
        ({"eos_token_id": 9999}, "eos_token_id 9999, but 400 tokens"),
        ({"add_bos_token": "yes"}, "an unexpected str as tokenizer.ggml.add_bos_token"),
    ],
)
def test_errors_name_the_fault_of_a_tokenizer(changes, named, tmp_path):
    with pytest.raises(AgenticRingError, match=named):
        Tokenizer.load(written(tmp_path, tokenizer_fields(byte_level(), **changes)))
