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

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import rich
import tyro
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from agentic_ring.data.text.chat import TEMPLATES, chat_template
from agentic_ring.data.text.packing import PackedBatches, PackedRows
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.distributed import first_process_first
from agentic_ring.errors import ConfigError
from agentic_ring.files.json_files import read_json, write_json
from agentic_ring.files.model_path import find_model
from agentic_ring.files.run_folder import Stages, read_config
from agentic_ring.mesh import MeshShape, ShardingRules, batch_shards, shape_with_ring
from agentic_ring.models.llama import LlamaConfig, save_pretrained, token_loss
from agentic_ring.models.llama.adapter import (
    Adapter,
    AdapterTraining,
    base_digest,
    open_adapter,
    save_adapter,
)
from agentic_ring.models.llama.config_file import config_fields, harmless_fields, read_fields, stored_dtype
from agentic_ring.models.llama.families import FAMILIES
from agentic_ring.models.llama.pretrained import load_weights, read_stored_config
from agentic_ring.models.llama.tensor_files import open_tensors
from agentic_ring.models.lora import LoraConfig, LoraModel
from agentic_ring.models.model import Model, Params
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.results_file import Figure, Results, figure_table, write_results
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from agentic_ring.token_units import short_tokens
from agentic_ring.training.loop import read_metrics, train
from evals.compile.llama_step import token_batch
from evals.compile.machines import NamedMachine
from evals.compile.step_memory import TrainStep, print_memory
from evals.plots import plot_loss
from experiments.common.launch import (
    LaunchOptions,
    default_preset,
    print_pipeline,
    read_stage_metrics,
    train_stages,
    training_outputs,
)
from experiments.finetune.presets import PRESETS, FinetuneConfig, FinetunePreset, Stage, Stretching
from experiments.finetune.stage_data import ask_lines, check_inputs, prepare_rows, train_base
from experiments.retriever.training import retriever_llama, write_beside_weights

TEST_ROWS = 64
"""Maximum number of held-out rows on which the loss is measured."""


def trained_model(config: LlamaConfig, lora: LoraConfig | None) -> Model:
    """The model that is trained: all weights, or LoRA adapters of weights frozen in the compute dtype."""
    return Model(config) if lora is None else LoraModel(config, lora, config.transformer.dtype)


