"""Reading and writing of Hugging Face's ``config.json``, with its older and newer field names.

The metadata of a GGUF file is read as the ``config.json`` that says the same.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from agentic_ring.errors import ArgumentError, ConfigError, DataError, UnknownNameError
from agentic_ring.extras import needs_extra
from agentic_ring.files.json_files import json_fault, parse_json, read_json
from agentic_ring.files.model_path import is_gguf
from agentic_ring.models.llama.families import FAMILIES, LLAMA, OWN, Family, Fields, family_named
from agentic_ring.models.llama.model import LlamaConfig
from agentic_ring.models.transformer_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    QueryScaling,
    RotaryScaling,
    TransformerConfig,
    YarnScaling,
)
from agentic_ring.terminal.progress import say

if TYPE_CHECKING:
    from agentic_ring.models.llama.adapter import Adapter

with needs_extra("models"):
    from pydantic import ConfigDict, Field, create_model

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
"""Types of layers in ``layer_types``."""
_ACTIVATIONS = {
    "silu": {"hidden_act": "silu"},
    "gelu_tanh": dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
}
"""Fields of ``config.json`` that name an activation function."""
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}
"""Compute dtype by storage dtype; float16 overflows in models that were not trained with it."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NULLABLE = ("num_key_value_heads", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Fields in which null is a value; a file without them has the default of its family."""
REMEDY = (
    "give the folder of a model in Hugging Face's layout: config.json, *.safetensors and tokenizer.json, as "
    "they were published; or a GGUF file"
)


def _object(name: str, *types: tuple[Any, str]) -> Any:
    """An object with fields of these types, each of which may be absent or null, and with any others."""
    fields: dict[str, Any] = {each: (kind | None, None) for kind, names in types for each in names.split()}
    return create_model(name, __config__=ConfigDict(extra="allow"), **fields)


