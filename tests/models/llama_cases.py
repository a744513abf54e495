"""Small models of every kind and family as fields of config.json, and the weights that they share.

Weights are far larger than those of a fresh model: with small ones, logits hardly depend on attention (with
a standard initialisation a wrong rotary order moves them by less than a hundredth).
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
STANDARD_DEVIATION = 0.3

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


def family(name: str, title: str) -> dict[str, Any]:
    fields = {"model_type": name, "architectures": [f"{title}ForCausalLM"]}
    # Defaults of some families lie outside the vocabulary.
    return {**fields, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gemma(name: str, title: str, layer_types: str, **fields: Any) -> dict[str, Any]:
    """Fields of a Gemma; ``layer_types`` has a letter for each layer, "l" for local and "g" for global."""
    types = {"l": "sliding_attention", "g": "full_attention"}
    return {
        **family(name, title),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": len(layer_types),
        "layer_types": [types[letter] for letter in layer_types],
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": 20,
        **fields,
    }


CASES: dict[str, dict[str, Any]] = {
    "one_key_head": {"num_key_value_heads": 1},
    "two_key_heads": {},
    "a_key_head_each": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "wide_heads": {"head_dim": 16},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "yarn_of_its_own": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "attention_factor": 1.5,
            "truncate": False,
        }
    },
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral": {**family("mistral", "Mistral"), "sliding_window": 20},
    "mistral_without_window": {**family("mistral", "Mistral"), "sliding_window": None, "head_dim": 16},
    "qwen2": family("qwen2", "Qwen2"),
    "qwen2_tied": {**family("qwen2", "Qwen2"), "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": family("qwen3", "Qwen3"),
    "qwen3_wide_heads": {**family("qwen3", "Qwen3"), "head_dim": 16, "num_key_value_heads": 4},
    "phi3": {**family("phi3", "Phi3"), "sliding_window": 20},
    "phi3_without_window": {**family("phi3", "Phi3"), "sliding_window": None, "num_key_value_heads": 4},
    "gemma2": gemma("gemma2", "Gemma2", "lg", attn_logit_softcapping=5.0, final_logit_softcapping=10.0),
    "gemma2_wide_window": gemma(
        "gemma2", "Gemma2", "lglgl", sliding_window=200, head_dim=16, tie_word_embeddings=False
    ),
    "gemma3_text": gemma(
        "gemma3_text",
        "Gemma3",
        "llgllgl",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "gemma3_text_local": gemma(
        "gemma3_text",
        "Gemma3",
        "lll",
        final_logit_softcapping=10.0,
        rope_theta=1e5,
        rope_local_base_freq=1e3,
        num_key_value_heads=1,
    ),
}
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
    family = fields["model_type"]
    query, keys = HEADS * fields["head_dim"], fields["num_key_value_heads"] * fields["head_dim"]

    def cut(name: str, tensor: np.ndarray) -> np.ndarray:
        if "q_proj" in name:
            return tensor[:query]
        if "k_proj" in name or "v_proj" in name:
            return tensor[:keys]
        if "q_norm" in name or "k_norm" in name:
            return tensor[: fields["head_dim"]]
        return tensor[:, :query] if "o_proj" in name else tensor

    if family in ("qwen2", "qwen3", "gemma3_text"):
        more = load_file(GOLDEN / "weights_of_families.safetensors")
        wanted = ".bias" if family == "qwen2" else "_norm.weight"
        shared |= {name: tensor for name, tensor in more.items() if name.endswith(wanted)}
    if family.startswith("gemma"):
        shared = deepened(with_gemma_norms(shared), fields["num_hidden_layers"])
    found = {
        name: np.ascontiguousarray(cut(name, tensor))
        for name, tensor in shared.items()
        if not (fields["tie_word_embeddings"] and name == "lm_head.weight")
    }
    return fused(found) if family == "phi3" else found


def with_gemma_norms(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with norms of what is added, and with 1 taken off the scales of all norms."""
    more = {
        name.replace(old, new): np.roll(tensor, 1)
        for name, tensor in tensors.items()
        for old, new in (
            ("input_layernorm", "pre_feedforward_layernorm"),
            ("post_attention_layernorm", "post_feedforward_layernorm"),
        )
        if old in name
    }
    return {name: x - 1 if "norm" in name else x for name, x in (tensors | more).items()}


def deepened(tensors: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """The tensors for more layers, which are the first ones with their rows in another order."""
    found = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for layer in range(layers):
        old = f".layers.{layer % LAYERS}."
        for name in (name for name in tensors if old in name):
            found[name.replace(old, f".layers.{layer}.")] = np.roll(tensors[name], layer // LAYERS, axis=0)
    return found


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with those of queries, keys and values as one, and those of gate and up."""
    tensors = dict(tensors)
    for layer in range(LAYERS):
        for module, parts, name in (("self_attn", "qkv", "qkv"), ("mlp", ("gate", "up"), "gate_up")):
            prefix = f"model.layers.{layer}.{module}."
            rows = [tensors.pop(f"{prefix}{part}_proj.weight") for part in parts]
            tensors[f"{prefix}{name}_proj.weight"] = np.concatenate(rows)
    return tensors


def write_model(folder: Path, case: str = "two_key_heads", **changes: Any) -> Path:
    """Writes a folder in Hugging Face's layout; ``changes`` go to config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config_json(case), **changes}))
    save_file(weights(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
