"""Tokenizers of folders: special tokens from every file that may name them, and exact ids."""

import json
import random

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from agentic_ring.data.text.tokenizer import LONG_TEXT, MARGIN, RememberingTokenizer, Tokenizer
from agentic_ring.errors import ArgumentError, DataError
from tests.data.text.tokenizers_for_tests import byte_level, sentencepiece


def folder_of(saved, path, **files):
    """The saved tokenizer with some of its JSON files replaced."""
    saved.save(path)
    for name, contents in files.items():
        text = contents if isinstance(contents, str) else json.dumps(contents)
        (path / f"{name}.json").write_text(text)
    return path


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_what_is_saved_is_loaded(tmp_path, make):
    """What has no use here is still there when it is saved again."""
    tokenizer, original = make(eos=["</s>", "<s>"], chat_template="{{ messages }} é"), tmp_path / "original"
    folder_of(tokenizer, original, special_tokens_map={"unk_token": "<s>", "eos_token": "<s>"})
    others = {"tokenizer_config": {"legacy": False}, "generation_config": {"min_p": 0.1, "max_length": 8}}
    for name, fields in others.items():
        file = original / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    loaded = Tokenizer.load(folder_of(Tokenizer.load(original), tmp_path))
    for name in ("digest", "bos_id", "eos_ids", "chat_template", "vocab_size"):
        assert getattr(loaded, name) == getattr(tokenizer, name), name
    ids = {"bos_token_id": tokenizer.token_id("<s>"), "eos_token_id": list(loaded.eos_ids)}
    saved = [json.loads((tmp_path / f"{name}.json").read_text()) for name in others]
    assert saved[1] == others["generation_config"] | ids
    assert (saved[0]["legacy"], saved[0]["unk_token"], saved[0]["eos_token"]) == (False, "<s>", "</s>")
    assert len(loaded.eos_ids) == 2
    assert loaded.add_bos is True
    text = "USER: What is the capital? \n</s>é"
    assert loaded.encode(text) == tokenizer.encode(text)
    # Truncation in the file is ignored, and so is a byte order mark.
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    path = tmp_path / "tokenizer.json"
    how = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": how}))
    assert Tokenizer.load(tmp_path).encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("files", "bos", "eos"),
    [
        ({}, "<s>", ["</s>"]),
        ({"tokenizer_config": {"bos_token": {"content": "</s>"}, "eos_token": "<s>"}}, "</s>", ["<s>"]),
        ({"tokenizer_config": {}, "special_tokens_map": {"bos_token": "<s>"}}, "<s>", []),
        ({"tokenizer_config": {"bos_token": None}, "config": {"eos_token_id": 5}}, None, [5]),
        ({"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": [3]}}, "<s>", ["</s>", 3]),
        ({"config": {"eos_token_id": [10_000, 4]}}, "<s>", ["</s>", 4]),
    ],
)
def test_special_tokens_are_found_in_whichever_file_names_them(tmp_path, files, bos, eos):
    # Only the files named here speak; the one that saving writes as well would go before config.json.
    files = {"generation_config": {}, **files}
    tokenizer = Tokenizer.load(folder_of(byte_level(), tmp_path, **files))
    assert tokenizer.bos == bos
    ids = (tokenizer.token_id(token) if isinstance(token, str) else token for token in eos)
    assert tokenizer.eos_ids == tuple(ids)


@pytest.mark.parametrize("kind", ["added_tokens", "tokenizer_config"])
def test_tokens_that_stand_in_other_files_only_are_added(tmp_path, kind):
    """One may be a word of tokenizer.json, or follow its last id."""
    first, word = byte_level().vocab_size, "USER"
    tokens = {word: byte_level().token_id(word), "<|tool|>": first, "<|end of tool|>": first + 1}

    def load(tokens):
        described = {number: {"content": token, "special": True} for token, number in tokens.items()}
        files = {"added_tokens": tokens} if kind == "added_tokens" else {}
        files["tokenizer_config"] = {} if files else {"added_tokens_decoder": described}
        return Tokenizer.load(folder_of(byte_level(), tmp_path, **files))

    assert load(tokens).encode(f"<|tool|>{word}<|end of tool|>") == [first, tokens[word], first + 1]
    with pytest.raises(DataError, match=rf"{kind}\.json gives the token 'x y' the id {first + 7}, but"):
        load({"x y": first + 7})


def test_the_configuration_decides_about_bos_before_the_post_processor(tmp_path):
    for config, expected in (({"add_bos_token": False}, False), ({}, True)):
        folder_of(sentencepiece(), tmp_path, tokenizer_config={"bos_token": "<s>"} | config)
        assert Tokenizer.load(tmp_path).add_bos is expected


