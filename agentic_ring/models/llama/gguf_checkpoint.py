"""Models in GGUF files as Hugging Face's layout has them: the fields of ``config.json``, and tensors by name.

What llama.cpp's conversion changes is undone: the order of a LLaMA's rotary rows, the 1 added to Gemma's
norms, and Llama-3 rotary scaling, of which a file holds only the factors. Sources: conversion/*.py and
src/models/*.cpp of https://github.com/ggml-org/llama.cpp; names of tensors are those of the ``gguf`` package.
"""

from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np

from agentic_ring.errors import DataError, UnknownNameError
from agentic_ring.extras import needs_extra
from agentic_ring.files.gguf_file import GgufFile, open_gguf
from agentic_ring.models.llama.tensor_files import TensorFiles
from agentic_ring.models.self_attention import inverse_frequencies
from agentic_ring.models.transformer_config import Llama3Scaling

with needs_extra("gguf"):
    import gguf

_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
"""``model_type`` in ``config.json`` by ``general.architecture``."""
_FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Fields of ``config.json`` by key, which has the architecture in front."""
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_NOT_TOLD = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier")
"""Keys of rotary scaling that conversions write with different meanings."""
_IMPLIED = ("vocab_size", "attention.value_length", "rope.scaling.finetuned", "tensor_data_layout")
"""Keys that say what the tensors say, or nothing about what a model computes."""
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose queries are scaled by the width per head and not by the head's size."""
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
_ROTARY_FACTORS = "rope_freqs.weight"
_LAYOUT = "take the model in Hugging Face's layout"