@dataclass(frozen=True)
class Finetuning:
    """A finetuning run.

    Attributes:
      base: configuration of the model before finetuning.
      start: folder or file of that model; None starts from fresh weights.
      name: what the user calls it.
      adapter: the one that training starts from.
      rows: folder of the packed rows, by context length.
      directory: folder of the run.
    """

    config: FinetuneConfig
    preset: FinetunePreset
    base: LlamaConfig
    start: Path | None
    name: str
    adapter: Adapter | None
    tokenizer: Tokenizer
    rows: dict[int, Path]
    mesh: Mesh
    directory: Path

    @cached_property
    def frozen(self) -> Params | None:
        """The weights that LoRA adapts; None where all weights are trained."""
        return None if self.config.lora is None else self._loaded(self.base.transformer.dtype)

    @property
    def _last_stage(self) -> Stage:
        return self.config.stages[-1]

    def train(self, wandb_project: str | None) -> Params:
        """Trains all stages, from the newest checkpoint if there is one; returns the trained parameters.

        Those of an adapter are rounded to half precision, in which it is exported.
        """
        stages = self.config.stages

        def train_stage(number: int, folder: Path, params: Params | None) -> Params:
            stage = stages[number]
            say(
                f"stage {number + 1} of {len(stages)}: rows of {short_tokens(stage.context)} tokens, "
                f"{positions(self.model(stage).config)}"
            )
            seed, batch_rows = self.config.seed, self.config.batch_rows[number]
            with (
                training_outputs(folder, self.config, wandb_project) as outputs,
                PackedRows.open(self.rows[stage.context] / "train.h5") as rows,
            ):
                return train(
                    self.preset.training(stage, self.mesh, seed, batch_rows),
                    self.model(stage),
                    token_loss,
                    PackedBatches(rows, batch_rows, self.mesh, seed),
                    self.mesh,
                    *outputs,
                    start=lambda: self.starting_params() if params is None else params,
                    frozen=self.frozen,
                ).params

        params = train_stages(self.directory, len(stages), train_stage)
        return params if self.config.lora is None else jax.jit(_in_half_precision)(params)

    def model(self, stage: Stage) -> Model:
        """The model as a stage trains it."""
        config = self.preset.model(self.base, stage, self.mesh, self.config.stretching)
        return trained_model(config, self.config.lora)

    def starting_params(self) -> Params:
        """Parameters at the start of the first stage: the model's, the adapter's, or fresh ones."""
        if self.config.lora is None and self.start is not None:
            return self._loaded("float32")
        if self.adapter is not None:
            model = self.model(self.config.stages[0])
            shardings = model.param_shardings(self.mesh, ShardingRules())
            return jax.device_put(self.adapter.params(self.base), shardings)
        with jax.set_mesh(self.mesh):
            return self._init_params(jax.random.key(self.config.seed))

    @cached_property
    def _init_params(self) -> Callable[[jax.Array], Params]:
        """Compiled once for the loss before training and for training."""
        model = self.model(self.config.stages[0])
        return jax.jit(model.init_params, out_shardings=model.param_shardings(self.mesh, ShardingRules()))

    def _loaded(self, dtype: Any) -> Params:
        assert self.start is not None
        llama = load_weights(self.start, self.base, self.mesh, dtype)
        return nnx.to_pure_dict(nnx.split(llama)[1])

    def initial_loss(self) -> float:
        """Loss before training on the last stage's test rows, at the model's rotary base; kept on disk."""
        path = self.directory / "initial_loss.json"
        if path.exists():
            return read_json(path, dict[str, float], "delete it to compute it again")["loss"]
        config = self.model(self._last_stage).config
        stack = _positioned(config.transformer, self.base.transformer)
        model = trained_model(replace(config, transformer=stack), self.config.lora)
        loss = self.test_loss(model, self.starting_params())
        if jax.process_index() == 0:
            write_json(path, {"loss": loss})
        return loss

    def test_loss(self, model: Model, params: Params) -> float:
        """Nats per answer token over the last stage's test rows, at most ``TEST_ROWS``, on any mesh."""

        @jax.jit
        def sums(params: Params, frozen: Params | None, batch: Any, left: jax.Array) -> jax.Array:
            counts = jnp.arange(rows_at_once) < left  # the last batch may be longer than what is left
            batch = replace(batch, weight=jnp.where(counts[:, None], batch.weight, 0))
            return jnp.stack([token_loss(model.bind(params, frozen), batch), batch.weight.sum()])

        rows_at_once = batch_shards(self.mesh)
        with self._rows("test") as rows, jax.set_mesh(self.mesh):
            batches = PackedBatches(rows, rows_at_once, self.mesh)
            lefts = range(min(len(rows), TEST_ROWS), 0, -rows_at_once)
            measured = [np.asarray(sums(params, self.frozen, next(batches), left)) for left in lefts]
        loss, weight = np.array(measured, np.float64).sum(axis=0)
        return float(loss / weight)

    def _rows(self, split: str) -> PackedRows:
        return PackedRows.open(self.rows[self._last_stage.context] / f"{split}.h5")

    def export(self, params: Params) -> Path:
        """Writes the trained model, LoRA merged, as a folder for ``transformers``; returns the folder.

        Beside it LoRA's adapter alone is written, for ``peft``.

        What the base's files say beside the model stays, such as its generation settings, and so does the
        data type of its weights; the chat template is the one of training.
        """
        model, folder = self.model(self._last_stage), self.directory / "model"
        stack = _positioned(self.base.transformer, model.config.transformer)
        context = self.config.contexts[-1]
        if self._last_stage.rope_theta is None:
            context = max(context, self.base.context or 0)
        with self._rows("train") as rows:
            template = rows.description.template
        tokenizer = chat_template(template, self.tokenizer).tokenizer
        fields = {} if self.start is None else read_fields(self.start)
        dtype = stored_dtype(fields) if fields else stack.dtype
        write_others = partial(write_beside_weights, tokenizer, harmless_fields(fields))
        with jax.set_mesh(self.mesh):
            if isinstance(model, LoraModel):
                assert self.frozen is not None
                self._export_adapter(params, replace(self.base, transformer=stack), context, template)
                params = model.merged(params, self.frozen)
            weights = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
            llama = Model(replace(self.base, transformer=stack)).bind(weights)
            save_pretrained(llama, folder, context, write_others)
        return folder

    def _export_adapter(self, params: Params, config: LlamaConfig, context: int, template: str) -> None:
        """Writes the adapter with the fields of ``config`` that differ from those of the model's own file."""
        assert self.start is not None
        assert self.config.lora is not None
        if FAMILIES[config.family].fused:
            say(f"no adapter is written: files of {config.family} have no matrices of its shape")
            return
        params = multihost_utils.process_allgather(params, tiled=True)
        if jax.process_index() != 0:
            return
        own = config_fields(read_stored_config(self.start), None, "float32")
        changed = {
            name: value
            for name, value in config_fields(config, context, "float32").items()
            if value != own.get(name)
        }
        if self.preset.lines:
            changed["trained_on_task"] = True
        training = AdapterTraining(changed, template, base_digest(open_tensors(self.start)))
        save_adapter(params, config, self.config.lora, self.directory / "adapter", self.name, training)

    def figures(self, initial: float, final: float) -> list[Figure]:
        """Every figure of ``results.json``, from the losses before and after training."""
        metrics = read_metrics(self.directory / f"stage{len(self.config.stages)}" / "metrics.jsonl")
        speed = float(np.median([row["tokens_per_second"] for row in metrics]))
        with self._rows("test") as test, self._rows("train") as trained:
            tested = min(len(test), TEST_ROWS)
            return [
                Figure("loss/initial", initial, "nats/token", n=tested),
                Figure("loss/final", final, "nats/token", n=tested),
                Figure("tokens_per_second", speed, "tokens/s", n=len(metrics)),
                Figure("answer_tokens", float(trained.answer_tokens()), "tokens", n=len(trained)),
            ]


