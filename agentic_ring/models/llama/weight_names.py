"""The mapping between Hugging Face's weight names and the parameters of ``Llama``.

Hugging Face stores a weight as a matrix [outputs, inputs]. Here it is [inputs, outputs] with a separate
dimension for heads, and layers are stacked along the first one, so all weights but the embedding are
transposed. Both rotate the two halves of a head, so no rows are permuted.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    """One parameter and its tensors.

    Attributes:
      path: names of the modules and of the parameter.
      name: name of the tensor; with ``{}`` there is one tensor per layer.
      input_dims: number of leading dimensions, without layers, that form the inputs of the matrix; 0 if
        the parameter has the same shape as the tensor.
    """

    path: tuple[str, ...]
    name: str
    input_dims: int = 0

    @property
    def stacked(self) -> bool:
        """Whether the first dimension of the parameter is the layer."""
        return "{}" in self.name

    def names(self, layers: int) -> list[str]:
        """Names of all its tensors."""
        return [self.name.format(layer) for layer in range(layers)] if self.stacked else [self.name]


def weights(tied: bool) -> tuple[Weight, ...]:
    """All parameters of a model; there is no head if it is ``tied`` to the embedding."""
    return _WEIGHTS if tied else (*_WEIGHTS, _HEAD)


_BLOCKS = ("transformer", "blocks")
_LAYER = "model.layers.{}."
_HEAD = Weight(("head",), "lm_head.weight", input_dims=1)
_WEIGHTS = (
    Weight(("embedding",), "model.embed_tokens.weight"),
    Weight((*_BLOCKS, "attention", "norm", "scale"), _LAYER + "input_layernorm.weight"),
    Weight((*_BLOCKS, "attention", "query"), _LAYER + "self_attn.q_proj.weight", input_dims=1),
    Weight((*_BLOCKS, "attention", "key"), _LAYER + "self_attn.k_proj.weight", input_dims=1),
    Weight((*_BLOCKS, "attention", "value"), _LAYER + "self_attn.v_proj.weight", input_dims=1),
    Weight((*_BLOCKS, "attention", "output"), _LAYER + "self_attn.o_proj.weight", input_dims=2),
    Weight((*_BLOCKS, "feedforward", "norm", "scale"), _LAYER + "post_attention_layernorm.weight"),
    Weight((*_BLOCKS, "feedforward", "gate"), _LAYER + "mlp.gate_proj.weight", input_dims=1),
    Weight((*_BLOCKS, "feedforward", "up"), _LAYER + "mlp.up_proj.weight", input_dims=1),
    Weight((*_BLOCKS, "feedforward", "down"), _LAYER + "mlp.down_proj.weight", input_dims=1),
    Weight(("transformer", "norm", "scale"), "model.norm.weight"),
)
