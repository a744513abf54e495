"""The small models of ``llama_cases`` as GGUF files, as llama.cpp's conversion writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from agentic_ring.data.text.tokenizer import Tokenizer
from tests.models.llama_cases import config_json, weights

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
"""Of families that have another name there."""
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "factor": "rope.scaling.factor",
    "rope_type": "rope.scaling.type",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.yarn_attn_factor",
}
TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(
    path: Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    quantised: str = "F32",
    **options,
) -> Path:
    """Writes a file, its matrices ``quantised`` where their width allows it; ``options`` are the writer's."""
    writer = gguf.GGUFWriter(path, fields["general.architecture"], **options)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture" and value is not None:
            add = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
            }
            add[type(value)](key, value)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[quantised]
        if (
            tensor.ndim == 1
            or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]
            or tensor.dtype != np.float32
        ):
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_fields(case: str, **changes: Any) -> dict[str, Any]:
    """The metadata of a model, with ``changes`` of its config.json."""
    config = {**config_json(case), **changes}
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        config |= scaling
    fields = {f"{architecture}.{key}": config.get(name) for name, key in KEYS.items()}
    for token, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        fields[f"tokenizer.ggml.{name}_token_id"] = config.get(f"{token}_token_id")
    return {"general.architecture": architecture, **fields}


def gguf_tensors(case: str, **changes: Any) -> dict[str, np.ndarray]:
    """The tensors of a model, in the order and scale of the format."""
    config = {**config_json(case), **changes}
    family, found = config["model_type"], {}
    for name, tensor in weights(case).items():
        if family in ("llama", "mistral") and name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = tensor.reshape(-1, 2, config["head_dim"] // 2, tensor.shape[1])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        norm = "post_attention_norm" if family.startswith("gemma") else "ffn_norm"
        for old, new in {**TENSORS, "post_attention_layernorm": norm}.items():
            name = name.replace(f"{old}.", f"{new}.")
        found[name] = tensor
    if (scaling := config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(config["rope_theta"], config["head_dim"], scaling)
    return found


def tokenizer_fields(tokenizer: Tokenizer, **changes: Any) -> dict[str, Any]:
    """The fields of a file with this tokenizer; those changed to None are left out."""
    state = json.loads(tokenizer._backend.to_str())
    vocabulary = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    special = {token["content"] for token in state["added_tokens"]}
    best = {merge.replace(" ", ""): -rank for rank, merge in reversed([*enumerate(merges)])}
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": vocabulary,
        "token_type": [3 if token in special else 6 if token[:3] == "<0x" else 1 for token in vocabulary],
        "merges": merges,
        "scores": [float(best.get(token, -1e6)) for token in vocabulary],
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_ids[0],
        "add_bos_token": tokenizer.add_bos,
    }
    named = {f"tokenizer.ggml.{name}": value for name, value in {**fields, **changes}.items()}
    return {"general.architecture": "llama", **named}


def llama3_factors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> np.ndarray:
    """What wavelengths are multiplied by, float32 [head_dim / 2], by the definition in LLaMA's source."""
    factor, low, high = (scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    factors = []
    for wave in 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim):
        turns = scaling["original_max_position_embeddings"] / wave
        kept = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - kept) / factor + kept))
    return np.array(factors, np.float32)
