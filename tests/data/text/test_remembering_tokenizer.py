"""A text that begins like an earlier one gets the same tokens in less time."""

import random
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from agentic_ring.data.text.tokenizer import LONG_TEXT, MARGIN, RememberingTokenizer, Tokenizer

WORDS = ["the", "user", "assistant,", "lines:", "<12345>\n", "records", "éàü", "日本", "don't", "", "x-y"]


def text(seed: int, words: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choices(WORDS, k=words))


def trained(pre_tokenizer, normalizer=None, post_processor=None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizer
    backend.normalizer = normalizer
    backend.post_processor = post_processor
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>"], show_progress=False)
    backend.train_from_iterator([text(seed, 300) for seed in range(8)], trainer)
    return backend


LLAMA_3 = tokenizers.Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIVIDED: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt2": lambda: trained(
        pre_tokenizers.ByteLevel(False), post_processor=processors.ByteLevel(trim_offsets=True)
    ),
    "llama3": lambda: trained(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(LLAMA_3, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    ),
    "metaspace": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first"), normalizers.NFKC()),
    "whitespace": lambda: trained(pre_tokenizers.Whitespace(), normalizers.Lowercase()),
}
# A word of the first has a space put before it where a text begins; the second divides no text.
OTHERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "roberta": lambda: trained(pre_tokenizers.ByteLevel(True)),
    "llama2": lambda: trained(
        None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
}


@pytest.mark.parametrize("kind", [*DIVIDED, *OTHERS])
def test_tokens_are_those_of_the_whole_text(kind):
    backend = (DIVIDED | OTHERS)[kind]()
    plain, remembering = Tokenizer(backend), RememberingTokenizer(backend)
    record = text(100, 4500)
    assert len(record) > LONG_TEXT + MARGIN
    # Questions that share the record, its first half, words and parts of words of each other, and nothing.
    ends = [" who?", "", " whom", "<s> who <s>", "日", text(1, 300), "e" * 50, " " * 9, "\n"]
    texts = [record + end for end in ends]
    texts += [record[: len(record) // 2 + cut] + "who?" for cut in range(4)]
    texts += [record[:-3], "x" + record, record[1:], record]
    remembered = []
    for each in texts:
        assert remembering.encode(each) == plain.encode(each)
        remembered.append(remembering._encoding)
    # Only the end is encoded where the tokenizer divides texts into words.
    if kind != "roberta":
        assert (remembered[1] is remembered[0]) == (kind in DIVIDED)
    # Another text is remembered instead, and so is one of which little is shared.
    for each in (text(7, 5000), text(7, 5000)[: LONG_TEXT + 100] + record):
        assert remembering.encode(each) == plain.encode(each)
        assert remembering._encoding is not remembered[-1]
        remembered.append(remembering._encoding)
