"""Small LLaMAs of every kind as fields of config.json, and the weights that they share.

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
CASES: dict[str, dict[str, Any]] = {
    "one_key_head": {"num_key_value_heads": 1},
    "two_key_heads": {},
    "a_key_head_each": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "wide_heads": {"head_dim": 16},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "yarn_of_its_own": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "attention_factor": 1.5,
            "truncate": False,
        },
    },
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}
"""What each kind changes of ``BASE``."""


def tokens() -> np.ndarray:
    """int32 [ROWS, LENGTH]."""
    return np.load(GOLDEN / "tokens.npy")


def logits(case: str) -> np.ndarray:
    """float32 [ROWS, LENGTH, VOCAB], as transformers gives them."""
    return np.load(GOLDEN / f"{case}.npy")


def config_json(case: str) -> dict[str, Any]:
    return {**BASE, **CASES[case]}


def weights(case: str) -> dict[str, np.ndarray]:
    """The tensors of each kind: the first rows and columns of one shared set."""
    fields, shared = config_json(case), load_file(GOLDEN / "weights.safetensors")
    query, keys = HEADS * fields["head_dim"], fields["num_key_value_heads"] * fields["head_dim"]

    def cut(name: str, tensor: np.ndarray) -> np.ndarray:
        if "q_proj" in name:
            return tensor[:query]
        if "k_proj" in name or "v_proj" in name:
            return tensor[:keys]
        return tensor[:, :query] if "o_proj" in name else tensor

    return {
        name: np.ascontiguousarray(cut(name, tensor))
        for name, tensor in shared.items()
        if not (fields["tie_word_embeddings"] and name == "lm_head.weight")
    }


def write_model(folder: Path, case: str = "two_key_heads", **changes: Any) -> Path:
    """Writes a folder in Hugging Face's layout; ``changes`` go to config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config_json(case), **changes}))
    save_file(weights(case), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
