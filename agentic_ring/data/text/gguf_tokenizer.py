"""The tokenizer in a GGUF file, as a ``tokenizers.Tokenizer``.

Two kinds are supported. A "gpt2" one merges bytes within words, into which a pre-tokenizer of a known name
divides the text. A "llama" one is SentencePiece's: it merges characters by the scores of what they form, and
writes a character without a token as bytes. Names, patterns and defaults are those of src/llama-vocab.cpp in
https://github.com/ggml-org/llama.cpp.
"""

from pathlib import Path
from typing import Any

from agentic_ring.errors import DataError, UnknownNameError
from agentic_ring.extras import needs_extra
from agentic_ring.files.gguf_file import GgufFile, open_gguf

with needs_extra("text"):
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of tokens; others are bytes and unused ones."""
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN_2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA_3 = _QWEN_2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DIGIT_BY_DIGIT = (r"\p{N}", _GPT_2)
_PATTERNS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT_2,),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b"), _DIGIT_BY_DIGIT),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), (_LLAMA_3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_QWEN_2,)),
    "tekken": (_TEKKEN,),
}
"""What divides a text into words, by ``tokenizer.ggml.pre``; each pattern divides what the last one left."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Those with which a word that is a token is not merged from parts; their texts begin with BOS by default."""
_COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Those that compose accents with their letters first."""
_REMEDY = "take a file that llama.cpp's conversion wrote with the model's tokenizer"
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
)
"""Tokens that end an answer in any model that has them."""


def read_tokenizer(path: Path) -> dict[str, Any]:
    """Returns the arguments of ``agentic_ring.data.text.tokenizer.Tokenizer`` for the one in a GGUF file.

    Raises:
      UnknownNameError: its kind or its pre-tokenizer is not supported.
      DataError: the file is damaged, or has no tokenizer.
    """
    file = open_gguf(path)
    kind, tokens = _field(file, "model", str), _field(file, "tokens", list)
    if kind not in ("gpt2", "llama"):
        raise UnknownNameError(f"tokenizer.ggml.model in {path}:", kind, ("gpt2", "llama"))
    types = _field(file, "token_type", list, [_NORMAL] * len(tokens))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if not len(vocabulary) == len(tokens) == len(types):
        raise DataError(f"{path} has a token twice, or not one type for each token; {_REMEDY}")
    backend, add_bos = (_byte_level if kind == "gpt2" else _sentencepiece)(file, vocabulary, types)
    # Phi-3's tokens take the space after them, which its file does not say.
    takes_space = kind == "llama" and file.fields.get("general.architecture") == "phi3"
    backend.add_tokens(
        [
            tokenizers.AddedToken(
                token,
                special=number_of_type != _USER_DEFINED,
                normalized=False,
                rstrip=takes_space and token not in ("<unk>", "<s>", "<|endoftext|>"),
            )
            for token, number_of_type in zip(tokens, types, strict=True)
            if number_of_type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    bos, *ends = (_token(file, tokens, name) for name in ("bos", "eos", "eot", "eom"))
    known = (token for token in _ENDS if token in vocabulary and types[vocabulary[token]] != _NORMAL)
    return {
        "backend": backend,
        "bos": bos,
        "eos": [*filter(None, ends), *known],
        "add_bos": _field(file, "add_bos_token", bool, add_bos),
        "chat_template": file.fields.get("tokenizer.chat_template"),
    }


def _byte_level(file: GgufFile, vocabulary: dict[str, int], types: list[int]) -> tuple[Any, bool]:
    """The tokenizer, and whether its texts begin with BOS where the file does not say."""
    name = _field(file, "pre", str)
    if name not in _PATTERNS:
        raise UnknownNameError(f"tokenizer.ggml.pre in {file.path}:", name, tuple(_PATTERNS))
    pairs = [tuple(merge.split(" ")) for merge in _field(file, "merges", list)]
    backend = tokenizers.Tokenizer(_merging(file, vocabulary, pairs, ignore_merges=name in _WHOLE_WORDS))
    if name in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    words = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in _PATTERNS[name]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, name in _WHOLE_WORDS


def _sentencepiece(file: GgufFile, vocabulary: dict[str, int], types: list[int]) -> tuple[Any, bool]:
    """The tokenizer, and whether its texts begin with BOS where the file does not say."""
    scores = _field(file, "scores", list)
    if len(scores) != len(types):
        raise DataError(f"{file.path} has {len(types)} tokens and {len(scores)} scores; {_REMEDY}")
    normal = {token for token, number in vocabulary.items() if types[number] == _NORMAL}
    splits = ((token[:at], token[at:]) for token in normal for at in range(1, len(token)))
    pairs = [pair for pair in splits if normal.issuperset(pair)]
    # The best token is merged first, and of pairs that form the same one that with the longest first part.
    pairs.sort(
        key=lambda pair: (-scores[vocabulary["".join(pair)]], vocabulary["".join(pair)], -len(pair[0]))
    )
    unknown = _token(file, list(vocabulary), "unknown")
    model = _merging(file, vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend, prefix = tokenizers.Tokenizer(model), _field(file, "add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return backend, True


def _merging(file: GgufFile, vocabulary: dict[str, int], pairs: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary, pairs, **options)
    # The library raises no narrower class.
    except Exception as error:
        raise DataError(f"the tokenizer in {file.path} cannot be used ({error}); {_REMEDY}") from None


def _field(file: GgufFile, name: str, kind: type, default: Any = None) -> Any:
    value = file.fields.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, kind):
        found = "no" if value is None else f"an unexpected {type(value).__name__} as"
        raise DataError(f"{file.path} has {found} tokenizer.ggml.{name}; {_REMEDY}")
    return value


def _token(file: GgufFile, tokens: list[str], name: str) -> str | None:
    """The token whose id the file has under this name; None if it has none."""
    number = file.fields.get(f"tokenizer.ggml.{name}_token_id")
    if number is not None and not (isinstance(number, int) and 0 <= number < len(tokens)):
        raise DataError(f"{file.path} has {name}_token_id {number!r}, but {len(tokens)} tokens; {_REMEDY}")
    return None if number is None else tokens[number]
