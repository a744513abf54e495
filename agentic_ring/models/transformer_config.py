"""Sizes and settings of the decoder stack, and how it extends rotary positions."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from agentic_ring.attention import MaskSpec, Strategy
from agentic_ring.attention.inputs import STRATEGIES
from agentic_ring.attention.kernels.registry import KERNELS
from agentic_ring.attention.scores import Scores
from agentic_ring.errors import ConfigError, check_at_least_one, check_choice, check_positive, set_fields
from agentic_ring.mesh import ShardingRules

Dtype = Literal["float32", "bfloat16"]
Remat = Literal["full", "offload", "attention", "none"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor`` (arXiv 2306.15595)."""

    factor: float
    rope_type: Literal["linear"] = "linear"

    def __post_init__(self) -> None:
        check_positive(self, "factor")


@dataclass(frozen=True)
class DynamicScaling:
    """A base that grows with the context ("dynamic NTK").

    Frequencies depend on ``context`` only, not on the tokens seen so far; otherwise the cache of a document
    would depend on its division into chunks.
    """

    factor: float
    original_context: int
    """Context in training, in tokens."""
    context: int
    """Context in use, in tokens."""
    rope_type: Literal["dynamic"] = "dynamic"

    def __post_init__(self) -> None:
        check_positive(self, "factor")
        check_at_least_one(self, "original_context", "context")

    def base(self, theta: float, head_dim: int) -> float:
        """The base of plain rotary positions that are equal to the scaled ones of base ``theta``."""
        longer = self.context / self.original_context
        if longer <= 1:
            return theta
        return theta * (self.factor * longer - (self.factor - 1)) ** (head_dim / (head_dim - 2))


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): long wavelengths are stretched, short ones kept, scores are sharpened."""

    factor: float
    original_context: int
    beta_fast: float = 32.0
    """Turns within ``original_context`` above which a wave is kept."""
    beta_slow: float = 1.0
    """Turns below which it is stretched by ``factor``."""
    attention_factor: float | None = None
    """Factor of rotated queries and keys; None is 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Whether the bounds between kept and stretched waves are rounded outwards to whole waves."""
    rope_type: Literal["yarn"] = "yarn"

    def __post_init__(self) -> None:
        check_positive(self, "factor", "beta_fast", "beta_slow", *set_fields(self, "attention_factor"))
        check_at_least_one(self, "original_context")


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are stretched, short ones kept, with a linear ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    rope_type: Literal["llama3"] = "llama3"

    def __post_init__(self) -> None:
        check_positive(self, "factor", "low_freq_factor", "high_freq_factor")
        check_at_least_one(self, "original_context")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor {self.high_freq_factor} of llama3 rotary scaling must be above "
                f"low_freq_factor {self.low_freq_factor}"
            )


RotaryScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling


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
    """Activation function of the feedforward's gate; the second is GELU's approximation by tanh."""
    dtype: Dtype = "float32"
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
            check_at_least_one(self, "layers", at_most=10_000)
        optional = set_fields(self, "kv_heads", "head_size", "window", "global_every", "ffn_chunk")
        check_at_least_one(self, "width", "heads", "ffn_width", "head_groups", *optional)
        optional = set_fields(self, "local_rope_theta", "query_pre_attn_scalar", "attention_cap")
        check_positive(self, "rope_theta", *optional)
        check_positive(self, "norm_epsilon", below=1.0)
        check_choice(self, "dtype", get_args(Dtype))
        check_choice(self, "activation", get_args(Activation))
        check_choice(self, "remat", get_args(Remat))
        check_choice(self, "attention_strategy", ("auto", *STRATEGIES))
        check_choice(self, "attention_kernel", KERNELS)
        for name in set_fields(self, "global_every", "local_rope_theta") if self.window is None else ():
            raise ConfigError(f"{name} is {getattr(self, name)}, but local layers need a window")
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
        is_global = self.global_every is not None and (index + 1) % self.global_every == 0
        return self.global_layers if is_global else self.local_layers
