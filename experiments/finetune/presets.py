"""LLaMA finetuning recipes: stages of growing context length, each with its rotary base.

Each recipe is as published, with its source beside it. Context lengths are in tokens, 1k = 1024.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from jax.sharding import Mesh

from agentic_ring.errors import ConfigError
from agentic_ring.mesh import MeshShape, batch_shards, rows_per_shard
from agentic_ring.models.llama import LlamaConfig
from agentic_ring.models.lora import LoraConfig
from agentic_ring.models.pipeline import accumulation_parts
from agentic_ring.models.transformer_config import LinearScaling, Remat, TransformerConfig, YarnScaling
from agentic_ring.training.optimizer import OptimizerConfig, TrainConfig
from evals.compile.llama_step import CHUNK, SHAPES, Shape

TEST_SHARE = 0.05
"""Share of the conversations packed by a run that is held out for the test."""
_K = 1024
_M = 1024**2


@dataclass(frozen=True)
class Stage:
    """Training at one context length."""

    context: int
    """Tokens per row."""
    rope_theta: float | None
    """Rotary base (theta); a scaling of positions in the model's own configuration is dropped. None leaves
    both as the model has them, but beyond its context, where positions are stretched; see ``Stretching``."""
    learning_rate: float
    """Peak learning rate."""
    steps: int
    batch_tokens: int
    """Tokens per update, rounded to whole rows; padding included."""
    warmup_steps: int = 0
    final_fraction: float = 0.1
    """Learning rate at the last step, as a share of the peak; 1 is a constant rate."""


Stretching = Literal["linear", "ntk", "yarn"]
"""How rotary positions are stretched beyond the context that a model was made for: all alike (arXiv
2306.15595), by a larger base ("NTK-aware"), or long waves alone (YaRN, arXiv 2309.00071)."""


def stretched(config: LlamaConfig, context: int, how: Stretching) -> TransformerConfig:
    """The stack of a model with rotary positions for ``context`` tokens; its own where they suffice.

    Raises:
      ConfigError: its context is unknown, or its positions are scaled already.
    """
    stack = config.transformer
    if config.context is not None and context <= config.context:
        return stack
    if config.context is None or stack.rope_scaling is not None:
        fault = "does not state its context" if config.context is None else "scales its positions already"
        raise ConfigError(f"a stage has rows of {context} tokens, but the model {fault}; take another preset")
    factor, head_dim = context / config.context, stack.head_dim
    match how:
        case "linear":
            return replace(stack, rope_scaling=LinearScaling(factor))
        case "ntk":
            return replace(stack, rope_theta=stack.rope_theta * factor ** (head_dim / (head_dim - 2)))
        case "yarn":
            return replace(stack, rope_scaling=YarnScaling(factor, config.context))


@dataclass(frozen=True)
class FinetunePreset:
    """A finetuning recipe."""

    stages: tuple[Stage, ...]
    """Each starts from the weights of the previous one, with a fresh optimiser."""
    shape: Shape | None
    """Model of a dry run without ``--model``, and of training from scratch; None if ``base`` is "records"."""
    checkpoint_every: int
    """Updates between two checkpoints."""
    base: Literal["given", "fresh", "records"] = "given"
    """What is finetuned without ``--model``: nothing, so that one must be given; a fresh model with a
    tokenizer of the conversations; or a small retriever, which has only seen short records of lines."""
    lines: bool = False
    """Whether it makes its conversations itself, about records of lines (``lines_conversations``)."""
    lora: int | None = None
    """Rank of the adapters unless another one is given; None trains all weights."""
    kept_until: int = 0
    """Rows of at most so many tokens keep the activations of all layers, although memory is saved."""
    remat: Remat = "full"
    """What longer rows recompute where memory is saved; see ``TransformerConfig.remat``."""
    loss_chunk: int = CHUNK
    """Answer tokens whose logits are computed at a time."""
    beta2: float = 0.95
    """AdamW's."""
    frugal: bool = True
    """Whether to save memory, for long rows: one row at a time, layers rematerialised, heads in groups and
    the feedforward in chunks."""

    def own_model(self) -> LlamaConfig:
        """A model of the preset's shape, made for its rows."""
        assert self.shape is not None
        llama = self.shape.llama(dtype="bfloat16" if self.frugal else "float32")
        return replace(llama, context=max(stage.context for stage in self.stages))

    def training(self, stage: Stage, mesh: Mesh, seed: int, batch_rows: int | None = None) -> TrainConfig:
        """How to train a stage on this mesh.

        ``batch_rows``, of a run that is continued, must divide over the mesh; None takes the stage's
        ``batch_tokens``.
        """
        if batch_rows is None:
            shards = batch_shards(mesh)
            batch_rows = shards * max(1, round(stage.batch_tokens / stage.context / shards))
        rows_at_once = rows_per_shard(batch_rows, mesh)
        optimizer = OptimizerConfig(
            learning_rate=stage.learning_rate,
            warmup_steps=stage.warmup_steps,
            final_fraction=stage.final_fraction,
            weight_decay=0.0,
            clip_norm=1.0,
            beta2=self.beta2,
            accumulation=accumulation_parts(rows_at_once, mesh.shape["stage"]) if self.frugal else 1,
        )
        return TrainConfig(stage.steps, batch_rows, optimizer, self.checkpoint_every, seed=seed)

    def model(
        self, config: LlamaConfig, stage: Stage, mesh: Mesh, stretching: Stretching = "yarn"
    ) -> LlamaConfig:
        """The model's configuration in a stage on this mesh."""
        if stage.rope_theta is None:
            stack = stretched(config, stage.context, stretching)
        else:
            stack = replace(config.transformer, rope_theta=stage.rope_theta, rope_scaling=None)
        if self.frugal:
            remat = "none" if stage.context <= self.kept_until else self.remat
            stack = replace(stack, remat=remat, ffn_chunk=CHUNK, head_groups=1, attention_strategy="auto")
        else:
            stack = replace(stack, remat="none")
        if self.frugal and mesh.shape["ring"] > 1:
            sizes = Shape(stack.width, stack.ffn_width, stack.layers, stack.heads, stack.kv_heads)
            stack = replace(stack, head_groups=sizes.head_groups, attention_strategy="ring")
        return replace(config, transformer=stack, loss_chunk=self.loss_chunk)


