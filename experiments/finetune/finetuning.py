"""A finetuning run: its stages in order, losses before and after, and the exported model and adapter."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from agentic_ring.data.text.chat import chat_template
from agentic_ring.data.text.packing import PackedBatches, PackedRows
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.files.json_files import read_json, write_json
from agentic_ring.mesh import ShardingRules, batch_shards
from agentic_ring.models.llama import LlamaConfig, save_pretrained, token_loss
from agentic_ring.models.llama.adapter import Adapter, AdapterTraining, base_digest, save_adapter
from agentic_ring.models.llama.config_file import config_fields, harmless_fields, read_fields, stored_dtype
from agentic_ring.models.llama.families import FAMILIES
from agentic_ring.models.llama.pretrained import load_weights, read_stored_config
from agentic_ring.models.llama.tensor_files import open_tensors
from agentic_ring.models.lora import LoraConfig, LoraModel
from agentic_ring.models.model import Model, Params
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.results_file import Figure
from agentic_ring.terminal.progress import say
from agentic_ring.token_units import short_tokens
from agentic_ring.training.loop import read_metrics, train
from experiments.common.launch import train_stages, training_outputs
from experiments.finetune.presets import FinetuneConfig, FinetunePreset, Stage
from experiments.retriever.training import write_beside_weights

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
      adapter: the one that training starts from.
      rows: folder of the packed rows, by context length.
      directory: folder of the run.
    """

    config: FinetuneConfig
    preset: FinetunePreset
    base: LlamaConfig
    start: Path | None
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
    def adapter_folder(self) -> Path:
        """Folder of the exported adapter."""
        return self.directory / "adapter"

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
        assert self.config.model is not None
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
        save_adapter(params, config, self.config.lora, self.adapter_folder, self.config.model, training)

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
    scaling = stack.rope_scaling
    scaled = "" if scaling is None else f", {scaling.rope_type} by {scaling.factor:g}"
    return f"rotary base {stack.rope_theta:,.0f}{scaled}"
