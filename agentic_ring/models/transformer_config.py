"""Sizes and settings of the decoder stack."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from agentic_ring.attention import MaskSpec, Strategy
from agentic_ring.attention.inputs import STRATEGIES
from agentic_ring.attention.kernels.registry import KERNELS
from agentic_ring.attention.scores import Scores
from agentic_ring.errors import ConfigError, check_at_least_one, check_choice, check_positive
from agentic_ring.mesh import ShardingRules
from agentic_ring.models.layers import ACTIVATIONS, Activation
from agentic_ring.models.rotary import DynamicScaling, RotaryScaling

_MAX_LAYERS = 10_000
Remat = Literal["full", "offload", "attention", "none"]


@dataclass(frozen=True)
class QueryScaling:
    """Scales queries with the logarithm of their position, as in Llama 4.

    Softmax over more keys is flatter; larger scores compensate for it (arXiv 2501.19399). A query at
    position p is multiplied by 1 + ``scale`` ln(1 + floor((p + 1) / ``floor``)).
    """

    floor: int
    """Queries at positions below ``floor - 1`` are unchanged."""
    scale: float

    def __post_init__(self) -> None:
        check_at_least_one(self, "floor")
        check_positive(self, "scale")


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes, dtype, rematerialisation and sharding of the stack."""

    width: int
    """Model width D."""
    layers: int
    heads: int
    """Query heads N."""
    ffn_width: int
    """Hidden width of the gated feedforward."""
    kv_heads: int | None = None
    """Key/value heads K, a divisor of ``heads``; None is one per query head."""
    head_size: int | None = None
    """Width of one head; None is ``width`` over ``heads``."""
    rope_theta: float = 10_000.0
    rope_scaling: RotaryScaling | None = None
    """Method that extends rotary positions beyond the context of pre-training."""
    query_scaling: QueryScaling | None = None
    window: int | None = None
    """Tokens that a token attends to, itself and those before it; None is all."""
    global_every: int | None = None
    """Layers in a group whose last one is global and attends to all tokens. The others are local: they have
    the window. With None all layers are local."""
    local_rope_theta: float | None = None
    """Base of rotary positions in local layers, where they are not scaled; None is as in all layers."""
    query_pre_attn_scalar: float | None = None
    """Products of queries and keys are divided by its root; None is the width of a head."""
    attention_cap: float | None = None
    """Soft cap of attention's scores; None is none."""
    projection_bias: bool = False
    """Whether queries, keys and values have a bias."""
    head_norm: bool = False
    """Whether each head of queries and keys is normalised before it is rotated."""
    norm_epsilon: float = 1e-5
    zero_centered_norms: bool = False
    """Whether the scales of norms are stored less 1."""
    output_norm: bool = False
    """Whether what attention and feedforward add is normalised."""
    activation: Activation = "silu"
    """Activation function of the feedforward's gate."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters and optimiser state are always float32."""
    remat: Remat = "full"
    """Rematerialisation. "full" keeps only the input of each block, as the paper does, and recomputes the
    rest in the backward pass; "offload" keeps that input in host memory; "attention" also keeps the output of
    attention, which avoids the costliest recomputation for one more [B, T, D] per layer; "none" keeps all."""
    head_groups: int = 1
    """Groups of heads that attention processes one after the other in training, so that queries, keys, values
    and the buffers of the ring are in memory for one group at a time."""
    ffn_chunk: int | None = None
    """Tokens per device in the feedforward at a time (blockwise); None is all of them."""
    attention_strategy: Strategy | Literal["auto"] = "auto"
    attention_kernel: str = "auto"
    rules: ShardingRules = ShardingRules()

    def __post_init__(self) -> None:
        if self.layers != 0:  # a model without layers tells what the rest of it costs
            check_at_least_one(self, "layers", at_most=_MAX_LAYERS)
        optional = (
            name
            for name in ("kv_heads", "head_size", "window", "global_every", "ffn_chunk")
            if getattr(self, name) is not None
        )
        check_at_least_one(self, "width", "heads", "ffn_width", "head_groups", *optional)
        scalars = ("local_rope_theta", "query_pre_attn_scalar", "attention_cap")
        check_positive(self, "rope_theta", *(name for name in scalars if getattr(self, name) is not None))
        check_positive(self, "norm_epsilon", below=1.0)
        check_choice(self, "dtype", ("float32", "bfloat16"))
        check_choice(self, "activation", ACTIVATIONS)
        for name in ("global_every", "local_rope_theta"):
            if self.window is None and getattr(self, name) is not None:
                raise ConfigError(f"{name} is {getattr(self, name)}, but local layers need a window")
        check_choice(self, "remat", get_args(Remat))
        check_choice(self, "attention_strategy", ("auto", *STRATEGIES))
        check_choice(self, "attention_kernel", KERNELS)
        if (self.head_size is None and self.width % self.heads) or self.head_dim % 2:
            raise ConfigError(
                f"width {self.width} over {self.heads} heads does not give an even head dimension; "
                "choose a width that is an even multiple of heads, or an even head_size"
            )
        if isinstance(self.rope_scaling, DynamicScaling) and self.head_dim < 4:
            raise ConfigError("dynamic rotary scaling needs a head dimension of at least 4; this one is 2")
        if self.heads % self.key_value_heads:
            raise ConfigError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if self.key_value_heads % self.head_groups:
            raise ConfigError(
                f"head_groups {self.head_groups} does not divide the {self.key_value_heads} key/value heads"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head, H."""
        return self.head_size or self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """Key/value heads K."""
        return self.kv_heads or self.heads

    @property
    def mask(self) -> MaskSpec:
        """Which tokens a token attends to in a stack of one kind of layer."""
        return MaskSpec(causal=True, window=self.window)

    @property
    def scores(self) -> Scores:
        """Scale and soft cap of attention's scores."""
        return Scores((self.query_pre_attn_scalar or self.head_dim) ** -0.5, self.attention_cap)

    @property
    def local_layers(self) -> "TransformerConfig":
        """Configuration of the layers that have the window, as a stack of only these."""
        if self.local_rope_theta is None:
            return replace(self, global_every=None)
        theta = self.local_rope_theta
        return replace(self, global_every=None, local_rope_theta=None, rope_theta=theta, rope_scaling=None)

    @property
    def global_layers(self) -> "TransformerConfig":
        """Configuration of the layers that attend to all tokens, as a stack of only these."""
        return replace(self, window=None, global_every=None, local_rope_theta=None)

    def of_layer(self, index: int) -> "TransformerConfig":
        """Configuration of one layer, as a stack of only such layers."""
        if self.global_every is not None and (index + 1) % self.global_every == 0:
            return self.global_layers
        return self.local_layers
