r"""A test instrument: a LLaMA with hand-set weights, which answers literal questions about lines correctly.

    python evals/constructed_retriever.py runs/constructed
    python evals/line_retrieval.py --model runs/constructed --ctx 512k

It is not a result, as nothing was learned. It answers every question for one line, several lines, a chain
of lines or a JSON key correctly at any length, unless rotary positions, ring, chunks, cache or padding are
wrong. A miss therefore reveals a bug. Its tokenizer is made for the task; a number or a word is one token::

    "line adjective-"   "noun: REGISTER_CONTENT is <"   "12345"   ">\n"       a line
    "line adjective-"   "noun? I need the number."      "\n"                 the end of a question
           p - 2                    p - 1                  p

    layers 1, 2   the head attends exactly 1 token back, by rotary phases only, and copies the codes of that
                  token; in layer 2, those that the token has copied itself, which are of 2 tokens back
    layer 3       a token finds the one that an answer continues with, by the copied codes of both
    head          outputs the token that was found

What layer 3 looks for depends on the kind of its own token: ``_look_up`` lists the kinds. Codes of words and
numbers are random directions, so far apart that a softmax over a million tokens selects one.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from safetensors.numpy import save_file

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.files.atomic import replacing_folder
from agentic_ring.terminal import cli
from evals.ladder_tasks.questions import CHAIN_START, JSON_VALUE, LIST_END, LIST_START
from evals.lines.keys import all_words, word_lists
from evals.lines.longchat_prompt import LARGEST_VALUE, QUESTION_START
from evals.lines.word_tokenizer import (
    ASK,
    ASKED,
    END,
    NOUN_PATTERN,
    START,
    adjective_token,
    first_word_pattern,
    line_tokenizer,
)

HEAD_DIM, LAYERS = 64, 3
SLOW = 10
"""Index of the first slow wave among HEAD_DIM / 2."""
THETA = 1e8 ** (HEAD_DIM / 2 / SLOW)
"""Base whose slow rotary waves rotate by less than 0.02 over 2 million tokens; they carry the codes."""

WORD, CODE = 19, HEAD_DIM
"""Dimensions of the codes of a word of a key, and of a token that an answer can contain."""

CERTAIN = 60.0
"""Margin of the right score over all others: exp(-60) times a million tokens is negligible."""

FARTHER = 0.47
"""A sum of cosines over the fast waves is at least this much lower at any distance but the one that it is
made for, up to 2**21 (checked by enumeration)."""

CHAT_TEMPLATE = r"{{ messages[0].content.rstrip() + '\n' }}"
LISTED, QUOTED = "\nline {}-", '"{}-'
"""Forms of the first word of a key in a list of lines and in JSON; ``adjective_token`` is that in a line."""
CHAIN_ASKED = CHAIN_START + ASKED.removeprefix(QUESTION_START)
JSON_START, COLON, CLOSE, NEWLINE = '": "', ": ", ">\n", "\n"

COPIED_FLAGS = "start", "after_list", "list", "before_list", "line"
FLAGS = (*COPIED_FLAGS, "one", "value", "number", "noun", "next", "asks")


def _consecutive(*sizes: int) -> Iterator[slice]:
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size


class _Slots:
    """Slices of the residual stream."""

    copied_size = 3 * WORD + len(COPIED_FLAGS)
    first, second, asked, flags, code, copied, found, filler = _consecutive(
        WORD, WORD, WORD, len(FLAGS), CODE, copied_size, CODE, 1
    )
    """Codes of a token's own word: the first of a key, the second in a record, the second in a question or an
    answer; then what kind of a token it is, its code in an answer; what it copied and found."""
    width = filler.stop + filler.stop % 2
    own = slice(0, copied_size)

    @classmethod
    def flag(cls, name: str) -> int:
        return cls.flags.start + FLAGS.index(name)

    @classmethod
    def copy_of(cls, own: slice | int) -> slice | int:
        first = cls.copied.start
        return own + first if isinstance(own, int) else slice(own.start + first, own.stop + first)


NORM = 4096.0
"""Squared norm of every embedding, made up by the filler: large, so that copying hardly changes it."""


def build(folder: Path, seed: int = 0) -> None:
    """Writes the model and its tokenizer in Hugging Face's layout."""
    tokenizer = _tokenizer()
    random = np.random.default_rng(seed)
    firsts, seconds = (
        dict(zip(all_words(), _directions(random, len(all_words()), WORD), strict=True)) for _ in range(2)
    )
    embedding = np.zeros((tokenizer.vocab_size, _Slots.width))
    head = np.zeros_like(embedding)

    def describe(token: str, *flags: str, **words: np.ndarray) -> int:
        """Sets the flags and words of a token; returns its number."""
        number = tokenizer.token_id(token)
        assert number is not None, token
        for flag in flags:
            embedding[number, _Slots.flag(flag)] = 1.0
        for slot, code in words.items():
            embedding[number, getattr(_Slots, slot)] = code
        return number

    adjectives, nouns = word_lists()
    for word in all_words():
        describe(word + START, "start", second=seconds[word])
        describe(word + ASK, asked=seconds[word])
        describe(adjective_token(word), "line", "value", first=firsts[word])
    for word in nouns:
        describe(word + JSON_START, "start", second=seconds[word])
        describe(word + JSON_VALUE, asked=seconds[word])
    for word in adjectives:
        describe(QUOTED.format(word), first=firsts[word])
    describe(LIST_START, "before_list")
    describe(LIST_END, "after_list")
    close, colon = describe(CLOSE, "asks"), describe(COLON, "asks")
    found = [
        describe(NEWLINE, "asks", "next"),
        *(describe(adjective_token(word)) for word in adjectives),
        *(describe(LISTED.format(word), "list", "next", first=firsts[word]) for word in adjectives),
        *(describe(word, "noun", asked=seconds[word]) for word in nouns),
        *(describe(str(value), "number", "value") for value in range(1, LARGEST_VALUE + 1)),
    ]
    embedding[found, _Slots.code] = codes = _directions(random, len(found), CODE)
    head[found, _Slots.found] = codes
    # A found line break ends an answer.
    end = tokenizer.token_id(END)
    head[[end, found[0]]] = head[[found[0], end]]
    embedding[:, _Slots.flag("one")] = 1.0
    # After a second word, what came before the first one says how the answer goes on.
    for number, before in ((close, "line"), (colon, "list")):
        head[number, _Slots.flag("noun")] = head[number, _Slots.copy_of(_Slots.flag(before))] = 10.0
        head[number, _Slots.flag("one")] = -15.0
    embedding[:, _Slots.filler] = np.sqrt(NORM - np.square(embedding).sum(axis=1, keepdims=True))

    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": np.ones(_Slots.width),
    }
    layers = _copy(_Slots.own), _copy(_Slots.copied), _look_up(_gap(firsts), _gap(seconds))
    for layer, weights in enumerate(layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in _shapes().items():
            tensors[f"{prefix}{name}.weight"] = weights.get(name, np.zeros((rows, columns)))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(_Slots.width)
    with replacing_folder(folder) as beside:
        save_file(
            {name: tensor.astype(np.float32) for name, tensor in tensors.items()},
            beside / "model.safetensors",
        )
        tokenizer.save(beside)
        config = json.dumps(_config(tokenizer.vocab_size), indent=2)
        (beside / "config.json").write_text(config + "\n")


def _config(vocabulary: int) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _Slots.width,
        "intermediate_size": 2,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2**21,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "trained_on_task": True,
    }


