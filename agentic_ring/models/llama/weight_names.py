"""The mapping between the tensors of Hugging Face's files and the parameters of ``Llama``.

Hugging Face stores a weight as a matrix [outputs, inputs]. Here it is [inputs, outputs] with a separate
dimension for heads, and layers are stacked along the first one, so all weights but the embedding are
transposed. Both rotate the two halves of a head, so no rows are permuted.
"""

from dataclasses import dataclass, replace

from agentic_ring.models.llama.families import FAMILIES
from agentic_ring.models.llama.model import LlamaConfig


@dataclass(frozen=True)
class Weight:
    """One parameter and its tensors.

    Attributes:
      path: names of the modules and of the parameter.
      name: name of the tensor; with ``{}`` there is one tensor per layer.
      input_dims: number of leading dimensions, without layers, that form the inputs of the matrix; 0 if
        the parameter has the same shape as the tensor, or is a ``vector``.
      vector: whether the tensor is a vector of all numbers of a layer.
      first_row: row of the tensor at which the parameter begins, where several share a tensor.
      rows: rows of the tensor then; 0 where it is the parameter's alone.
    """

    path: tuple[str, ...]
    name: str
    input_dims: int = 0
    vector: bool = False
    first_row: int = 0
    rows: int = 0

    @property
    def stacked(self) -> bool:
        """Whether the first dimension of the parameter is the layer."""
        return "{}" in self.name

    def names(self, layers: int) -> list[str]:
        """Names of all its tensors."""
        return [self.name.format(layer) for layer in range(layers)] if self.stacked else [self.name]


def weights(config: LlamaConfig) -> tuple[Weight, ...]:
    """All parameters of a model; those that share a tensor follow each other in the order of its rows."""
    family, stack = FAMILIES[config.family], config.transformer
    found = list(_WEIGHTS)
    found += _INPUT_AND_OUTPUT_NORMS if stack.output_norm else _INPUT_NORMS
    if stack.projection_bias:
        found += _BIASES
    if stack.head_norm:
        found += _HEAD_NORMS
    if not config.tied:
        found.append(_HEAD)
    if not family.fused:
        return tuple(found)
    queries, keys = (heads * stack.head_dim for heads in (stack.heads, stack.key_value_heads))
    return _fused(
        _fused(tuple(found), "self_attn.qkv_proj", {"q": queries, "k": keys, "v": keys}),
        "mlp.gate_up_proj",
        dict.fromkeys(("gate", "up"), stack.ffn_width),
    )


def _fused(found: tuple[Weight, ...], name: str, rows: dict[str, int]) -> tuple[Weight, ...]:
    """The weights with projections ``q_proj``, ... in the rows of one tensor of this ``name``."""
    module = name.split(".")[0]
    firsts, total = {}, 0
    for part, size in rows.items():
        firsts[f"{_LAYER}{module}.{part}_proj.weight"] = total
        total += size
    return tuple(
        replace(weight, name=f"{_LAYER}{name}.weight", first_row=firsts[weight.name], rows=total)
        if weight.name in firsts
        else weight
        for weight in found
    )


_BLOCKS = ("transformer", "blocks")
_LAYER = "model.layers.{}."
_HEAD = Weight(("head",), "lm_head.weight", input_dims=1)
_WEIGHTS = (
    Weight(("embedding",), "model.embed_tokens.weight"),
    Weight((*_BLOCKS, "attention", "query"), _LAYER + "self_attn.q_proj.weight", input_dims=1),
    Weight((*_BLOCKS, "attention", "key"), _LAYER + "self_attn.k_proj.weight", input_dims=1),
    Weight((*_BLOCKS, "attention", "value"), _LAYER + "self_attn.v_proj.weight", input_dims=1),
    Weight((*_BLOCKS, "attention", "output"), _LAYER + "self_attn.o_proj.weight", input_dims=2),
    Weight((*_BLOCKS, "feedforward", "gate"), _LAYER + "mlp.gate_proj.weight", input_dims=1),
    Weight((*_BLOCKS, "feedforward", "up"), _LAYER + "mlp.up_proj.weight", input_dims=1),
    Weight((*_BLOCKS, "feedforward", "down"), _LAYER + "mlp.down_proj.weight", input_dims=1),
    Weight(("transformer", "norm", "scale"), "model.norm.weight"),
)


def _layer_norms(names: dict[tuple[str, str], str]) -> tuple[Weight, ...]:
    return tuple(Weight((*_BLOCKS, *path, "scale"), f"{_LAYER}{name}.weight") for path, name in names.items())


_INPUT_NORMS = _layer_norms(
    {("attention", "norm"): "input_layernorm", ("feedforward", "norm"): "post_attention_layernorm"}
)
_INPUT_AND_OUTPUT_NORMS = _layer_norms(
    {
        ("attention", "norm"): "input_layernorm",
        ("attention", "output_norm"): "post_attention_layernorm",
        ("feedforward", "norm"): "pre_feedforward_layernorm",
        ("feedforward", "output_norm"): "post_feedforward_layernorm",
    }
)
_BIASES = tuple(
    Weight((*_BLOCKS, "attention", f"{name}_bias"), f"{_LAYER}self_attn.{name[0]}_proj.bias", vector=True)
    for name in ("query", "key", "value")
)
_HEAD_NORMS = tuple(
    Weight((*_BLOCKS, "attention", f"{name}_norm", "scale"), f"{_LAYER}self_attn.{name[0]}_norm.weight")
    for name in ("query", "key")
)
