"""Which of Hugging Face's tensors each of our arrays is.

A weight there is a matrix [outputs, inputs]. Here it is [inputs, outputs], heads are a dimension of their
own, and layers are stacked along the first: all but the embedding are transposed on the way. Heads rotate
in halves in both, so that no row changes its place.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    """One of our arrays and its tensors.

    Attributes:
      path: names of the modules and of the parameter.
      name: of the tensor; where it has ``{}``, there is one a layer.
      input_dims: leading dimensions of ours, of one layer, that together are the matrix's inputs; 0 where
        ours is laid out as theirs.
    """

    path: tuple[str, ...]
    name: str
    input_dims: int = 0

    @property
    def stacked(self) -> bool:
        """Whether the first dimension of ours is the layer."""
        return "{}" in self.name

    def names(self, layers: int) -> list[str]:
        """Of all its tensors."""
        return [self.name.format(layer) for layer in range(layers)] if self.stacked else [self.name]


def weights(tied: bool) -> tuple[Weight, ...]:
    """All arrays of a model; where the head is ``tied`` to the embedding it is none of its own."""
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
