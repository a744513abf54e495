"""One training step of LLaMA with the four attention methods that the paper's Tables 3 and 4 compare.

AdamW, parameters and optimiser state sharded over all devices (FSDP), layers scanned and recomputed in the
backward pass. The methods differ in how the sequence is sharded, and in how much of a layer is alive at once:

    vanilla            one sequence per device; attention stores the whole matrix of scores
    memory_efficient   attention in chunks (arXiv 2112.05682); the feedforward takes all tokens at once
    blockwise          the feedforward in chunks as well (BPT, arXiv 2305.19370)
    ring               one sequence is sharded over all devices (arXiv 2310.01889). One group of heads at a
                       time is sent round the ring, which the paper does not do: blocks of all heads and
                       their gradients would take more memory than the blockwise feedforward saves
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from agentic_ring.errors import ArgumentError, UnknownNameError
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from agentic_ring.models.llama import LlamaConfig, TokenBatch, token_loss
from agentic_ring.models.model import Model
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.training.optimizer import OptimizerConfig
from evals.compile.step_memory import TrainStep, sharded_shape

Method = Literal["vanilla", "memory_efficient", "blockwise", "ring"]
METHODS: tuple[Method, ...] = get_args(Method)
Precision = Literal["float32", "bfloat16"]
Remat = Literal["full", "offload", "attention"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a LLaMA model; see ``TransformerConfig``."""

    width: int
    ffn_width: int
    layers: int
    heads: int
    kv_heads: int | None = None
    vocab_size: int = 32_000

    @property
    def head_groups(self) -> int:
        """Number of groups of a few query heads, each with whole key heads."""
        group_heads = min(HEADS_PER_GROUP, max(1, self.heads // 8))
        return min(self.kv_heads or self.heads, self.heads // group_heads)

    def llama(self, **settings: Any) -> LlamaConfig:
        """A LLaMA of these sizes, with further settings of its ``TransformerConfig``."""
        sizes = asdict(self) | settings
        vocab_size = sizes.pop("vocab_size")
        return LlamaConfig(TransformerConfig(**sizes), vocab_size)


SHAPES: dict[str, Shape] = {
    "tiny": Shape(128, 384, 2, 4),
    "100M": Shape(768, 2048, 12, 12),
    "350M": Shape(1024, 2816, 24, 16),
    "1B": Shape(2048, 8192, 16, 32, kv_heads=8, vocab_size=128_256),
    "3B": Shape(3200, 8640, 26, 32),
    "7B": Shape(4096, 11008, 32, 32),
    "8B": Shape(4096, 14336, 32, 32, kv_heads=8, vocab_size=128_256),
    "13B": Shape(5120, 13824, 40, 40),
    "30B": Shape(6656, 17920, 60, 52),
    "65B": Shape(8192, 22016, 80, 64),
}
"""Sizes of the paper's models, of Llama-3.2-1B (here with an output matrix of its own) and Llama-3-8B
(arXiv 2407.21783), and of small models."""

CHUNK = 2048
"""Tokens of a device that a blockwise feedforward, and the loss of every method, take at a time."""
HEADS_PER_GROUP = 4
"""Query heads that a ring computes at a time; fewer where a model has few."""


@dataclass(frozen=True)
class LlamaStep:
    """One update of a LLaMA of ``SHAPES``.

    Attributes:
      context: tokens per sequence.
      devices: devices that it runs on, or is compiled for.
      precision: type of matrix products and activations; parameters and optimiser state are float32.
      remat: see ``TransformerConfig``.
      layers: number of layers; by default the model's.
    """

    model: str
    method: Method
    context: int
    devices: tuple[Any, ...]
    precision: Precision = "bfloat16"
    remat: Remat = "full"
    layers: int | None = None

    def __post_init__(self) -> None:
        if self.model not in SHAPES:
            raise UnknownNameError("model", self.model, tuple(SHAPES))
        multiple = 2 * len(self.devices) if self.method == "ring" else 1
        if self.context < 1 or self.context % multiple:
            raise ArgumentError(
                f"context is {self.context} tokens; {self.method} attention on {len(self.devices)} devices "
                f"takes a multiple of {multiple}"
            )

    @property
    def shape(self) -> Shape:
        """Sizes of the model."""
        return replace(SHAPES[self.model], layers=self.layers or SHAPES[self.model].layers)

    @property
    def batch(self) -> int:
        """Sequences per update: one in total for a ring, else one per device."""
        return 1 if self.method == "ring" else len(self.devices)

    @property
    def rules(self) -> ShardingRules:
        """Sharding rules: the sequence over all devices for a ring, else the batch."""
        if self.method == "ring":
            return ShardingRules(batch=("data",), sequence=("fsdp", "ring"))
        return ShardingRules(batch=("data", "fsdp", "ring"), sequence=())

    @cached_property
    def mesh(self) -> Mesh:
        """Mesh fsdp x ring whose ring divides the width: 3200 divides not over 512, but over 4 x 128."""
        ring = gcd(len(self.devices), self.shape.width)
        return make_mesh(MeshShape(fsdp=len(self.devices) // ring, ring=ring), devices=self.devices)

    @property
    def config(self) -> LlamaConfig:
        """Configuration of the model."""
        ring = self.method == "ring"
        llama = self.shape.llama(
            dtype=self.precision,
            remat=self.remat,
            ffn_chunk=CHUNK if self.method in ("blockwise", "ring") else None,
            head_groups=self.shape.head_groups if ring else 1,
            attention_strategy="ring" if ring and len(self.devices) > 1 else "auto",
            attention_kernel="vanilla" if self.method == "vanilla" else "auto",
            rules=self.rules,
        )
        return replace(llama, loss_chunk=CHUNK)

    @property
    def train_step(self) -> TrainStep:
        """The step, to be compiled or run."""
        batch = token_batch(self.batch, self.context)
        return TrainStep(Model(self.config), token_loss, OptimizerConfig(), batch, self.mesh, self.rules)

    @cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The program for devices that are here."""
        return self.train_step.lower().compile()


def layer_weights(stack: TransformerConfig) -> int:
    """Returns the number of weights in the matrices of one layer: two operations each per token."""
    heads = 2 * stack.heads + 2 * stack.key_value_heads
    return stack.width * (heads * stack.head_dim + 3 * stack.ffn_width)


def token_batch(batch_size: int, tokens: int, packed: bool = False) -> Callable[..., TokenBatch]:
    """Returns ``TrainStep.batch`` for zigzag rows [batch_size, tokens]; one text per row unless packed."""

    def batch(mesh: Mesh, rules: ShardingRules) -> TokenBatch:
        def array(dtype: Any, rows: int = batch_size) -> Any:
            return sharded_shape(mesh, rules, dtype, (rows, tokens))

        numbers, weight = array(jnp.int32), array(jnp.float32)
        positions = numbers if packed else array(jnp.int32, 1)
        return TokenBatch(numbers, numbers, weight, positions, numbers if packed else None, "zigzag")

    return batch
