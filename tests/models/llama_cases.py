"""Small models of every kind and family as fields of config.json, and the weights that they share.

Weights are random with a standard deviation of 0.3, far larger than those of a fresh model: with small ones,
logits hardly depend on attention (with a standard initialisation a wrong rotary order moves them by less than
a hundredth).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent / "golden"
LAYERS, WIDTH, HEADS, FFN, VOCAB, ROWS, LENGTH = 2, 32, 4, 48, 64, 2, 96
PROMPT, ANSWER = 32, 64
"""Tokens of a prompt, and of the greedy answer to it."""

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 32,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
CASES: dict[str, dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())
"""What each kind changes of ``BASE``."""
FAMILIES = ("mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "gemma2")


def tokens() -> np.ndarray:
    """int32 [ROWS, LENGTH]."""
    return np.load(GOLDEN / "tokens.npy")


def answer(case: str) -> list[int]:
    """The greedy answer of transformers to the first ``PROMPT`` tokens of the first row."""
    return np.load(GOLDEN / f"{case}_answer.npy").tolist()


def logits(case: str) -> np.ndarray:
    """float32 [ROWS, LENGTH, VOCAB], as transformers gives them."""
    return np.load(GOLDEN / f"{case}.npy")


def config_json(case: str) -> dict[str, Any]:
    return {**BASE, **CASES[case]}


def weights(case: str) -> dict[str, np.ndarray]:
    """The tensors of each kind: the first rows and columns of one shared set."""
    fields, shared = config_json(case), load_file(GOLDEN / "weights.safetensors")
    family, head_dim = fields["model_type"], fields["head_dim"]
    query, keys = HEADS * head_dim, fields["num_key_value_heads"] * head_dim
    rows = {"q_proj": query, "k_proj": keys, "v_proj": keys, "q_norm": head_dim, "k_norm": head_dim}

    def cut(name: str, tensor: np.ndarray) -> np.ndarray:
        part = name.split(".")[-2]
        return np.ascontiguousarray(tensor[:, :query] if part == "o_proj" else tensor[: rows.get(part)])

    if family in ("qwen2", "qwen3", "gemma3_text"):
        more = load_file(GOLDEN / "weights_of_families.safetensors")
        wanted = ".bias" if family == "qwen2" else "_norm.weight"
        shared |= {name: tensor for name, tensor in more.items() if name.endswith(wanted)}
    if family.startswith("gemma"):
        shared = deepened(with_gemma_norms(shared), fields["num_hidden_layers"])
    if fields["tie_word_embeddings"]:
        del shared["lm_head.weight"]
    found = {name: cut(name, tensor) for name, tensor in shared.items()}
    return fused(found) if family == "phi3" else found


def with_gemma_norms(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with norms of what is added, and with 1 taken off the scales of all norms."""
    more = dict(tensors)
    for name, tensor in tensors.items():
        for old in ("input", "post_attention"):
            if f"{old}_layernorm" in name:
                new = {"input": "pre_feedforward", "post_attention": "post_feedforward"}[old]
                more[name.replace(old, new)] = np.roll(tensor, 1)
    return {name: x - 1 if "norm" in name else x for name, x in more.items()}


def deepened(tensors: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """The tensors for more layers, which are the first ones with their rows in another order."""
    found = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for layer in range(layers):
        old = f".layers.{layer % LAYERS}."
        for name in (name for name in tensors if old in name):
            found[name.replace(old, f".layers.{layer}.")] = np.roll(tensors[name], layer // LAYERS, axis=0)
    return found


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with those of queries, keys and values as one, and those of gate and up; in place."""
    for layer in range(LAYERS):
        for module, parts, name in (("self_attn", "qkv", "qkv"), ("mlp", ("gate", "up"), "gate_up")):
            prefix = f"model.layers.{layer}.{module}."
            rows = [tensors.pop(f"{prefix}{part}_proj.weight") for part in parts]
            tensors[f"{prefix}{name}_proj.weight"] = np.concatenate(rows)
    return tensors


def write_model(folder: Path, case: str = "two_key_heads", **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config_json(case), **changes}))
    save_file(weights(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