_Positive = Annotated[float, Field(gt=0)]
_Tokens = Annotated[int, Field(ge=1, le=2**40)]
_TokenId = Annotated[int, Field(ge=0, lt=2**28)]
_ROPE = (
    (str, "rope_type type"),
    (bool, "truncate"),
    (_Tokens, "original_max_position_embeddings"),
    (_Positive, "rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor"),
)
_Rope = _object("_Rope", *_ROPE, (_object("_RopeOfLayers", *_ROPE), f"{_GLOBAL} {_LOCAL}"))
_QueryScaling = create_model("_QueryScaling", floor=_Tokens, scale=_Positive)
_Fields = _object(
    "_Fields",
    (str, "model_type hidden_act hidden_activation dtype torch_dtype"),
    (list[str], "architectures layer_types"),
    (
        Annotated[int, Field(ge=1, le=2**24)],
        "hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size",
    ),
    (Annotated[int, Field(ge=1, le=10_000)], "num_hidden_layers sliding_window_pattern"),
    (_Tokens, "max_position_embeddings max_sequence_length sliding_window"),
    (Annotated[int, Field(ge=2, le=2**28)], "vocab_size"),
    (_TokenId, "bos_token_id"),
    (_TokenId | list[_TokenId], "eos_token_id"),
    (Annotated[int, Field(ge=-1, lt=2**28)], "pad_token_id"),
    (Annotated[float, Field(gt=0, lt=1)], "rms_norm_eps"),
    (_Positive, "rope_theta rope_local_base_freq partial_rotary_factor rope_condense_ratio"),
    (_Positive, "attn_logit_softcapping final_logit_softcapping"),
    (Annotated[int | float, Field(gt=0)], "query_pre_attn_scalar"),
    (bool, "tie_word_embeddings attention_bias mlp_bias use_sliding_window use_bidirectional_attention"),
    (bool, "rope_interleaved use_mrope"),
    (dict[str, Any], "quantization_config"),
    (_Rope, "rope_scaling rope_parameters"),
    (_QueryScaling, "query_scaling"),
)
_REQUIRED = {"partial_rotary_factor": 1.0, "rope_interleaved": False, "use_mrope": False}
"""Values that fields of any family must have, where they are given."""
_HARMLESS = {
    *("_name_or_path", "transformers_version", "auto_map", "tokenizer_class", "model_name", "id2label"),
    *("unsloth_version", "unsloth_fixed", "transformers.js_config", "trained_on_task", "label2id"),
    *("initializer_range", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop"),
    *("use_cache", "cache_implementation", "_attn_implementation", "attn_implementation", "return_dict"),
    *("output_attentions", "output_hidden_states", "torchscript", "is_decoder", "is_encoder_decoder"),
    *("is_llama_config", "pretraining_tp"),
    # Of windows that are off, of layers that ``layer_types`` names, and of positions that are not scaled.
    *("max_window_layers", "_sliding_window_pattern", "original_max_position_embeddings"),
}
"""Other fields that do not change what a model computes."""


def read_fields(path: Path, adapter: "Adapter | None" = None) -> dict[str, Any]:
    """Returns the fields of ``config.json`` that are not null, and those in which null is a value.

    ``path`` is the folder of a model, or a GGUF file; an ``adapter`` of it may change fields.
    """
    if is_gguf(path):
        read = _gguf_fields(path)
    else:
        read = read_json(path / "config.json", _Fields, REMEDY, foreign=True)
    fields = read.model_dump(exclude_none=True)
    fields |= {name: getattr(read, name) for name in _NULLABLE if name in read.model_fields_set}
    return fields if adapter is None else {**fields, **adapter.fields}


def _gguf_fields(path: Path) -> Any:
    from agentic_ring.models.llama.gguf_checkpoint import config_of

    content = json.dumps(config_of(path)).encode()
    try:
        return parse_json(content, _Fields, foreign=True)
    except ValueError as error:
        raise DataError(f"{path} {json_fault(error)}; {REMEDY}") from error


def stored_dtype(fields: Fields) -> str:
    """Returns the data type of the stored weights; one that is not supported is an UnknownNameError."""
    stored = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if stored not in _DTYPES:
        raise UnknownNameError("dtype", str(stored), tuple(_DTYPES))
    return stored


def harmless_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of a ``config.json`` that say nothing about what the model computes."""
    return {name: value for name, value in fields.items() if name in _HARMLESS}


def read_config(path: Path, context: int | None = None, adapter: "Adapter | None" = None) -> LlamaConfig:
    """Reads the configuration of a model from the ``config.json`` in the folder ``path``, or a GGUF file.

    ``context`` is the one in use, in tokens, for the frequencies of "dynamic" rotary scaling; None is the one
    that the model was made for. An ``adapter`` of it may change fields. A file that is damaged, or of an
    unsupported model, is a DataError.
    """
    file, fields = path if is_gguf(path) else path / "config.json", read_fields(path, adapter)
    family = family_named(str(fields.get("model_type")), f"model_type in {file}:")
    fields = {**family.defaults, **fields}
    try:
        _check_supported(file, family, fields)
        return _config(family, fields, context)
    except DataError:
        raise
    except KeyError as error:
        raise DataError(f"{file} has no {error.args[0]}, which a {family.title} model requires") from error
    except (TypeError, ValueError) as error:
        raise DataError(f"{file} cannot be used: {error}") from error


def _check_supported(file: Path, family: Family, fields: Fields) -> None:
    """Raises a DataError if the file does not describe a model as the family's declaration has it."""
    named = fields.get("architectures") or [family.architecture]
    if family.architecture not in named:
        raise DataError(
            f"{file} has model_type {family.name!r}, but its architecture is {named[0]!r} and not "
            f"{family.architecture!r}; take the file as it was published"
        )

    def unsupported(found: str, supported: str) -> DataError:
        return DataError(f"{file} has {found}; of {family.title} only models with {supported} are supported")

    if quantised := fields.get("quantization_config"):
        method = quantised.get("quant_method", "an unknown method")
        raise DataError(
            f"{file} is of weights that were quantised by {method}, which are not supported; take the model "
            "in bfloat16, float16 or float32"
        )
    if unknown := sorted(set(fields) - set(_Fields.model_fields) - _HARMLESS):
        _warn(file, ", ".join(unknown))
    given = {**fields, **_rope(fields)[0]}
    for name, value in {**_REQUIRED, **family.required, **_activation(family)}.items():
        if given.get(name, value) != value:
            raise unsupported(f"{name} {given[name]!r}", repr(value))
    types, layers = fields.get("layer_types"), fields["num_hidden_layers"]
    if types is None:
        return
    if len(types) != layers:
        raise DataError(f"{file} has {layers} layers, but {len(types)} layer_types; take it as published")
    if "layer_types" in family.settings:
        every = _global_every(fields)
        if types != _layer_types(every, layers):
            raise unsupported(
                f"global layers that are not every {every}th one (layer_types)", "groups of as many layers"
            )
        return
    windows = "sliding_window" in family.settings and fields.get("sliding_window") is not None
    expected = _LOCAL if windows else _GLOBAL
    others = sorted(set(types) - {expected})
    if others:
        raise unsupported(f"layers of the type {others[0]!r}", f"{expected!r} in all layers")


@cache
def _warn(file: Path, unknown: str) -> None:
    """Warns once of a file."""
    say(
        f"warning: {file} has fields that are not known here, and are not used: {unknown}; where one of them "
        "changes what the model computes, its answers are wrong"
    )


def _activation(family: Family) -> dict[str, str]:
    return _ACTIVATIONS[family.traits.get("activation", "silu")]


def _layer_types(every: int | None, layers: int) -> list[str]:
    """The type of each layer, where every ``every``-th one is global."""
    return [_GLOBAL if every and (index + 1) % every == 0 else _LOCAL for index in range(layers)]


def _global_every(fields: Fields) -> int | None:
    """The layers of a group that ends with a global one; None if no layer is global."""
    usual = _layer_types(fields["sliding_window_pattern"], fields["num_hidden_layers"])
    types = fields.get("layer_types", usual)
    return types.index(_GLOBAL) + 1 if _GLOBAL in types else None


def usable_context(
    path: Path, asked: int | None, allow_extrapolation: bool, adapter: "Adapter | None" = None
) -> int:
    """Returns the context length in tokens, checked against that for which the model at ``path`` was made.

    An ``adapter`` may have made it for another one. Where ``asked`` is None it is that one. With
    ``allow_extrapolation`` a longer one only gives a warning.

    Raises:
      ConfigError: the length is below 1, longer than the model was made for, or unknown.
    """
    made_for = _made_for(read_fields(path, adapter))
    context = made_for if asked is None else asked
    if context is None:
        raise ConfigError(f"{path} does not state the context that the model was made for; give a length")
    if context < 1:
        raise ConfigError(f"a context of {context} tokens; it must be at least 1")
    if made_for is not None and context > made_for:
        if not allow_extrapolation:
            raise ConfigError(
                f"a context of {context} tokens is requested, but the model was made for {made_for}; give "
                "--allow-extrapolation to use it anyway"
            )
        say(f"warning: the model was made for {made_for} tokens, and is used on up to {context}")
    return context


def _made_for(fields: Fields) -> int | None:
    """The context in tokens that a model was made for, with the stretching of its rotary positions.

    Files have that in ``max_position_embeddings`` or beside it, or there the context before stretching.
    """
    rope = (fields.get("rope_scaling") or {}) | (fields.get("rope_parameters") or {})
    named = [fields.get("max_position_embeddings"), fields.get("max_sequence_length")]
    if "yarn" in (rope.get("rope_type"), rope.get("type")):
        named.append(int(rope.get("original_max_position_embeddings", 0) * rope.get("factor", 1.0)))
    return max(filter(None, named), default=None)


def _config(family: Family, fields: Fields, context: int | None) -> LlamaConfig:
    rope, local_theta = _rope(fields)
    own = {**fields, "rope_local_base_freq": local_theta}
    if "layer_types" in family.settings:
        own["layer_types"] = _global_every(fields)
    settings: dict[str, Any] = {name: own.get(field) for field, name in family.settings.items()}
    logit_cap = settings.pop("logit_cap", None)
    scaling, eos = fields.get("query_scaling"), fields.get("eos_token_id")
    return LlamaConfig(
        TransformerConfig(
            width=fields["hidden_size"],
            layers=fields["num_hidden_layers"],
            heads=fields["num_attention_heads"],
            kv_heads=fields.get("num_key_value_heads"),
            head_size=fields.get("head_dim"),
            ffn_width=fields["intermediate_size"],
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
            rope_scaling=_scaling(rope, fields, context),
            query_scaling=scaling and QueryScaling(**scaling),
            **family.traits,
            **settings,
            norm_epsilon=fields.get("rms_norm_eps", 1e-6),
            dtype=_DTYPES[stored_dtype(fields)],  # pyright: ignore[reportArgumentType]
        ),
        family=LLAMA.name if family is OWN else family.name,
        logit_cap=logit_cap,
        vocab_size=fields["vocab_size"],
        tied=fields.get("tie_word_embeddings", False),
        context=fields.get("max_position_embeddings"),
        bos_token_id=fields.get("bos_token_id"),
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        pad_token_id=fields.get("pad_token_id"),
    )


def _rope(fields: Fields) -> tuple[dict[str, Any], float | None]:
    """The content of ``rope_parameters``, or of older fields, and the base of local layers if it differs."""
    by_type, local_theta = dict(fields.get("rope_parameters") or {}), fields.get("rope_local_base_freq")
    if _GLOBAL in by_type or _LOCAL in by_type:
        local = by_type.get(_LOCAL) or {}
        by_type = by_type.get(_GLOBAL) or {}
        if local_theta is None or local.get("rope_type", "default") != "default":
            raise ValueError("its rotary positions of layers with a window are not supported")
        local_theta = local.get("rope_theta", local_theta)
    rope = dict(fields.get("rope_scaling") or {}) | by_type
    if "rope_theta" not in rope and "rope_theta" in fields:
        rope["rope_theta"] = fields["rope_theta"]
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    return rope, local_theta


def _scaling(rope: Mapping[str, Any], fields: Fields, context: int | None) -> RotaryScaling | None:
    made_for = fields.get("max_position_embeddings", 2048)
    original = rope.get("original_max_position_embeddings") or made_for
    condensed = fields.get("rope_condense_ratio", 1.0)  # LongChat's
    match rope.get("rope_type", "default"):
        case "default":
            return None if condensed == 1 else LinearScaling(condensed)
        case _ if condensed != 1:
            raise ValueError("rope_condense_ratio beside rope_scaling is not supported")
        case "linear":
            return LinearScaling(rope["factor"])
        case "dynamic":
            if original != made_for:
                raise ValueError(
                    f"dynamic rotary scaling with original_max_position_embeddings {original}, but "
                    f"max_position_embeddings {made_for}, which transformers takes as the original context; "
                    "set both to the context before scaling"
                )
            return DynamicScaling(rope["factor"], original, context or original)
        case "yarn":
            if any(rope.get(name) is not None for name in ("mscale", "mscale_all_dim")):
                raise ValueError("mscale and mscale_all_dim of yarn are not supported")
            return YarnScaling(
                rope.get("factor") or made_for / original,
                original,
                beta_fast=rope.get("beta_fast") or 32.0,
                beta_slow=rope.get("beta_slow") or 1.0,
                attention_factor=rope.get("attention_factor"),
                truncate=rope.get("truncate", True),
            )
        case "llama3":
            return Llama3Scaling(rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original)
        case unknown:
            known = ("default", "linear", "dynamic", "yarn", "llama3")
            raise UnknownNameError("rope_type", str(unknown), known)


def config_fields(config: LlamaConfig, context: int | None, dtype: str) -> dict[str, Any]:
    """Returns the content of ``config.json`` for a model saved in ``dtype``; see ``save_pretrained``."""
    stack = config.transformer
    family = OWN if stack.query_scaling is not None else FAMILIES[config.family]
    theta, scaling = stack.rope_theta, stack.rope_scaling
    if isinstance(scaling, DynamicScaling):
        in_use = max(scaling.context, scaling.original_context)
        if context not in (None, in_use):
            raise ArgumentError(
                f"a context of {context} tokens, but dynamic rotary scaling is set for {in_use}; leave it "
                f"out, or load the model with load_pretrained(..., context={context})"
            )
        # Transformers scales by the length of each text and takes max_position_embeddings as the original
        # context. This model scales by a fixed context: plain rotary positions of another base.
        if scaling.context > scaling.original_context:
            theta, scaling = scaling.base(theta, stack.head_dim), None
        context = in_use
    rope = None
    if scaling is not None:
        rope = {"rope_type": scaling.rope_type} | asdict(scaling)
        rope["original_max_position_embeddings"] = rope.pop("original_context", None)
        rope = {name: value for name, value in rope.items() if name != "context" and value is not None}
    fields = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "hidden_size": stack.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.heads,
        "num_key_value_heads": stack.key_value_heads,
        "head_dim": stack.head_dim,
        "intermediate_size": stack.ffn_width,
        **_activation(family),
        "rms_norm_eps": stack.norm_epsilon,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": context or config.context or getattr(scaling, "original_context", 2048),
        "rope_theta": theta,
        "rope_scaling": rope,
        "torch_dtype": dtype,
        **family.written,
    }
    for field, name in family.settings.items():
        fields[field] = config.logit_cap if name == "logit_cap" else getattr(stack, name)
    if "layer_types" in fields:
        fields["layer_types"] = _layer_types(stack.global_every, stack.layers)
    fields |= {name: getattr(config, name) for name in _IDS if getattr(config, name) is not None}
    if stack.query_scaling is not None:
        fields["query_scaling"] = asdict(stack.query_scaling)
    return fields