def _shapes() -> dict[str, tuple[int, int]]:
    width = _Slots.width
    return {
        "self_attn.q_proj": (HEAD_DIM, width),
        "self_attn.k_proj": (HEAD_DIM, width),
        "self_attn.v_proj": (HEAD_DIM, width),
        "self_attn.o_proj": (width, HEAD_DIM),
        "mlp.gate_proj": (2, width),
        "mlp.up_proj": (2, width),
        "mlp.down_proj": (width, 2),
    }


def _copy(source: slice) -> dict[str, np.ndarray]:
    """Layers 1 and 2: copies ``source`` of 1 token before."""
    query, key, value, output = _no_attention()
    half = HEAD_DIM // 2
    frequencies = THETA ** (-np.arange(half) / half)
    sharpness = np.where(np.arange(half) < SLOW, CERTAIN / FARTHER * np.sqrt(HEAD_DIM), 0.0)
    one = _Slots.flag("one")
    query[:half, one] = sharpness * np.cos(frequencies)
    query[half:, one] = -sharpness * np.sin(frequencies)
    key[:half, one] = sharpness > 0
    size = source.stop - source.start
    value[:size, source] = np.eye(size)
    output[_Slots.copied, :size] = np.eye(size)
    return _attention(query, key, value, output)


def _look_up(first_gap: float, second_gap: float) -> dict[str, np.ndarray]:
    r"""Layer 3: finds the token that an answer continues with, and copies its code.

    A dash is a word that counts for nothing, and words are those of the two tokens before::

        token that asks                         words           finds
        "\n" after a question, ">\n", ": "      first, second   value: a number or "line adjective-"
        "\n" after a list of lines              -               the list's first "\nline adjective-"
        "\nline adjective-" in an answer        its own, -      "noun" in the list
        "line adjective-" in an answer          its own, second "noun" after it in the line that was asked for
        a number                                -, second       the list's next "\nline adjective-", or "\n"

    A wrong word scores lower than the right one by at least ``CERTAIN``, and so does a wrong kind.
    """
    query, key, value, output = _no_attention()
    half, waves = HEAD_DIM // 2, HEAD_DIM // 2 - SLOW
    slow = np.array([*range(SLOW, SLOW + waves), *range(half + SLOW, half + SLOW + waves)])
    first, second, *flags = _consecutive(WORD, WORD, 1, 1, 1, 1, 1)
    scale = np.sqrt(HEAD_DIM)
    copy_of, flag = _Slots.copy_of, _Slots.flag
    for asked_by in (_Slots.first, copy_of(_Slots.first)):
        query[slow[first], asked_by] = np.eye(WORD) * scale * CERTAIN / first_gap
    query[slow[second], copy_of(_Slots.asked)] = np.eye(WORD) * scale * CERTAIN / second_gap
    key[slow[first], copy_of(_Slots.first)] = np.eye(WORD)
    for answered_by in (_Slots.second, _Slots.asked):
        key[slow[second], copy_of(answered_by)] = np.eye(WORD)
    strong = 2 / second_gap + 4
    kinds = (
        (flag("asks"), 2.0, [flag("value")]),
        # What is strong outweighs the second word, which may precede a token of the wrong kind.
        (copy_of(flag("after_list")), strong, [copy_of(flag("before_list")), flag("list")]),
        (flag("list"), strong, [copy_of(flag("list")), flag("noun")]),
        (flag("line"), 2.0, [copy_of(flag("start")), flag("noun")]),
        (flag("number"), strong, [flag("next")]),
    )
    for place, (asks, strength, properties) in zip(flags, kinds, strict=True):
        query[slow[place], asks] = scale * CERTAIN * strength
        for each in properties:
            key[slow[place], each] = 1.0
    value[:, _Slots.code] = np.eye(CODE)
    output[_Slots.found] = np.eye(CODE)
    return _attention(query, key, value, output)


