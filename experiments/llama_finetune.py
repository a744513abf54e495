"""Finetunes a LLaMA on conversations at long context, stage by stage, with ring attention.

    python experiments/llama_finetune.py
    python experiments/llama_finetune.py --model FOLDER --conversations chats.json --preset prolong-512k

The first line is the demo: a tiny LLaMA from scratch on made-up conversations, in minutes on a CPU. The
second packs conversations with the model's own tokenizer and trains it through a published recipe. Run
the same command again after an interruption: it goes on where it stopped.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import jax
import rich
from jax.sharding import Mesh

from agentic_ring import cli
from agentic_ring.data.text.chat import TEMPLATES
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ConfigError
from agentic_ring.mesh import MeshShape, make_mesh, shape_with_ring, simulate_cpu_devices
from agentic_ring.models.llama import LlamaConfig
from agentic_ring.models.llama.config_file import read_config
from agentic_ring.models.lora import LoraConfig
from agentic_ring.models.model import Model
from agentic_ring.processes import first_process_first, join_processes
from agentic_ring.progress import say
from agentic_ring.run_folder import Stages, enter_directory
from agentic_ring.token_units import short_tokens
from evals.common.results import figure_table
from evals.compile.machines import MACHINES, NamedMachine, machine
from evals.compile.step_memory import print_memory
from experiments.finetune.demo_conversations import write_demo_conversations
from experiments.finetune.pipeline import FinetuneConfig, Finetuning, stage_step
from experiments.finetune.presets import PRESETS, FinetunePreset, llama
from experiments.finetune.stage_data import check_given, given_rows, own_tokenizer, pack_rows

SIMULATED_DEVICES = 8


def mesh_shape(ring: int | None, devices: int) -> MeshShape:
    """A ring of this size; the devices it leaves over share rows and weights out among them."""
    shape = shape_with_ring(ring, devices)
    return replace(shape, data=1, fsdp=shape.data)


def print_plan(
    preset: FinetunePreset,
    base: LlamaConfig,
    lora: LoraConfig | None,
    mesh: Mesh,
    absent: NamedMachine | None,
) -> None:
    """What ``--dry-run`` shows; the mesh is of an absent machine's devices, or of those that are here."""
    print(f"parameters          {Model(base).parameter_count():,}")
    for number, stage in enumerate(preset.stages, start=1):
        rows = preset.training(stage, mesh, seed=0).batch_size
        print(
            f"stage {number}             {stage.steps:,} steps of {rows:,} rows of "
            f"{short_tokens(stage.context)} tokens, rotary base {stage.rope_theta:,.0f}, "
            f"learning rate {stage.learning_rate:g}"
        )
    longest = max(preset.stages, key=lambda stage: stage.context)
    step = stage_step(preset, base, longest, lora, mesh)
    if lora is not None:
        print(f"trained by LoRA     {step.model.parameter_count():,}")
    say(f"compiling a step at {short_tokens(longest.context)} tokens, which takes minutes for a large model")
    print_memory(step, absent)


def check_choice(
    model: Path | None, data: tuple[Path, ...], conversations: tuple[Path, ...], preset: str, lora: int | None
) -> None:
    """Fails where flags do not go together.

    Raises:
      ConfigError: says what to give.
    """
    if data and conversations:
        raise ConfigError("give either --data, which is packed, or --conversations, which will be")
    if model is not None and not data and not conversations:
        raise ConfigError("nothing to train on: give --conversations FILE..., or packed folders by --data")
    if model is None and data:
        raise ConfigError("--data holds ids of some model's tokenizer; name that model's folder by --model")
    if model is None and preset != "demo":
        raise ConfigError(
            f"the preset {preset} finetunes a model; name its folder by --model, or add --dry-run to ask for "
            "its memory. Only the demo trains from scratch"
        )
    if model is None and lora is not None:
        raise ConfigError("--lora adapts a model that is there; name its folder by --model")
    check_given(conversations)


