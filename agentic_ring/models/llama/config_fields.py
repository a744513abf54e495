"""Types and ranges of the fields of Hugging Face's ``config.json``; a field may be absent or null."""

from pathlib import Path
from typing import Annotated, Any

from agentic_ring.extras import needs_extra
from agentic_ring.files.json_files import read_json

with needs_extra("models"):
    from pydantic import BaseModel, ConfigDict, Field

_Size = Annotated[int, Field(ge=1, le=2**24)]
_Layers = Annotated[int, Field(ge=1, le=10_000)]
_Vocabulary = Annotated[int, Field(ge=2, le=2**28)]
_TokenId = Annotated[int, Field(ge=0, lt=2**28)]
_Tokens = Annotated[int, Field(ge=1, le=2**40)]
_Positive = Annotated[float, Field(gt=0)]
_Epsilon = Annotated[float, Field(gt=0, lt=1)]


class _Rope(BaseModel):
    model_config = ConfigDict(extra="allow")

    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Positive | None = None
    factor: _Positive | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    attention_factor: _Positive | None = None
    original_max_position_embeddings: _Tokens | None = None
    truncate: bool | None = None
    full_attention: "_Rope | None" = None
    sliding_attention: "_Rope | None" = None


class _QueryScaling(BaseModel):
    floor: _Tokens
    scale: _Positive


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow")

    model_type: str | None = None
    hidden_size: _Size | None = None
    num_hidden_layers: _Layers | None = None
    num_attention_heads: _Size | None = None
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    intermediate_size: _Size | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    rms_norm_eps: _Epsilon | None = None
    vocab_size: _Vocabulary | None = None
    tie_word_embeddings: bool | None = None
    max_position_embeddings: _Tokens | None = None
    rope_theta: _Positive | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    query_scaling: _QueryScaling | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    sliding_window: _Tokens | None = None
    sliding_window_pattern: _Layers | None = None
    use_bidirectional_attention: bool | None = None
    query_pre_attn_scalar: Annotated[int | float, Field(gt=0)] | None = None
    attn_logit_softcapping: _Positive | None = None
    final_logit_softcapping: _Positive | None = None
    rope_local_base_freq: _Positive | None = None
    use_sliding_window: bool | None = None
    partial_rotary_factor: _Positive | None = None
    architectures: list[str] | None = None
    layer_types: list[str] | None = None
    bos_token_id: _TokenId | None = None
    eos_token_id: _TokenId | list[_TokenId] | None = None
    pad_token_id: Annotated[int, Field(ge=-1, lt=2**28)] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class _Index(BaseModel):
    weight_map: dict[str, Annotated[str, Field(max_length=200, pattern=r"\.safetensors$")]]


_NULLABLE = ("num_key_value_heads", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Fields in which null is a value; a file without them has the default of its family."""
_REMEDY = (
    "give the folder of a model in Hugging Face's layout: config.json, *.safetensors and tokenizer.json, as "
    "they were published"
)


def read_fields(file: Path) -> dict[str, Any]:
    """Returns the fields of a ``config.json`` that are not null, and those in which null is a value.

    Raises:
      DataError: the file is missing or damaged, or a field has another type or an impossible value.
    """
    read = read_json(file, _Fields, _REMEDY, foreign=True)
    fields = read.model_dump(exclude_none=True)
    return fields | {name: getattr(read, name) for name in _NULLABLE if name in read.model_fields_set}


def read_index(file: Path) -> dict[str, str]:
    """Returns the name of each tensor's file by the index of a model of several files.

    Raises:
      DataError: the index is missing or damaged.
    """
    return read_json(file, _Index, _REMEDY, foreign=True).weight_map