def _in_half_precision(params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float16).astype(leaf.dtype), params)


def _positioned(stack: TransformerConfig, other: TransformerConfig) -> TransformerConfig:
    """The stack with the rotary positions of the other."""
    return replace(stack, rope_theta=other.rope_theta, rope_scaling=other.rope_scaling)


def positions(config: LlamaConfig) -> str:
    """Says where rotary positions come from."""
    stack = config.transformer
    scaled = "" if stack.rope_scaling is None else f", {stack.rope_scaling}"
    return f"rotary base {stack.rope_theta:,.0f}{scaled}"


def mesh_shape(ring: int | None, devices: int, stages: int) -> MeshShape:
    """A ring of this size in each stage; the remaining devices process other rows and share the weights."""
    shape = shape_with_ring(ring, devices, stages)
    return replace(shape, data=1, fsdp=shape.data)


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
    named = str(model)
    if model is not None:
        model = find_model(model)
        base = read_stored_config(model, adapter=given)
    elif chosen.shape is None:
        base = retriever_llama()
    else:
        base = chosen.own_model()
    mesh = launch.mesh(name, base.transformer.layers, mesh_shape)
    if launch.dry_run:
        print_plan(chosen, base, adapters, stretching, mesh, launch.absent_machine)
        return

    model_name = model.resolve().name if model else "llama"
    directory = launch.output or Path("runs") / f"{model_name}-{name}-seed{launch.seed}"
    earlier = launch.earlier(directory, partial(read_config, kind=FinetuneConfig))
    kept = earlier.batch_rows if earlier is not None and earlier.stages == chosen.stages else None
    config = FinetuneConfig(
        preset=name,
        model=None if model is None else str(model),
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
        run = Finetuning(config, chosen, base, made or model, named, given, tokenizer, rows, mesh, directory)
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
        if adapters is not None:
            print(f"the adapter is in {exported.with_name('adapter')}")


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
