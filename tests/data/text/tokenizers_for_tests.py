"""Small tokenizers of each kind, trained on a few sentences."""

import json
from functools import cache

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from agentic_ring.data.text.tokenizer import Tokenizer

SENTENCES = (
    "A chat between a curious user and an artificial intelligence assistant.",
    "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    "USER: What is the capital of France? ASSISTANT: The capital of France is Paris.",
    "line 12: REGISTER_CONTENT is <4821>\n",
)
LLAMA_3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def _train(backend: tokenizers.Tokenizer, special: tuple[str, ...], alphabet: list[str]) -> None:
    options = {"special_tokens": list(special), "initial_alphabet": alphabet, "show_progress": False}
    backend.train_from_iterator(SENTENCES * 4, trainers.BpeTrainer(vocab_size=400, **options))


@cache
def _byte_level(special: tuple[str, ...]) -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    _train(backend, special, pre_tokenizers.ByteLevel.alphabet())
    return backend.to_str()


def byte_level(special: tuple[str, ...] = ("<s>", "</s>", *LLAMA_3_TOKENS), **options) -> Tokenizer:
    """As GPT-2's and LLaMA 3's: a word's space belongs to it, and a text's first word has none."""
    settings = {"bos": "<s>", "eos": ["</s>"], "add_bos": True} | options
    return Tokenizer(tokenizers.Tokenizer.from_str(_byte_level(special)), **settings)


@cache
def _sentencepiece(prepend: str) -> str:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    _train(backend, ("<unk>", "<s>", "</s>"), [*map(chr, range(32, 127)), "\n", "é"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    if prepend == "always":
        parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(parts)
        backend.pre_tokenizer = None
    return backend.to_str()


def sentencepiece(prepend: str = "always", **options) -> Tokenizer:
    """As LLaMA 1's and 2's: a text begins with a space of its own, which is written as ▁.

    "always" puts it before every stretch between special tokens, even one that begins with a space,
    as the converted files of LLaMA 2 do; "first" only where a text begins without one.
    """
    settings = {"bos": "<s>", "eos": ["</s>"]} | options
    return Tokenizer(tokenizers.Tokenizer.from_str(_sentencepiece(prepend)), **settings)


def byte_fallback() -> Tokenizer:
    """As LLaMA 2's: a character without a token is written as its bytes."""
    state = json.loads(_sentencepiece("always"))
    vocabulary = state["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    state["model"]["byte_fallback"] = True
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    state["decoder"] = json.loads(decoders.Sequence([*parts]).__getstate__())
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), bos="<s>", eos=["</s>"])


def spelled(tokenizer: Tokenizer, ids) -> list[str | None]:
    """The tokens of ids."""
    return [tokenizer.token(int(number)) for number in ids]