def config_of(path: Path) -> dict[str, Any]:
    """Returns what the ``config.json`` of the model in a GGUF file would hold; keys not known here stay.

    Raises:
      UnknownNameError: the architecture is not supported.
      DataError: the file is damaged, or its rotary scaling cannot be expressed.
    """
    file = open_gguf(path)
    architecture = _architecture(file)
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in file.fields.items() if key.startswith(prefix)}
    for key in ("embedding_length", "attention.head_count", "block_count"):
        if not isinstance(own.get(key), int) or own[key] < 1:
            raise DataError(f"{path} has {prefix}{key} {own.get(key)!r}, expected a whole number from 1 on")
    head_dim = own.get("attention.key_length", own["embedding_length"] // own["attention.head_count"])
    fields = {name: own.pop(key) for key, name in _FIELDS.items() if key in own}
    fields |= {"model_type": _FAMILIES[architecture], **_of_tensors(file)}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        fields[f"{name}_token_id"] = file.fields.get(f"tokenizer.ggml.{key}_token_id")
    fields["sliding_window"] = own.pop("attention.sliding_window", None) or None  # 0 is none
    if architecture == "llama" and fields["sliding_window"]:
        fields["model_type"] = "mistral"
    pattern = own.pop("attention.sliding_window_pattern", None)
    if isinstance(pattern, list):  # which layers have a window
        fields["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    elif pattern is not None:
        fields["sliding_window_pattern"] = pattern
    if architecture in _LARGEST_GEMMA:
        largest = fields["num_hidden_layers"] == _LARGEST_GEMMA[architecture]
        width_per_head = fields["hidden_size"] // fields["num_attention_heads"]
        fields["query_pre_attn_scalar"] = width_per_head if largest else head_dim
    if (rotated := own.pop("rope.dimension_count", head_dim)) != head_dim:
        fields["partial_rotary_factor"] = rotated / head_dim
    fields["rope_scaling"] = _rope_scaling(file, own, fields.get("rope_theta", 10_000.0), head_dim)
    return fields | {prefix + key: value for key, value in own.items() if key not in _IMPLIED}


class GgufTensors(TensorFiles):
    """Tensors of a GGUF file in the order and scale of Hugging Face's, dequantised to float32."""

    config_name = "metadata"

    def __init__(self, path: Path):
        self.path = path
        self._file, fields = open_gguf(path), config_of(path)
        architecture, heads = _architecture(self._file), fields["num_attention_heads"]
        number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        layers = min(fields["num_hidden_layers"], len(self.names))  # a damaged file may say millions
        self._stored = gguf.get_tensor_name_map(number, layers)
        key_heads = fields.get("num_key_value_heads", heads)
        rotary = {"self_attn.q_proj.weight": heads, "self_attn.k_proj.weight": key_heads}
        self._alternating = rotary if architecture == "llama" else {}
        self._shifted_norms = architecture in _LARGEST_GEMMA

    @property
    def names(self) -> Set[str]:
        return self._file.tensors

    def stored_name(self, name: str) -> str:
        return self._stored.get_name(name, (".weight", ".bias")) or name

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self.stored_name(name))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        rows, *columns = index
        if heads := self._alternating.get(".".join(name.split(".")[-3:])):
            chosen = _rotary_order(self.shape(name)[0], heads)[rows]
        else:
            chosen = rows
        part = self._file.read(self.stored_name(name), chosen)[:, *columns]
        return part - np.float32(1) if self._shifted_norms and name.endswith("norm.weight") else part


def _architecture(file: GgufFile) -> str:
    found = file.fields.get("general.architecture")
    if found not in _FAMILIES:
        raise UnknownNameError(f"general.architecture in {file.path}:", str(found), tuple(_FAMILIES))
    return found


def _of_tensors(file: GgufFile) -> dict[str, Any]:
    """The fields that the tensors decide."""
    embedding = "token_embd.weight"
    matrices = {file.storage(name) for name in file.tensors if len(file.shape(name)) > 1}
    return {
        "vocab_size": file.shape(embedding)[0] if embedding in file.tensors else None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": _DTYPES.get("".join(matrices), "float32"),
    }


def _rotary_order(rows: int, heads: int) -> np.ndarray:
    """The stored row of each row, int [rows].

    A rotation takes one row of each half of a head; where they are stored, the two are neighbours.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _rope_scaling(file: GgufFile, own: dict[str, Any], theta: Any, head_dim: Any) -> dict[str, Any] | None:
    """Takes the keys of rotary scaling out of ``own``, and returns the ``rope_scaling`` of config.json."""
    scaling = {name: own.pop(key) for key, name in _SCALING.items() if key in own}
    if "rope_factors_long.weight" in file.tensors:
        return {"rope_type": "longrope"}
    for key in _NOT_TOLD:
        if own.pop(key, 1) != 1:
            raise DataError(f"{file.path} has {key}, whose meaning depends on the conversion; {_LAYOUT}")
    if scaling.get("rope_type", "none") != "none":
        return scaling
    if _ROTARY_FACTORS in file.tensors:
        return llama3_scaling(file.path, file.read(_ROTARY_FACTORS), theta, head_dim)
    return None


def llama3_scaling(path: Path, factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Returns the parameters of Llama-3 rotary scaling that stretch wavelengths by these factors.

    The factors decide the parameters up to a common scale; ``low_freq_factor`` is 1, as in published models.

    Args:
      path: file of the factors.
      factors: float [head_dim / 2], the shortest wavelength first.

    Raises:
      DataError: no parameters give these factors.
    """
    plain = inverse_frequencies(theta, head_dim, None)
    fits = factors.shape == plain.shape and bool((factors >= 1).all())
    if fits:
        factor, high, original = float(factors.max()), 4.0, 8192  # of Llama 3.1 to 3.3
        between = (factors > 1) & (factors < factor)
        if between.sum() > 1:
            # Between the limits, the share of a frequency that is kept is linear in the frequency.
            kept = (1 / factors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
            slope, offset = np.polyfit(plain[between] / (2 * np.pi), kept, 1)
            high, original = round(1 - 1 / offset, 3), round(-slope / offset)
        if high > 1 and original >= 1:
            scaling = Llama3Scaling(factor, 1.0, high, original)
            ours = inverse_frequencies(theta, head_dim, scaling)
            if np.allclose(plain / factors, ours, rtol=1e-4, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    raise DataError(f"{_ROTARY_FACTORS} in {path} holds rotary scaling other than Llama 3's; {_LAYOUT}")
