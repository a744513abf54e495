"""Finetunes a LLaMA on conversations at long context, stage by stage, with ring attention.

    python experiments/llama_finetune.py
    python experiments/llama_finetune.py --model FOLDER --conversations chats.json --preset prolong-512k

The first command is the demo, in minutes on a CPU: a small model that finds lines in short records is
finetuned on longer and longer ones, and asked for lines before and after. The second packs conversations with
the model's own tokenizer and trains it through a published recipe. Run the same command again after an
interruption: it continues where it stopped.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import jax
import rich
import tyro
from jax.sharding import Mesh

from agentic_ring.data.text.chat import TEMPLATES
from agentic_ring.distributed import first_process_first
from agentic_ring.files.run_folder import Stages
from agentic_ring.mesh import MeshShape, shape_with_ring
from agentic_ring.models.llama import LlamaConfig
from agentic_ring.models.llama.config_file import read_config
from agentic_ring.models.model import LoraConfig, Model
from agentic_ring.results.results_file import figure_table
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from agentic_ring.token_units import short_tokens
from evals.compile.machines import NamedMachine
from evals.compile.step_memory import print_memory
from experiments.common.launch import LaunchOptions, default_preset, print_pipeline
from experiments.finetune.pipeline import FinetuneConfig, Finetuning, stage_step
from experiments.finetune.presets import PRESETS, FinetunePreset
from experiments.finetune.records import ask_lines, line_figures, train_base
from experiments.finetune.stage_data import check_inputs, prepare_rows
from experiments.retriever.lessons import Vocabulary, retriever_tokenizer
from experiments.retriever.model import retriever_config


def mesh_shape(ring: int | None, devices: int, stages: int) -> MeshShape:
    """A ring of this size in each stage; the remaining devices process other rows and share the weights."""
    shape = shape_with_ring(ring, devices, stages)
    return replace(shape, data=1, fsdp=shape.data)


def preset_model(preset: FinetunePreset) -> LlamaConfig:
    """Configuration of the model of a preset, where no other is given."""
    if preset.shape is None:
        return retriever_config(Vocabulary.of(retriever_tokenizer())).llama
    return preset.shape.llama(dtype="bfloat16" if preset.frugal else "float32")


def print_plan(
    preset: FinetunePreset,
    base: LlamaConfig,
    lora: LoraConfig | None,
    mesh: Mesh,
    absent: NamedMachine | None,
) -> None:
    """Prints what ``--dry-run`` asks for; ``absent`` is the machine of the mesh if it is not this one."""
    print(f"parameters          {Model(base).parameter_count():,}")
    for number, stage in enumerate(preset.stages, start=1):
        rows = preset.training(stage, mesh, seed=0).batch_size
        print(
            f"stage {number}             {stage.steps:,} steps of {rows:,} rows of "
            f"{short_tokens(stage.context)} tokens, rotary base {stage.rope_theta:,.0f}, "
            f"learning rate {stage.learning_rate:g}"
        )
    longest = max(preset.stages, key=lambda stage: stage.context)
    print_pipeline(preset.training(longest, mesh, seed=0), mesh)
    step = stage_step(preset, base, longest, lora, mesh)
    if lora is not None:
        print(f"trained by LoRA     {step.model.parameter_count():,}")
    say(f"compiling a step at {short_tokens(longest.context)} tokens, which takes minutes for a large model")
    print_memory(step, absent)


def main(
    launch: Annotated[LaunchOptions, tyro.conf.arg(name="")],
    model: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    data: Annotated[tuple[Path, ...], cli.optional_flag(metavar="DIR...")] = (),
    conversations: Annotated[tuple[Path, ...], cli.optional_flag(metavar="FILE...")] = (),
    template: Literal[TEMPLATES] = "vicuna_v1.1",  # pyright: ignore[reportInvalidTypeForm]
    preset: Annotated[
        Literal[tuple(PRESETS)] | None,  # pyright: ignore[reportInvalidTypeForm]
        cli.optional_flag(metavar="NAME"),
    ] = None,
    lora: Annotated[int | None, cli.optional_flag(metavar="RANK")] = None,
) -> None:
    """Finetunes a LLaMA on conversations; only the tokens of answers bear loss.

    Args:
      launch: Flags that the training scripts share.
      model: Folder of a model in Hugging Face's layout. Default: with the preset demo a small retriever of
        lines, which the run trains on short records first; with tiny a LLaMA from scratch, whose tokenizer is
        trained on the conversations; with --dry-run the preset's model.
      data: Folders that data_prep.sharegpt wrote with the model's tokenizer, one per length of rows.
      conversations: ShareGPT files, JSON or jsonl, which are packed into the run's folder. Default without
        --model: made-up ones.
      template: Chat template of --conversations; "tokenizer" is the model's own.
      preset: The recipe: demo or tiny (a laptop), small (one accelerator), lwm-512k, prolong-512k,
        gradient-1m or paper-13b-512k. Default: demo on a CPU, small on anything else.
      lora: Train LoRA adapters of this rank on all projections instead of the weights. Default: all weights
        are trained.
    """
    launch.ready_devices()
    name = preset or default_preset()
    chosen = PRESETS[name]
    adapters = None if lora is None else LoraConfig(lora)
    base = preset_model(chosen) if model is None else read_config(model)
    mesh = launch.mesh(name, base.transformer.layers, mesh_shape)
    if launch.dry_run:
        print_plan(chosen, base, adapters, mesh, launch.absent_machine)
        return

    model_name = model.resolve().name if model else "llama"
    directory = launch.output or Path("runs") / f"{model_name}-{name}-seed{launch.seed}"
    earlier = launch.earlier(directory, FinetuneConfig)
    kept = earlier.batch_rows if earlier is not None and earlier.stages == chosen.stages else None
    config = FinetuneConfig(
        preset=name,
        model=None if model is None else str(model),
        data=tuple(map(str, data)),
        conversations=tuple(map(str, conversations)),
        template=template,
        stages=chosen.stages,
        lora=adapters,
        seed=launch.seed,
        mesh=MeshShape(**mesh.shape),
        batch_rows=chosen.batch_rows(mesh, kept),
    )
    check_inputs(config, base.vocab_size)
    stages = Stages()
    with launch.enter(directory, config, stages):
        made, before = None, []
        if model is None and chosen.base == "records":
            with stages.stage("base"):
                made = train_base(directory / "base", launch.seed)
            with stages.stage("ladder before"):
                before = ask_lines(made, config.contexts, directory / "ladder-before", launch.seed)
        with stages.stage("data"), first_process_first("data"):
            tokenizer, rows = prepare_rows(config, base.vocab_size, directory, made)
        run = Finetuning(config, chosen, base, made or model, tokenizer, rows, mesh, directory)
        with stages.stage("loss before"):
            initial = run.initial_loss()
        with stages.stage("training"):
            params = run.train(launch.wandb)
        with stages.stage("loss after"):
            final = run.final_loss(params)
        with stages.stage("export"):
            exported = run.export(params)
        if jax.process_index() != 0:
            return
        figures = run.figures(initial, final)
        if made is not None:
            with stages.stage("ladder after"):
                after = ask_lines(exported, config.contexts, directory / "ladder-after", launch.seed)
            figures += line_figures("before", before) + line_figures("after", after)
        run.write_report(figures, stages)
        rich.print(figure_table(figures, f"{directory.name}: loss on answers of held-out rows, answers"))
        print(f"written to {directory}: config.json, results.json, loss.png, checkpoints")
        print(f"the model is in {exported}")


if __name__ == "__main__":
    cli.run(main)