_LINES = FinetunePreset(
    stages=(
        Stage(2 * _K, None, 1e-3, steps=20, batch_tokens=8 * _K, warmup_steps=3),
        Stage(8 * _K, None, 1e-3, steps=12, batch_tokens=16 * _K, warmup_steps=1),
        Stage(16 * _K, None, 5e-4, steps=2, batch_tokens=32 * _K),
    ),
    shape=Shape(576, 1536, 30, 9, 3, vocab_size=49_152),
    checkpoint_every=1,
    lines=True,
    lora=6,
    kept_until=4 * _K,
    remat="attention",
    loss_chunk=256,  # in most rows of a record few tokens are answers
)
_constant_rate = partial(Stage, batch_tokens=4 * _M, final_fraction=1.0)

PRESETS = {
    # A laptop, minutes: a small retriever of short records becomes one of long ones. Its rotary base stays,
    # at which more than half of the waves hardly turn over half a million positions.
    "demo": FinetunePreset(
        stages=(
            Stage(4 * _K, 1e16, 1e-3, steps=200, batch_tokens=4 * _K, warmup_steps=20),
            Stage(16 * _K, 1e16, 5e-4, steps=60, batch_tokens=16 * _K, warmup_steps=6),
        ),
        shape=None,
        checkpoint_every=40,
        base="records",
        frugal=False,
    ),
    # A laptop, hours: a small model that people use learns to retrieve lines, first in short rows, then at
    # its length and beyond it.
    "lines": _LINES,
    "lines-full": replace(
        _LINES,
        lora=None,
        stages=tuple(replace(stage, learning_rate=stage.learning_rate / 20) for stage in _LINES.stages),
    ),
    # A laptop, minutes: a tiny LLaMA from scratch, for conversations of one's own. Two stages, so that it
    # does all that a long recipe does.
    "tiny": FinetunePreset(
        stages=(
            Stage(512, 10_000.0, 2e-3, steps=120, batch_tokens=4 * _K, warmup_steps=10),
            Stage(1024, 50_000.0, 1e-3, steps=40, batch_tokens=4 * _K, warmup_steps=4),
        ),
        shape=Shape(128, 384, 2, 4, vocab_size=512),
        checkpoint_every=40,
        base="fresh",
        frugal=False,
    ),
    # One accelerator: Vicuna's finetuning (FastChat's README: 2e-5, cosine, 3-4% warmup, no decay) in rows
    # of 32K, with the rotary base of LWM's 32K model.
    "small": FinetunePreset(
        stages=(Stage(32 * _K, 1e6, 2e-5, steps=1000, batch_tokens=256 * _K, warmup_steps=40),),
        shape=SHAPES["3B"],
        checkpoint_every=100,
        beta2=0.999,
    ),
    # LWM (arXiv 2402.08268), from LLaMA-2 7B: the rotary bases of its released models (github.com/
    # LargeWorldModel/LWM); 4M tokens a batch; 4.8B, 12B, 12B and 3B tokens; constant 4e-5. Their paper's
    # text was not at hand: rates, tokens and the base at 32K are from memory of its table.
    "lwm-512k": FinetunePreset(
        stages=(
            _constant_rate(32 * _K, 1e6, 4e-5, steps=1200),
            _constant_rate(128 * _K, 1e7, 4e-5, steps=3000),
            _constant_rate(256 * _K, 1e7, 4e-5, steps=3000),
            _constant_rate(512 * _K, 2.5e7, 4e-5, steps=750),
        ),
        shape=SHAPES["7B"],
        checkpoint_every=50,
    ),
    # ProLong (arXiv 2410.02660, github.com/princeton-nlp/ProLong), from Llama-3-8B-Instruct: 20B tokens at
    # 64K, 20B at 512K, then chat (UltraChat) in rows of 64K with the base of 512K. Warmup, a tenth of a
    # long stage and a twentieth of the chat's, is from memory.
    "prolong-512k": FinetunePreset(
        stages=(
            Stage(64 * _K, 8e6, 1e-5, steps=5000, batch_tokens=4 * _M, warmup_steps=500),
            Stage(512 * _K, 1.28e8, 5e-6, steps=2500, batch_tokens=8 * _M, warmup_steps=250),
            Stage(64 * _K, 1.28e8, 2e-5, steps=250, batch_tokens=4 * _M, warmup_steps=12),
        ),
        shape=SHAPES["8B"],
        checkpoint_every=50,
    ),
    # Gradient (huggingface.co/gradientai/Llama-3-8B-Instruct-Gradient-1048k), from Llama-3-8B-Instruct: its
    # table's steps and tokens (63M, 101M, 419M, 839M) as tokens of a batch.
    "gradient-1m": FinetunePreset(
        stages=(
            _constant_rate(64 * _K, 1.53e7, 2e-5, steps=30, batch_tokens=2 * _M),
            _constant_rate(256 * _K, 2.071e8, 2e-5, steps=24),
            _constant_rate(512 * _K, 1.06e9, 2e-5, steps=50, batch_tokens=8 * _M),
            _constant_rate(1 * _M, 2.8e9, 2e-5, steps=50, batch_tokens=16 * _M),
        ),
        shape=SHAPES["8B"],
        checkpoint_every=10,
    ),
    # What the paper finetuned (arXiv 2310.01889, section 5.4): 13B at 512K on 32 A100, ShareGPT after Vicuna.
    # It gives neither rate, batch, steps nor rotary base: the rate is Vicuna's, the base LWM's at 512K, the
    # batch one row and the steps about three epochs of ShareGPT (370M tokens), which are ours.
    "paper-13b-512k": FinetunePreset(
        stages=(Stage(512 * _K, 2.5e7, 2e-5, steps=2118, batch_tokens=512 * _K, warmup_steps=84),),
        shape=SHAPES["13B"],
        checkpoint_every=50,
        beta2=0.999,
    ),
}


@dataclass(frozen=True)
class FinetuneConfig:
    """Everything that decides a run's result, except for the contents of the files it names."""

    preset: str
    model: str | None
    """As ``find_model`` takes it; None finetunes one that the run makes, see ``FinetunePreset.base``."""
    data: tuple[str, ...]
    conversations: tuple[str, ...]
    template: str
    stages: tuple[Stage, ...]
    lora: LoraConfig | None
    seed: int
    stretching: Stretching
    adapter: str | None
    """The adapter that training starts from; None starts from a fresh one, or trains all weights."""
    mesh: MeshShape
    batch_rows: tuple[int, ...]
    """Rows per update of each stage, summed over all devices."""

    @property
    def contexts(self) -> list[int]:
        """Context lengths of the stages, in ascending order."""
        return sorted({stage.context for stage in self.stages})

    def rows(self, context: int) -> int:
        """Rows of this length that training reads."""
        stages = zip(self.stages, self.batch_rows, strict=True)
        return sum(stage.steps * rows for stage, rows in stages if stage.context == context)
