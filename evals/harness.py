"""Runs tasks of EleutherAI's lm-evaluation-harness, such as RULER's long retrieval, on our models.

    pip install 'agentic_ring[harness]'
    python evals/harness.py --model FOLDER --tasks niah_single_1,niah_multikey_1 --max-length 33024

prints the harness's table and writes its results and samples. A prompt that is too long is an error and is
never truncated, as truncation may remove the answer. A prompt begins with exactly one BOS token, whatever
the chat template writes.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

from agentic_ring.data.text.chat import chat_template
from agentic_ring.errors import ConfigError
from agentic_ring.extras import needs_extra
from agentic_ring.files.atomic import replacing
from agentic_ring.inference.named_model import NamedModel
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.mesh import make_mesh
from agentic_ring.terminal import cli
from agentic_ring.token_units import parse_tokens
from evals.harness_model.engine_requests import HarnessRequests

RULER_ROOM = 256
"""Tokens that one of RULER's prompts may have beyond its nominal length."""


def main(
    model: Path,
    tasks: str,
    adapter: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    max_length: Annotated[int | None, cli.optional_flag(metavar="TOKENS")] = None,
    ruler_lengths: Annotated[str | None, cli.optional_flag(metavar="TOKENS,...")] = None,
    template: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None,
    num_fewshot: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    limit: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    include_path: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    allow_extrapolation: Annotated[bool, cli.switch] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, cli.optional_flag(metavar="{float32,bfloat16}")
    ] = None,
    seed: int = 0,
    output: Annotated[Path | None, cli.optional_flag(metavar="FILE")] = None,
) -> None:
    """Runs tasks of lm-evaluation-harness on a model.

    Args:
      model: Folder in Hugging Face's layout with its tokenizer.json, GGUF file, or name of a model.
      tasks: The harness's names of the tasks, separated by commas.
      adapter: LoRA adapter of the model: its folder.
      max_length: Maximum number of tokens of a prompt and its answer. Default: the model's context length.
      ruler_lengths: Lengths of RULER's prompts, such as 4k,32k. They include neither the beginning of the
        answer that RULER supplies nor a chat template, so make max-length larger. Default: the largest power
        of two that leaves 256 tokens.
      template: Send prompts as a chat in this template: vicuna_v1.1, llama-3, plain, or tokenizer for the
        model's own. Default: bare prompts.
      num_fewshot: Number of examples before each question. Default: that of the task.
      limit: Maximum number of questions per task. Default: all.
      include_path: Folder with additional tasks as YAML files of the harness.
      allow_extrapolation: Allow a max_length beyond the model's context length.
      dtype: Data type of weights and computation. Default: as stored.
      seed: Seed of sampled answers.
      output: JSON file for results and samples. Default: runs/harness-MODEL.json.
    """
    with needs_extra("harness"):
        from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
        from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
            handle_non_serializable,
            make_table,
        )

        from evals.harness_model.model import HarnessModel

    found = NamedModel.find(model, adapter)
    context = found.context(max_length, allow_extrapolation)
    tokenizer = found.tokenizer()
    chats = None if template is None else chat_template(template, tokenizer)
    mesh = make_mesh()
    ends = tokenizer.eos_ids if chats is None else chats.end_ids
    engine = TextEngine(found.load(mesh, dtype, context), mesh)
    requests = HarnessRequests(engine, tokenizer, ends, context, seed)
    # RULER counts the tokens of its prompts with the model's own tokenizer.
    metadata = {"tokenizer": str(found.path), "max_seq_lengths": _ruler_lengths(ruler_lengths, context)}
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    manager = TaskManager(include_path=None if include_path is None else str(include_path), metadata=metadata)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown or not names:
        raise ConfigError(
            f"the harness has no tasks {', '.join(unknown) or '(none named)'}; `lm_eval ls tasks` lists them"
        )
    results = simple_evaluate(
        HarnessModel(requests, tokenizer, chats),
        tasks=names,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=chats is not None,
        task_manager=manager,
        metadata=metadata,
    )
    file = output or Path("runs") / f"harness-{found.name}.json"
    with replacing(file) as beside:
        beside.write_text(json.dumps(results, default=handle_non_serializable, indent=2))
    print(make_table(results), f"written to {file}", sep="\n")


def _ruler_lengths(lengths: str | None, max_length: int) -> list[int]:
    if lengths is None:
        return [1 << (max(1, max_length - RULER_ROOM).bit_length() - 1)]
    return [parse_tokens(text.strip()) for text in lengths.split(",")]


if __name__ == "__main__":
    cli.run(main)
