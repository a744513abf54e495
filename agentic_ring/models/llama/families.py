"""Families of models that are a LLaMA but for what is declared here, and the tensors of their files.

A family is what ``config.json`` calls ``model_type``. What its models differ in from LLaMA is in two places:
its declaration here, and the fields of ``TransformerConfig`` that it sets. Defaults of fields that a file may
lack are those of ``transformers``.

Hugging Face stores a weight as a matrix [outputs, inputs]. Here it is [inputs, outputs] with a separate
dimension for heads, and layers are stacked along the first one, so all weights but the embedding are
transposed. Both rotate the two halves of a head, so no rows are permuted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from agentic_ring.errors import UnknownNameError

if TYPE_CHECKING:
    from agentic_ring.models.llama.model import LlamaConfig

Fields = Mapping[str, Any]
"""Content of ``config.json``."""


@dataclass(frozen=True)
class Family:
    """What models of a family have in common."""

    name: str
    """``model_type`` in ``config.json``."""
    architecture: str
    """The class in ``transformers``."""
    title: str
    """What people call it."""
    defaults: Fields = field(default_factory=dict)
    """Values of fields that ``config.json`` may lack."""
    required: Fields = field(default_factory=dict)
    """Values that fields must have, where they are given: others are not supported."""
    written: Fields = field(default_factory=dict)
    """Fields of its own, written with every model."""
    traits: Mapping[str, Any] = field(default_factory=dict)
    """What all its models have in ``TransformerConfig``."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What differs between its models: attributes of ``TransformerConfig`` or ``LlamaConfig``, by field of
    ``config.json``."""
    needed: tuple[str, ...] = ()
    """Those of the attributes that are never None."""
    scaled_embeddings: bool = False
    """Whether embeddings are multiplied by the root of the width."""
    fused: bool = False
    """Whether one tensor holds the projections of queries, keys and values, and one gate and up."""


_NO_BIASES = {"attention_bias": False, "mlp_bias": False}
LLAMA = Family("llama", "LlamaForCausalLM", "LLaMA", required=_NO_BIASES, written=_NO_BIASES)
OWN = replace(
    LLAMA,
    name="agentic_ring_llama",
    architecture="AgenticRingLlamaForCausalLM",
    title="LLaMA with scaled queries",
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


def family_named(name: str, where: str) -> Family:
    """Returns the family with this name; ``where`` says what has the name, for the UnknownNameError."""
    if name not in FAMILIES:
        raise UnknownNameError(where, name, tuple(FAMILIES))
    return FAMILIES[name]


def misfits(family: Family, config: Any) -> Iterator[tuple[str, str]]:
    """Attributes of a ``TransformerConfig`` or ``LlamaConfig`` that no model of the family has so.

    Each comes with what its models have.
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


@dataclass(frozen=True)
class Weight:
    """One parameter and its tensors."""

    path: tuple[str, ...]
    """Names of the modules and of the parameter."""
    name: str
    """Name of the tensor; with ``{}`` there is one tensor per layer."""
    input_dims: int = 0
    """Number of leading dimensions, without layers, that form the inputs of the matrix; 0 if the parameter
    has the same shape as the tensor, or is a ``vector``."""
    vector: bool = False
    """Whether the tensor is a vector of all numbers of a layer."""
    first_row: int = 0
    """Row of the tensor at which the parameter begins, where several share a tensor."""
    rows: int = 0
    """Rows of the tensor then; 0 where it is the parameter's alone."""

    @property
    def stacked(self) -> bool:
        """Whether the first dimension of the parameter is the layer."""
        return "{}" in self.name

    def names(self, layers: int) -> list[str]:
        """Names of all its tensors."""
        return [self.name.format(layer) for layer in range(layers)] if self.stacked else [self.name]


_LAYER = "model.layers.{}."


def weights(config: "LlamaConfig") -> tuple[Weight, ...]:
    """All parameters of a model; those that share a tensor follow each other in the order of its rows."""
    stack = config.transformer
    queries, keys = stack.heads * stack.head_dim, stack.key_value_heads * stack.head_dim
    heads = {"query": queries, "key": keys, "value": keys}
    gates, fused = {"gate": stack.ffn_width, "up": stack.ffn_width}, FAMILIES[config.family].fused
    norms = {"attention.norm": "input", "feedforward.norm": "post_attention"}
    if stack.output_norm:
        norms = {"attention.norm": "input", "attention.output_norm": "post_attention"}
        norms |= {"feedforward.norm": "pre_feedforward", "feedforward.output_norm": "post_feedforward"}
    biased = ("query", "key", "value") if stack.projection_bias else ()
    normed = ("query", "key") if stack.head_norm else ()
    found = [
        Weight(("embedding",), "model.embed_tokens.weight"),
        *_projections("attention", "self_attn", heads, "qkv" if fused else None),
        _of_layers("attention.output", "self_attn.o_proj.weight", 2),
        *_projections("feedforward", "mlp", gates, "gate_up" if fused else None),
        _of_layers("feedforward.down", "mlp.down_proj.weight", 1),
        Weight(("transformer", "norm", "scale"), "model.norm.weight"),
        *(_of_layers(f"{path}.scale", f"{name}_layernorm.weight") for path, name in norms.items()),
        *(_of_layers(f"attention.{n}_bias", f"self_attn.{n[0]}_proj.bias", vector=True) for n in biased),
        *(_of_layers(f"attention.{n}_norm.scale", f"self_attn.{n[0]}_norm.weight") for n in normed),
    ]
    if not config.tied:
        found.append(Weight(("head",), "lm_head.weight", input_dims=1))
    return tuple(found)


def _of_layers(path: str, name: str, input_dims: int = 0, vector: bool = False) -> Weight:
    return Weight(("transformer", "blocks", *path.split(".")), _LAYER + name, input_dims, vector)


def _projections(path: str, module: str, rows: dict[str, int], fused: str | None) -> Iterator[Weight]:
    """Projections of one input, with their ``rows``; of one tensor, where its name ``fused`` is given."""
    first = 0
    for name, size in rows.items():
        part = name[0] if module == "self_attn" else name
        weight = _of_layers(f"{path}.{name}", f"{module}.{fused or part}_proj.weight", 1)
        yield replace(weight, first_row=first, rows=sum(rows.values())) if fused else weight
        first += size
