"""Tokenizers of folders: special tokens from every file that may name them, and exact ids."""

import json
from itertools import chain

import pytest

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ArgumentError, DataError
from tests.data.text.tokenizers_for_tests import byte_level, sentencepiece, spelled


def folder_of(saved, path, **files):
    """The saved tokenizer with some of its JSON files replaced (or taken away, where None)."""
    saved.save(path)
    for name, contents in files.items():
        file = path / f"{name}.json"
        if contents is None:
            file.unlink()
        else:
            file.write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return path


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_what_is_saved_is_loaded(tmp_path, make):
    tokenizer = make(eos=["</s>", "<s>"], chat_template="{{ messages }} é")
    loaded = Tokenizer.load(folder_of(tokenizer, tmp_path))
    for name in ("digest", "bos_id", "eos_ids", "chat_template", "vocab_size"):
        assert getattr(loaded, name) == getattr(tokenizer, name), name
    assert len(loaded.eos_ids) == 2
    assert loaded.add_bos is True
    text = "USER: What is the capital? \n</s>é"
    assert loaded.encode(text) == tokenizer.encode(text)


def test_generation_is_told_what_ends_an_answer(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.9, "eos_token_id": 7}')
    tokenizer = byte_level()
    tokenizer.save(tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": [tokenizer.token_id("</s>")]}
    assert settings == {"top_p": 0.9} | ids


def test_no_token_is_added_that_was_not_asked_for():
    tokenizer = sentencepiece()
    assert tokenizer.add_bos, "its post-processor puts BOS in front"
    assert spelled(tokenizer, tokenizer.encode("The capital")) == ["▁The", "▁capital"]
    assert spelled(tokenizer, tokenizer.encode("The capital", bos=True)) == ["<s>", "▁The", "▁capital"]
    assert tokenizer.encode("") == []


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    tokenizer = byte_level()
    plain = tokenizer.encode("The capital of France")
    path = folder_of(tokenizer, tmp_path) / "tokenizer.json"
    contents = json.loads(path.read_text())
    how = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(contents | {"truncation": how}))
    assert Tokenizer.load(tmp_path).encode("The capital of France") == plain


def test_a_text_that_goes_on_gets_no_space_of_its_own():
    for prepend in ("always", "first"):
        tokenizer = sentencepiece(prepend)
        texts = ("USER: What ASSISTANT:", " The capital</s>", "USER: What")
        before = ("", *texts)
        pieces = [tokenizer.encode(text, after=after) for text, after in zip(texts, before, strict=False)]
        alone = [tokenizer.encode(text) for text in texts]
        whole = tokenizer.encode("".join(texts))
        assert list(chain(*pieces)) == whole
        assert list(chain(*alone)) != whole, "it matters what stands before"


@pytest.mark.parametrize(
    ("files", "bos", "eos"),
    [
        ({}, "<s>", ["</s>"]),
        ({"tokenizer_config": {"bos_token": {"content": "</s>"}, "eos_token": "<s>"}}, "</s>", ["<s>"]),
        ({"tokenizer_config": None, "special_tokens_map": {"bos_token": "<s>"}}, "<s>", []),
        ({"tokenizer_config": {"bos_token": None}, "config": {"eos_token_id": 5}}, None, [5]),
        (
            {"config": {"bos_token_id": 1, "eos_token_id": 0}, "generation_config": {"eos_token_id": [3, 2]}},
            "<s>",
            ["</s>", 3, 2],
        ),
        ({"config": {"eos_token_id": [10_000, 4]}}, "<s>", ["</s>", 4]),
    ],
)
def test_special_tokens_are_found_in_whichever_file_names_them(tmp_path, files, bos, eos):
    # Only the files named here speak; the one that saving writes as well would go before config.json.
    files = {"generation_config": None, **files}
    tokenizer = Tokenizer.load(folder_of(byte_level(), tmp_path, **files))
    assert tokenizer.bos == bos
    assert tokenizer.eos_ids == tuple(
        tokenizer.token_id(token) if isinstance(token, str) else token for token in eos
    )


def test_the_configuration_decides_about_bos_before_the_post_processor(tmp_path):
    tokenizer = sentencepiece()
    assert tokenizer.add_bos
    config = {"bos_token": "<s>", "add_bos_token": False}
    assert not Tokenizer.load(folder_of(tokenizer, tmp_path, tokenizer_config=config)).add_bos
    assert Tokenizer.load(folder_of(tokenizer, tmp_path, tokenizer_config={"bos_token": "<s>"})).add_bos


def test_chat_templates_are_found_in_their_places(tmp_path):
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder_of(byte_level(), tmp_path, tokenizer_config={"chat_template": several})
    assert Tokenizer.load(tmp_path).chat_template == "plain"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert Tokenizer.load(tmp_path).chat_template == "from a file"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer": "{"}, r"tokenizer\.json is not JSON"),
        ({"tokenizer": None}, r"has no tokenizer\.json; fetch it"),
        ({"tokenizer_config": "{"}, r"tokenizer_config\.json is not JSON"),
        ({"tokenizer_config": []}, r"has its content = \[\]: Input should be an object"),
        ({"tokenizer_config": {"eos_token": "<|end|>"}}, r"'<\|end\|>' is not in the tokenizer's vocabulary"),
        ({"tokenizer_config": {"eos_token": 3}}, r"eos_token is 3, expected a string"),
        ({"generation_config": {"eos_token_id": "2"}}, r"eos_token_id is '2', expected an id"),
        ({"tokenizer_config": {"chat_template": 3}}, r"chat_template is a int"),
    ],
)
def test_broken_folders_are_named(tmp_path, files, message):
    with pytest.raises(DataError, match=message):
        Tokenizer.load(folder_of(byte_level(), tmp_path, **files))


def test_a_folder_without_a_tokenizer_says_how_to_get_one(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(DataError, match=r"convert it once[^$]*save_pretrained"):
        Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match="there is no folder"):
        Tokenizer.load(tmp_path / "none")


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
