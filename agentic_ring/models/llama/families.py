"""Families of models that are a LLaMA but for what is declared here.

A family is what ``config.json`` calls ``model_type``. What its models differ in from LLaMA is in two places:
its declaration here, and the fields of ``TransformerConfig`` that it sets. Defaults of fields that a file may
lack are those of ``transformers``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from agentic_ring.errors import UnknownNameError

Fields = Mapping[str, Any]
"""Content of ``config.json``."""


@dataclass(frozen=True)
class Family:
    """What models of a family have in common.

    Attributes:
      name: ``model_type`` in ``config.json``.
      architecture: the class in ``transformers``.
      title: what people call it.
      defaults: values of fields that ``config.json`` may lack.
      required: values that fields must have, where they are given: others are not supported.
      written: fields of its own, written with every model.
      traits: what all its models have in ``TransformerConfig``.
      settings: what differs between its models: attributes of ``TransformerConfig`` or ``LlamaConfig``, by
        field of ``config.json``.
      needed: those of the attributes that are never None.
      scaled_embeddings: whether embeddings are multiplied by the root of the width.
      fused: whether one tensor holds the projections of queries, keys and values, and one gate and up.
    """

    name: str
    architecture: str
    title: str
    defaults: Fields = field(default_factory=dict)
    required: Fields = field(default_factory=dict)
    written: Fields = field(default_factory=dict)
    traits: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    scaled_embeddings: bool = False
    fused: bool = False


_NO_BIASES = {"attention_bias": False, "mlp_bias": False}
LLAMA = Family("llama", "LlamaForCausalLM", "LLaMA", required=_NO_BIASES, written=_NO_BIASES)
OWN = Family(
    "agentic_ring_llama",
    "AgenticRingLlamaForCausalLM",
    "LLaMA with scaled queries",
    required=_NO_BIASES,
    written=_NO_BIASES,
)
"""Models with ``QueryScaling``, which other programs would compute wrong and must refuse."""

_WINDOW = {"sliding_window": "window"}
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_GEMMA_REQUIRED = {"attention_bias": False, "use_bidirectional_attention": False}
_GEMMA_TRAITS = {"activation": "gelu_tanh", "zero_centered_norms": True, "output_norm": True}
_GEMMA_SETTINGS = {
    **_WINDOW,
    "layer_types": "global_every",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "final_logit_softcapping": "logit_cap",
}

FAMILIES = {
    family.name: family
    for family in (
        LLAMA,
        OWN,
        Family(
            "mistral",
            "MistralForCausalLM",
            "Mistral",
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            settings=_WINDOW,
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            "Qwen2",
            defaults={"num_key_value_heads": 32},
            required={"use_sliding_window": False},
            written={"use_sliding_window": False},
            traits={"projection_bias": True},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            "Qwen3",
            defaults={"num_key_value_heads": 32, "head_dim": 128},
            required={"use_sliding_window": False, "attention_bias": False},
            written={"use_sliding_window": False, "attention_bias": False},
            traits={"head_norm": True},
        ),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            "Phi-3",
            defaults={"sliding_window": None, "rms_norm_eps": 1e-5},
            # Transformers takes "yarn" as another name of LongRoPE here.
            required={"rope_type": "default", "attention_bias": False},
            settings=_WINDOW,
            fused=True,
        ),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            "Gemma 2",
            defaults={
                **_GEMMA_DEFAULTS,
                "sliding_window_pattern": 2,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            required=_GEMMA_REQUIRED,
            written={"attention_bias": False},
            traits=_GEMMA_TRAITS,
            settings={**_GEMMA_SETTINGS, "attn_logit_softcapping": "attention_cap"},
            needed=("window", "query_pre_attn_scalar"),
            scaled_embeddings=True,
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            "Gemma 3",
            defaults={
                **_GEMMA_DEFAULTS,
                "sliding_window_pattern": 6,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
            },
            # Transformers ignores this cap.
            required={**_GEMMA_REQUIRED, "attn_logit_softcapping": None},
            written={"attention_bias": False, "attn_logit_softcapping": None},
            traits={**_GEMMA_TRAITS, "head_norm": True},
            settings={**_GEMMA_SETTINGS, "rope_local_base_freq": "local_rope_theta"},
            needed=("window", "query_pre_attn_scalar", "local_rope_theta"),
            scaled_embeddings=True,
        ),
    )
}
_TRAITS = {name for family in FAMILIES.values() for name in family.traits}
_SETTINGS = {name for family in FAMILIES.values() for name in family.settings.values()}


def misfits(family: Family, config: Any) -> Iterator[tuple[str, str]]:
    """Attributes that no model of the family has so, each with what its models have.

    Args:
      config: a ``TransformerConfig`` or ``LlamaConfig``.
    """
    for attribute in fields(config):
        name, value = attribute.name, getattr(config, attribute.name)
        if name in family.needed and value is None:
            yield name, "a number"
        elif name in _TRAITS and value != family.traits.get(name, attribute.default):
            yield name, repr(family.traits.get(name, attribute.default))
        elif name in _SETTINGS - set(family.settings.values()) and value != attribute.default:
            yield name, repr(attribute.default)
        elif name == "query_scaling" and value is not None and family not in (LLAMA, OWN):
            yield name, "None"


def family_named(name: str, where: str) -> Family:
    """The family with this name.

    Args:
      where: what has the name, for the error.

    Raises:
      UnknownNameError: there is none.
    """
    if name not in FAMILIES:
        raise UnknownNameError(where, name, tuple(FAMILIES))
    return FAMILIES[name]
