"""EleutherAI's lm-evaluation-harness on a model of ours; RULER's long retrieval is among its tasks.

    pip install 'agentic_ring[harness]'
    python evals/harness.py --model FOLDER --tasks niah_single_1,niah_multikey_1 --max-length 33024

prints the harness's table and writes its results and samples. Prompts that are too long are an error,
never cut: a cut one has lost what is asked for. The token that begins a text stands before it once,
whatever a chat template writes.
"""

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Literal

from agentic_ring import cli
from agentic_ring.data.text.chat import chat_template
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ConfigError
from agentic_ring.files import replacing
from agentic_ring.inference import TextEngine
from agentic_ring.mesh import make_mesh
from agentic_ring.models.llama import load_pretrained
from agentic_ring.models.llama.config_file import usable_context
from agentic_ring.token_units import parse_tokens
from evals.harness_model.engine_requests import HarnessRequests

RULER_ROOM = 256
"""Tokens that a prompt of RULER's may have beyond its length."""


def main(
    model: Path,
    tasks: str,
    max_length: Annotated[int | None, cli.optional_flag(metavar="TOKENS")] = None,
    ruler_lengths: Annotated[str | None, cli.optional_flag(metavar="TOKENS,...")] = None,
    template: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None,
    num_fewshot: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    limit: Annotated[int | None, cli.optional_flag(metavar="N")] = None,
    include_path: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    allow_extrapolation: Annotated[bool, cli.switch] = False,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, cli.optional_flag()] = None,
    seed: int = 0,
    output: Annotated[Path | None, cli.optional_flag(metavar="FILE")] = None,
) -> None:
    """Runs tasks of the harness.

    Args:
      model: Folder as Hugging Face lays it out, with its tokenizer.json.
      tasks: The harness's names, with commas between.
      max_length: Tokens of a prompt and its answer at most. Default: what the model was made for.
      ruler_lengths: Lengths of RULER's prompts, as 4k,32k. It does not count the beginning of the answer
        that it gives, nor a chat template: leave max-length some room. Default: the longest power of two
        that leaves 256 tokens.
      template: Ask as a chat, in this template: vicuna_v1.1, llama-3, plain, or tokenizer for the folder's
        own. Default: the bare prompt.
      num_fewshot: Examples before each question. Default: as the task has it.
      limit: Questions a task at most. Default: all.
      include_path: Folder of more tasks, as the harness's YAML files.
      allow_extrapolation: Let max_length go beyond what the model was made for.
      dtype: Of weights and computation. Default: as stored.
      seed: Of answers that are drawn.
      output: Results and samples, as JSON. Default: runs/harness-MODEL.json.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("lm_eval is missing: pip install 'agentic_ring[harness]'")
    # Only now: an installation without the extra gets the message above.
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        handle_non_serializable,
        make_table,
    )

    from evals.harness_model.model import HarnessModel

    context = usable_context(model, max_length, allow_extrapolation)
    tokenizer = Tokenizer.load(model)
    chats = None if template is None else chat_template(template, tokenizer)
    mesh = make_mesh()
    loaded = load_pretrained(model, mesh, dtype, context=context)
    tokenizer.check_fits(loaded.config.vocab_size)
    requests = HarnessRequests(TextEngine(loaded, mesh), tokenizer, context)
    # RULER measures its prompts with the model's own tokenizer.
    metadata = {"tokenizer": str(model), "max_seq_lengths": _ruler_lengths(ruler_lengths, context)}
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    manager = TaskManager(include_path=None if include_path is None else str(include_path), metadata=metadata)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown or not names:
        raise ConfigError(
            f"the harness has no tasks {', '.join(unknown) or '(none named)'}; `lm_eval ls tasks` lists them"
        )
    results = simple_evaluate(
        HarnessModel(requests, tokenizer, chats, seed),
        tasks=names,
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=chats is not None,
        task_manager=manager,
        metadata=metadata,
    )
    file = output or Path("runs") / f"harness-{model.resolve().name}.json"
    with replacing(file) as beside:
        beside.write_text(json.dumps(results, default=handle_non_serializable, indent=2))
    print(make_table(results), f"written to {file}", sep="\n")


def _ruler_lengths(asked: str | None, max_length: int) -> list[int]:
    if asked is not None:
        return [parse_tokens(text.strip()) for text in asked.split(",")]
    return [1 << (max(1, max_length - RULER_ROOM).bit_length() - 1)]


if __name__ == "__main__":
    cli.run(main)
