"""Finetunes a LLaMA on conversations at long context, stage by stage, with ring attention.

    python experiments/llama_finetune.py
    python experiments/llama_finetune.py --model smollm2 --preset lines
    python experiments/llama_finetune.py --model FOLDER --conversations chats.json --preset prolong-512k

The first command is the demo, in minutes on a CPU: a small model that finds lines in short records is
finetuned on longer and longer ones, and asked for lines before and after. The second trains an adapter, with
which a small published model retrieves lines, in hours. The third packs conversations with the model's own
tokenizer and trains it through a published recipe. Run the same command again after an interruption: it
continues where it stopped.
"""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import jax
import rich
import tyro
from jax.sharding import Mesh

from agentic_ring.data.text.chat import TEMPLATES
from agentic_ring.distributed import first_process_first
from agentic_ring.errors import ConfigError
from agentic_ring.files.model_path import find_model
from agentic_ring.files.run_folder import Stages, read_config
from agentic_ring.mesh import MeshShape, shape_with_ring
from agentic_ring.models.llama import LlamaConfig, token_loss
from agentic_ring.models.llama.adapter import Adapter, open_adapter
from agentic_ring.models.llama.pretrained import read_stored_config
from agentic_ring.models.llama.tensor_files import open_tensors
from agentic_ring.models.lora import LoraConfig
from agentic_ring.models.model import Model
from agentic_ring.provenance import usable_cores
from agentic_ring.results.results_file import Results, figure_table, write_results
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from agentic_ring.token_units import short_tokens
from evals.compile.llama_step import token_batch
from evals.compile.machines import NamedMachine
from evals.compile.step_memory import TrainStep, print_memory
from evals.plots import plot_loss
from experiments.common.launch import LaunchOptions, default_preset, print_pipeline, read_stage_metrics
from experiments.finetune.finetuning import Finetuning, positions, trained_model
from experiments.finetune.presets import PRESETS, FinetuneConfig, FinetunePreset, Stretching
from experiments.finetune.stage_data import ask_lines, check_inputs, prepare_rows, train_base
from experiments.retriever.training import retriever_llama


def mesh_shape(ring: int | None, devices: int, stages: int) -> MeshShape:
    """A ring of this size in each stage; the remaining devices process other rows and share the weights."""
    shape = shape_with_ring(ring, devices, stages)
    return replace(shape, data=1, fsdp=shape.data)


def _rows_on_cores(ring: int | None, devices: int, stages: int) -> MeshShape:
    """A row for each core: a quarter faster than a row that all cores share, where rows are short."""
    return MeshShape(fsdp=min(devices, usable_cores()))


def print_plan(
    preset: FinetunePreset,
    base: LlamaConfig,
    lora: LoraConfig | None,
    stretching: Stretching,
    mesh: Mesh,
    absent: NamedMachine | None,
) -> None:
    """Prints what ``--dry-run`` asks for; ``absent`` is the machine of the mesh if it is not this one."""
    print(f"parameters          {Model(base).parameter_count():,}")
    for number, stage in enumerate(preset.stages, start=1):
        rows = preset.training(stage, mesh, seed=0).batch_size
        rotary = positions(preset.model(base, stage, mesh, stretching))
        print(
            f"stage {number}             {stage.steps:,} steps of {rows:,} rows of "
            f"{short_tokens(stage.context)} tokens, {rotary}, "
            f"learning rate {stage.learning_rate:g}"
        )
    longest = max(preset.stages, key=lambda stage: stage.context)
    training = preset.training(longest, mesh, seed=0)
    print_pipeline(training, mesh)
    model = trained_model(preset.model(base, longest, mesh, stretching), lora)
    batch = token_batch(training.batch_size, longest.context, packed=True)
    step = TrainStep(model, token_loss, training.optimizer, batch, mesh)
    if lora is not None:
        print(f"trained by LoRA     {model.parameter_count():,}")
    say(f"compiling a step at {short_tokens(longest.context)} tokens, which takes minutes for a large model")
    print_memory(step, absent)