def main(
    model: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    data: Annotated[tuple[Path, ...], cli.optional_flag(metavar="DIR...")] = (),
    conversations: Annotated[tuple[Path, ...], cli.optional_flag(metavar="FILE...")] = (),
    template: Literal[TEMPLATES] = "vicuna_v1.1",  # pyright: ignore[reportInvalidTypeForm]
    preset: Annotated[
        Literal[tuple(PRESETS)] | None,  # pyright: ignore[reportInvalidTypeForm]
        cli.optional_flag(metavar="NAME"),
    ] = None,
    lora: Annotated[int | None, cli.optional_flag(metavar="RANK")] = None,
    ring: Annotated[int | None, cli.optional_flag(metavar="DEVICES")] = None,
    seed: int = 0,
    resume: bool = True,
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    dry_run: Annotated[bool, cli.switch] = False,
    hardware: Annotated[
        Literal[tuple(MACHINES)] | None,  # pyright: ignore[reportInvalidTypeForm]
        cli.optional_flag(metavar="NAME"),
    ] = None,
    wandb: Annotated[str | None, cli.optional_flag(metavar="PROJECT")] = None,
    distributed: Annotated[bool, cli.switch] = False,
) -> None:
    """Finetunes a LLaMA on conversations; the loss counts answers alone.

    Args:
      model: Folder of a model as Hugging Face lays it out. Default: a tiny LLaMA from scratch, whose
        tokenizer is trained on the conversations; with --dry-run the preset's model.
      data: Folders that data_prep.sharegpt wrote with the model's tokenizer, one for each length of row.
      conversations: ShareGPT JSON or jsonl, packed into the run's folder. Default without --model: made-up
        ones.
      template: How conversations are written; "tokenizer" is the model's own. For --conversations.
      preset: The recipe: demo (a laptop), small (one accelerator), lwm-512k, prolong-512k, gradient-1m or
        paper-13b-512k. Default: demo on a CPU, small on anything else.
      lora: Train adapters of this rank on all projections and leave the weights as they are. Default: all
        weights are trained.
      ring: Devices a row is sharded over; the rest take other rows, and weights are sharded over all.
        Default: all.
      seed: Decides the order of the rows, and the initial weights where they are not given.
      resume: Go on with the run in the output folder; --no-resume moves it aside and starts anew.
      output: Folder of the run. Default: runs/MODEL-PRESET-seedSEED.
      dry_run: Only print the stages and the compiled bytes per device at the longest; needs no data.
      hardware: With --dry-run, a machine that need not be here, such as 32xA100: is the step too large for
        it? Default: the devices that are here.
      wandb: Also log to this Weights & Biases project; offline if there is no API key.
      distributed: Join the other processes of a multi-host job (Slurm, Kubernetes, Cloud TPU, or by
        JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID).
    """
    simulate_cpu_devices(SIMULATED_DEVICES)
    if hardware is not None:
        if not dry_run:
            raise ConfigError("--hardware compiles for a machine that need not be here; add --dry-run")
        jax.config.update("jax_platforms", "cpu")  # where JAX keeps its constants while it compiles
    if distributed:
        join_processes()
    name = preset or ("demo" if jax.default_backend() == "cpu" else "small")
    chosen = PRESETS[name]
    adapters = None if lora is None else LoraConfig(lora)
    absent = None if hardware is None else machine(hardware)
    devices = jax.devices() if absent is None else absent.compile_target().devices
    shape = mesh_shape(ring, len(devices))
    mesh = make_mesh(shape, devices)
    here = f"{jax.device_count()} {jax.default_backend()} devices"
    say(f"preset {name} on {absent.name if absent else here}, mesh {dict(mesh.shape)}")
    scratch = llama(chosen.shape, "float32" if name == "demo" else "bfloat16")
    base = scratch if model is None else read_config(model)
    if dry_run:
        print_plan(chosen, base, adapters, mesh, absent)
        return

    check_choice(model, data, conversations, name, lora)
    directory = output or Path("runs") / f"{model.resolve().name if model else 'llama'}-{name}-seed{seed}"
    contexts = sorted({stage.context for stage in chosen.stages})
    rows: dict[int, Path] = {}
    if model is not None:
        tokenizer = Tokenizer.load(model)
        tokenizer.check_fits(base.vocab_size)
        rows = given_rows(data, contexts, tokenizer) if data else {}
    config = FinetuneConfig(
        preset=name,
        model=None if model is None else str(model),
        data=tuple(map(str, data)),
        conversations=tuple(map(str, conversations)),
        template=template,
        stages=chosen.stages,
        lora=adapters,
        seed=seed,
        mesh=MeshShape(**mesh.shape),
    )
    first_process = jax.process_index() == 0
    with first_process_first("directory"):
        enter_directory(directory, config, resume or not first_process)
    stages = Stages()
    if first_process:
        stages.keep_in(directory)
    with stages.stage("data"), first_process_first("data"):
        if model is None and not conversations:
            conversations = (directory / "conversations.jsonl",)
            if not conversations[0].exists():
                write_demo_conversations(conversations[0])
        folder = model or directory / "tokenizer"
        if model is None:
            own_tokenizer(conversations, base.vocab_size, folder)
        tokenizer = Tokenizer.load(folder)
        rows = rows or pack_rows(conversations, contexts, template, folder, directory / "rows")
    run = Finetuning(config, chosen, base, tokenizer, rows, mesh, directory)
    with stages.stage("loss before"):
        initial = run.initial_loss()
    with stages.stage("training"):
        params = run.train(wandb)
    with stages.stage("loss after"):
        final = run.final_loss(params)
    with stages.stage("export"):
        exported = run.export(params)
    if not first_process:
        return
    figures = run.figures(initial, final)
    run.write_report(figures, stages)
    rich.print(figure_table(figures, f"{directory.name}: loss on answers of held-out rows"))
    print(
        f"written to {directory}: config.json, results.json, loss.png, checkpoints; the model in {exported}"
    )


if __name__ == "__main__":
    cli.run(main)