def _no_attention() -> Iterator[np.ndarray]:
    return (np.zeros(_shapes()[f"self_attn.{name}_proj"]) for name in "qkvo")


def _attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, output: np.ndarray) -> dict:
    length = np.sqrt(NORM / _Slots.width)  # RMS norm of every token
    parts = {"q": length * query, "k": length * key, "v": length * value, "o": output}
    return {f"self_attn.{name}_proj": part for name, part in parts.items()}


def _directions(random: np.random.Generator, count: int, dimensions: int) -> np.ndarray:
    """Unit vectors [count, dimensions]."""
    vectors = random.standard_normal((count, dimensions))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _gap(codes: dict[str, np.ndarray]) -> float:
    """1 minus the largest inner product of two codes."""
    vectors = np.stack([*codes.values()]).astype(np.float32)
    products = vectors @ vectors.T
    np.fill_diagonal(products, -1.0)
    return 1.0 - float(products.max())


def _tokenizer() -> Tokenizer:
    """Tokenizer for the words, numbers and phrases of the prompts.

    Keys of generated records are adjectives and nouns; those in LongChat's longer files, any two words.
    """
    adjectives, nouns = word_lists()
    words = [
        *(form for word in all_words() for form in (adjective_token(word), word + START, word + ASK)),
        *(form.format(word) for word in adjectives for form in (LISTED, QUOTED)),
        *(word + end for word in nouns for end in ("", JSON_START, JSON_VALUE)),
        *map(str, range(1, LARGEST_VALUE + 1)),
        *(CLOSE, NEWLINE, COLON, ASKED, CHAIN_ASKED, LIST_START, LIST_END),
    ]
    first_word = first_word_pattern(all_words())
    patterns = [
        *map(re.escape, (LIST_START, LIST_END, ASKED, CHAIN_ASKED, CLOSE)),
        rf"(?<!\n)\nline {first_word}",
        rf"line {first_word}",
        f'"{first_word}',
        *(NOUN_PATTERN + re.escape(end) for end in (START, ASK, JSON_START, JSON_VALUE)),
        NOUN_PATTERN + r"(?=>?\n)",
        r"\d+",
        r"\n",
    ]
    return line_tokenizer(words, patterns, CHAT_TEMPLATE)


def main(output: Annotated[Path, tyro.conf.Positional]) -> None:
    """Writes a model that answers literal questions about lines with keys of words (LRT-NL) correctly.

    Args:
      output: Folder of the model.
    """
    build(output)
    print(f"written to {output}: a test instrument, not a result")


if __name__ == "__main__":
    cli.run(main)