def main(
    launch: Annotated[LaunchOptions, tyro.conf.arg(name="")],
    model: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    data: Annotated[tuple[Path, ...], cli.optional_flag(metavar="DIR...")] = (),
    conversations: Annotated[tuple[Path, ...], cli.optional_flag(metavar="FILE...")] = (),
    template: Annotated[
        Literal[TEMPLATES] | None,  # pyright: ignore[reportInvalidTypeForm]
        cli.optional_flag(metavar="NAME"),
    ] = None,
    preset: Annotated[
        Literal[tuple(PRESETS)] | None,  # pyright: ignore[reportInvalidTypeForm]
        cli.optional_flag(metavar="NAME"),
    ] = None,
    lora: Annotated[int | None, cli.optional_flag(metavar="RANK")] = None,
    adapter: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    stretching: Stretching = "yarn",
) -> None:
    """Finetunes a LLaMA on conversations; only the tokens of answers bear loss.

    Args:
      launch: Flags that the training scripts share.
      model: Folder of a model in Hugging Face's layout, GGUF file, or name of a model. Default: with the
        preset demo a small retriever of lines, which the run trains on short records first; with tiny a LLaMA
        from scratch, whose tokenizer is trained on the conversations; with --dry-run the preset's model.
      data: Folders that data_prep.sharegpt wrote with the model's tokenizer, one per length of rows.
      conversations: ShareGPT files, JSON or jsonl, which are packed into the run's folder. Default with demo
        and lines: those that it makes.
      template: Chat template of --conversations; "tokenizer" is the model's own. Default: that one with
        lines, else vicuna_v1.1.
      preset: The recipe: demo or tiny (a laptop), lines (a small published model that learns to retrieve
        lines; lines-full trains all weights), small (one accelerator), lwm-512k, prolong-512k, gradient-1m or
        paper-13b-512k. Default: demo on a CPU, small on anything else.
      lora: Train LoRA adapters of this rank on all projections instead of the weights. Default: 6 with lines,
        that of --adapter, else all weights are trained.
      adapter: Folder of an adapter of the model that training starts from.
      stretching: How the preset lines stretches rotary positions beyond the model's context: all alike
        (linear), by a larger base (ntk), or long waves alone (yarn).
    """
    launch.ready_devices()
    name = preset or default_preset()
    chosen = PRESETS[name]
    given = None if adapter is None else open_adapter(adapter)
    adapters = _adapters(chosen, lora, given)
    named = None if model is None else str(model)
    if model is not None:
        model = find_model(model)
        base = read_stored_config(model, adapter=given)
    elif chosen.shape is None:
        base = retriever_llama()
    else:
        base = chosen.own_model()
    shape = _rows_on_cores if chosen.lines and launch.leaves_cores else mesh_shape
    mesh = launch.mesh(name, base.transformer.layers, shape)
    if launch.dry_run:
        print_plan(chosen, base, adapters, stretching, mesh, launch.absent_machine)
        return

    model_name = "llama" if named is None else Path(named).resolve().name
    directory = launch.output or Path("runs") / f"{model_name}-{name}-seed{launch.seed}"
    earlier = launch.earlier(directory, partial(read_config, kind=FinetuneConfig))
    kept = earlier.batch_rows if earlier is not None and earlier.stages == chosen.stages else None
    config = FinetuneConfig(
        preset=name,
        model=named,
        data=tuple(map(str, data)),
        conversations=tuple(map(str, conversations)),
        template=template or ("tokenizer" if chosen.lines else "vicuna_v1.1"),
        stages=chosen.stages,
        lora=adapters,
        seed=launch.seed,
        stretching=stretching,
        adapter=None if adapter is None else str(adapter),
        mesh=MeshShape(**mesh.shape),
        batch_rows=tuple(
            chosen.training(stage, mesh, launch.seed, kept[number] if kept else None).batch_size
            for number, stage in enumerate(chosen.stages)
        ),
    )
    check_inputs(config, base.vocab_size)
    if given is not None and model is not None:
        given.check_base(open_tensors(model))
    stages = Stages()
    with launch.enter(directory, config, stages):
        made, before = None, []
        if model is None and chosen.base == "records":
            with stages.stage("base"):
                made = train_base(directory / "base", launch.seed)
            with stages.stage("ladder before"):
                before = ask_lines("before", made, config.contexts, directory, launch.seed)
        with stages.stage("data"), first_process_first("data"):
            tokenizer, rows = prepare_rows(config, base.vocab_size, directory, made)
        run = Finetuning(config, chosen, base, made or model, given, tokenizer, rows, mesh, directory)
        with stages.stage("loss before"):
            initial = run.initial_loss()
        with stages.stage("training"):
            params = run.train(launch.wandb)
        with stages.stage("loss after"):
            final = run.test_loss(run.model(config.stages[-1]), params)
        with stages.stage("export"):
            exported = run.export(params)
        if jax.process_index() != 0:
            return
        figures = run.figures(initial, final)
        if made is not None:
            with stages.stage("ladder after"):
                after = ask_lines("after", exported, config.contexts, directory, launch.seed)
            figures += before + after
        results = Results.of_this_process(asdict(config), stages.seconds, figures)
        write_results(directory / "results.json", results)
        metrics = read_stage_metrics(directory, [stage.steps for stage in config.stages])
        plot_loss(directory / "loss.png", directory.name, metrics, "nats per answer token")
        rich.print(figure_table(figures, f"{directory.name}: loss on answers of held-out rows, answers"))
        print(f"written to {directory}: config.json, results.json, loss.png, checkpoints")
        print(f"the model is in {exported}")
        if run.adapter_folder.exists():
            print(f"the adapter is in {run.adapter_folder}")


def _adapters(preset: FinetunePreset, rank: int | None, given: Adapter | None) -> LoraConfig | None:
    """Rank and scale of the adapters to train; None trains all weights."""
    if given is None:
        rank = preset.lora if rank is None else rank
        return None if rank is None else LoraConfig(rank)
    if rank not in (None, given.lora.rank):
        raise ConfigError(
            f"--lora is {rank}, but the adapter {given.path} has rank {given.lora.rank}; leave out --lora"
        )
    return given.lora


if __name__ == "__main__":
    cli.run(main)