def test_chat_templates_are_found_in_their_places(tmp_path):
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder_of(byte_level(), tmp_path, tokenizer_config={"chat_template": several})
    assert Tokenizer.load(tmp_path).chat_template == "plain"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert Tokenizer.load(tmp_path).chat_template == "from a file"


def test_broken_folders_are_named(tmp_path):
    for files, message in (
        ({"tokenizer": "{"}, r"tokenizer\.json is not JSON"),
        ({"tokenizer_config": "{"}, r"tokenizer_config\.json is not JSON"),
        ({"tokenizer_config": []}, r"has its content = \[\]: Input should be an object"),
        ({"tokenizer_config": {"eos_token": "<|end|>"}}, r"'<\|end\|>' is not in the tokenizer's vocabulary"),
        ({"tokenizer_config": {"eos_token": 3}}, r"eos_token is 3, expected a string"),
        ({"generation_config": {"eos_token_id": "2"}}, r"eos_token_id is '2', expected an id"),
        ({"tokenizer_config": {"chat_template": 3}}, r"chat_template is a int"),
    ):
        with pytest.raises(DataError, match=message):
            Tokenizer.load(folder_of(byte_level(), tmp_path, **files))
    with pytest.raises(DataError, match="there is no folder"):
        Tokenizer.load(tmp_path / "none")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer\.json; fetch it"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(DataError, match=r"convert it once[^$]*save_pretrained"):
        Tokenizer.load(tmp_path)


def test_a_prompt_begins_once_with_the_token_that_begins_texts():
    tokenizer = byte_level()
    expected = tokenizer.encode("The user", bos=True)
    assert tokenizer.encode_prompt("The user") == tokenizer.encode_prompt("<s>The user") == expected
    without = byte_level(add_bos=False)
    assert without.encode_prompt("The user") == expected[1:]
    with pytest.raises(ArgumentError, match="no token that begins a text"):
        byte_level(bos=None).encode("a", bos=True)
    tokenizer.check_fits(tokenizer.vocab_size)
    with pytest.raises(DataError, match=f"go up to {tokenizer.vocab_size - 1} .* has 300 entries"):
        tokenizer.check_fits(300)


WORDS = ["the", "user", "assistant,", "lines:", "<12345>\n", "records", "éàü", "日本", "don't", "", "x-y"]


def text_of(words, seed):
    return " ".join(random.Random(seed).choices(WORDS, k=words))


LLAMA_3 = tokenizers.Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
BYTES = pre_tokenizers.ByteLevel(False, use_regex=False)
SPACES = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
# Each with its pre-tokenizer and normalizer. A word of roberta has a space put before it where a text
# begins; llama2 divides no text into words.
KINDS = {
    "gpt2": (pre_tokenizers.ByteLevel(False), None),
    "llama3": (pre_tokenizers.Sequence([pre_tokenizers.Split(LLAMA_3, "isolated"), BYTES]), None),
    "metaspace": (pre_tokenizers.Metaspace(prepend_scheme="first"), normalizers.NFKC()),
    "whitespace": (pre_tokenizers.Whitespace(), normalizers.Lowercase()),
    "roberta": (pre_tokenizers.ByteLevel(True), None),
    "llama2": (None, normalizers.Sequence(SPACES)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_begins_like_an_earlier_one_has_the_tokens_of_the_whole(kind):
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer, backend.normalizer = KINDS[kind]
    if kind == "gpt2":
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>"], show_progress=False)
    backend.train_from_iterator([text_of(300, seed) for seed in range(8)], trainer)
    plain, remembering = Tokenizer(backend), RememberingTokenizer(backend)
    record = text_of(4500, 100)
    assert len(record) > LONG_TEXT + MARGIN
    # Questions that share the record, its first half, words and parts of words of each other, and nothing.
    ends = [" who?", "", " whom", "<s> who <s>", "日", text_of(300, 1), "e" * 50, " " * 9, "\n"]
    texts = [record + end for end in ends]
    texts += [record[: len(record) // 2 + cut] + "who?" for cut in range(4)]
    texts += [record[:-3], "x" + record, record[1:], record]
    # Another text is remembered instead, and so is one of which little is shared.
    other = text_of(5000, 7)
    remembered = []
    for each in (*texts, other, other[: LONG_TEXT + 100] + record):
        assert remembering.encode(each) == plain.encode(each)
        remembered.append(remembering._encoding)
    # Only the end is encoded where the tokenizer divides texts into words.
    if kind != "roberta":
        assert (remembered[1] is remembered[0]) == (kind != "llama2")
    assert remembered[-3] is not remembered[-2] is not remembered[-1]
