"""Bytes per device of training a published model of each family, by ahead-of-time compilation.

    python experiments/family_memory.py
    python experiments/family_memory.py --model gemma-2-9b --context 256k --hardware 8xH200

compiles this project's training step for a machine that need not be present; only sizes of the models are
known here, no weights are read. One sequence is sharded over a ring of all devices, as are parameters and
AdamW's state; products are in bfloat16, and layers are recomputed in the backward pass. Needs the extra
cuda13 for GPUs, aot for TPUs.
"""

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import jax

from agentic_ring.errors import UnknownNameError
from agentic_ring.mesh import MeshShape, ShardingRules, make_mesh
from agentic_ring.models.llama import LlamaConfig
from agentic_ring.models.llama.config_file import read_config
from agentic_ring.models.llama.families import FAMILIES
from agentic_ring.models.model import Model
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal import cli
from agentic_ring.token_units import parse_tokens
from agentic_ring.training.losses import token_loss
from agentic_ring.training.optimizer import OptimizerConfig
from evals.compile.llama_step import CHUNK, Shape
from evals.compile.machines import machine
from evals.compile.step_memory import TrainStep, check_fit, token_batch

RULES = ShardingRules(batch=("data",), sequence=("fsdp", "ring"))


def _fields(
    family: str, width: int, ffn: int, layers: int, heads: int, keys: int, vocab: int, **others: Any
) -> dict[str, Any]:
    return {
        "model_type": family,
        "architectures": [FAMILIES[family].architecture],
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocab,
        **others,
    }


_ROPE = {"rope_type": "linear", "factor": 8.0}
PUBLISHED = {
    "llama-3-8b": _fields("llama", 4096, 14336, 32, 32, 8, 128_256),
    "mistral-7b-v0.1": _fields("mistral", 4096, 14336, 32, 32, 8, 32_000, sliding_window=4096),
    "qwen2-7b": _fields("qwen2", 3584, 18944, 28, 28, 4, 152_064),
    "qwen3-8b": _fields("qwen3", 4096, 12288, 36, 32, 8, 151_936, head_dim=128),
    "phi-3-mini-4k": _fields("phi3", 3072, 8192, 32, 32, 32, 32_064, sliding_window=2047),
    "gemma-2-9b": _fields("gemma2", 3584, 14336, 42, 16, 8, 256_000, sliding_window=4096),
    "gemma-3-12b": _fields(
        "gemma3_text", 3840, 15360, 48, 16, 8, 262_208, sliding_window=1024, rope_scaling=_ROPE
    ),
}
"""Sizes of published models, as fields of ``config.json``; of the last one those of its text part."""


def published(name: str) -> LlamaConfig:
    """Returns the configuration of a published model.

    Raises:
      UnknownNameError: there is none of this name.
    """
    if name not in PUBLISHED:
        raise UnknownNameError("model", name, tuple(PUBLISHED))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(PUBLISHED[name]))
        return read_config(Path(folder))


def train_step(config: LlamaConfig, context: int, devices: tuple[Any, ...]) -> TrainStep:
    """Returns an update on one sequence of ``context`` tokens, sharded over all devices."""
    stack = config.transformer
    sizes = Shape(stack.width, stack.ffn_width, stack.layers, stack.heads, stack.kv_heads)
    stack = replace(
        stack,
        dtype="bfloat16",
        ffn_chunk=CHUNK,
        head_groups=sizes.head_groups,
        attention_strategy="ring",
        rules=RULES,
    )
    mesh = make_mesh(MeshShape(ring=len(devices)), devices)
    model = Model(replace(config, transformer=stack, loss_chunk=CHUNK))
    return TrainStep(model, token_loss, OptimizerConfig(), token_batch(1, context), mesh, RULES)


def main(
    model: Annotated[tuple[str, ...], cli.optional_flag(metavar="NAME")] = (),
    context: str = "128k",
    hardware: str = "8xH100",
    rows_to: Path = Path("runs/family_memory.csv"),
) -> None:
    """Compiles a training step of each model and prints its bytes per device.

    Args:
      model: Published models, such as qwen3-8b. Default: one of each family.
      context: Tokens per sequence, such as 128k.
      hardware: Machine to compile for, such as 8xH100.
      rows_to: CSV file of the rows, written after every model.
    """
    jax.config.update("jax_platforms", "cpu")  # where JAX keeps its constants while it compiles
    target, tokens, rows = machine(hardware).compile_target(), parse_tokens(context), []
    configs = {name: published(name) for name in model or PUBLISHED}
    for name, config in configs.items():
        step = train_step(config, tokens, target.devices)
        fit = check_fit(step, target)
        row = {
            "model": name,
            "family": config.family,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(step.model.abstract_params())),
            "hardware_compiled_for": hardware,
            "context": tokens,
            "bytes_per_device": fit.needed,
            "limit_bytes": int(fit.limit),
            "fits": fit.fits,
        }
        plan = None if fit.memory is None else asdict(fit.memory)
        rows.append(row if plan is None else {**row, **plan})
        print(json.dumps(rows[-1]), flush=True)
        rows_to.parent.mkdir(parents=True, exist_ok=True)
        write_rows(rows_to, rows)


if __name__ == "__main__":
    cli.run(main)
