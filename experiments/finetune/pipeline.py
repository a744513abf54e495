"""The stages of a finetuning run: each trains at its own context, from the weights of the one before."""

from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from agentic_ring.data.text.packing import PackedBatches, PackedRows
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.files.json_files import read_json, write_json
from agentic_ring.files.run_folder import Stages
from agentic_ring.mesh import MeshShape, ShardingRules, batch_shards
from agentic_ring.models.llama import LlamaConfig, save_pretrained, token_loss
from agentic_ring.models.llama.config_file import read_fields
from agentic_ring.models.llama.pretrained import load_weights
from agentic_ring.models.model import LoraConfig, LoraModel, Model, Params
from agentic_ring.results.results_file import Figure, Results, write_results
from agentic_ring.terminal.progress import say
from agentic_ring.token_units import short_tokens
from agentic_ring.training.loop import train
from agentic_ring.training.metrics_log import read_metrics
from evals.compile.llama_step import token_batch
from evals.compile.step_memory import TrainStep
from evals.plots import plot_loss
from experiments.common.training_outputs import read_stage_metrics, train_stages, training_outputs
from experiments.finetune.presets import FinetunePreset, Stage
from experiments.retriever.training import write_beside_weights

TEST_ROWS = 64
"""Maximum number of held-out rows on which the loss is measured."""
RULES = ShardingRules()


@dataclass(frozen=True)
class FinetuneConfig:
    """Everything that decides a run's result, except for the contents of the files it names."""

    preset: str
    model: str | None
    """Folder of a model; None finetunes one that the run makes itself, see ``FinetunePreset.base``."""
    data: tuple[str, ...]
    conversations: tuple[str, ...]
    template: str
    stages: tuple[Stage, ...]
    lora: LoraConfig | None
    seed: int
    mesh: MeshShape
    batch_rows: tuple[int, ...]
    """Rows per update of each stage, summed over all devices."""

    @property
    def contexts(self) -> list[int]:
        """Context lengths of the stages, in ascending order."""
        return sorted({stage.context for stage in self.stages})


@dataclass(frozen=True)
class _InitialLoss:
    """Contents of ``initial_loss.json``, in nats per answer token."""

    loss: float


def stage_model(
    preset: FinetunePreset, base: LlamaConfig, stage: Stage, lora: LoraConfig | None, mesh: Mesh
) -> Model:
    """The model that a stage trains: all weights, or LoRA adapters of weights frozen in the compute dtype."""
    config = preset.model(base, stage, mesh)
    return Model(config) if lora is None else LoraModel(config, lora, config.transformer.dtype)


def stage_step(
    preset: FinetunePreset, base: LlamaConfig, stage: Stage, lora: LoraConfig | None, mesh: Mesh
) -> TrainStep:
    """The train step of a stage, to compile."""
    training = preset.training(stage, mesh, seed=0)
    batch = token_batch(training.batch_size, stage.context, packed=True)
    model = stage_model(preset, base, stage, lora, mesh)
    return TrainStep(model, token_loss, training.optimizer, batch, mesh, RULES)


@dataclass(frozen=True)
class Finetuning:
    """A finetuning run.

    Attributes:
      config: what decides its result.
      preset: the recipe, with the stages of ``config``.
      base: configuration of the model before finetuning.
      start: folder of that model; None starts from fresh weights.
      tokenizer: the model's tokenizer.
      rows: folder of the packed rows, by context length.
      mesh: device mesh.
      directory: folder of the run.
    """

    config: FinetuneConfig
    preset: FinetunePreset
    base: LlamaConfig
    start: Path | None
    tokenizer: Tokenizer
    rows: dict[int, Path]
    mesh: Mesh
    directory: Path

    @cached_property
    def frozen(self) -> Params | None:
        """The weights that LoRA adapts; None where all weights are trained."""
        return None if self.config.lora is None else self._loaded(self.base.transformer.dtype)

    def train(self, wandb_project: str | None) -> Params:
        """Trains all stages, from the newest checkpoint if there is one; returns the trained parameters."""
        return train_stages(
            self.directory, len(self.config.stages), partial(self._train_stage, wandb_project)
        )

    def _train_stage(
        self, wandb_project: str | None, number: int, folder: Path, params: Params | None
    ) -> Params:
        stage = self.config.stages[number]
        say(
            f"stage {number + 1} of {len(self.config.stages)}: rows of {short_tokens(stage.context)} tokens, "
            f"rotary base {stage.rope_theta:,.0f}"
        )
        training = self.preset.training(stage, self.mesh, self.config.seed, self.config.batch_rows[number])
        with (
            training_outputs(folder, self.config, wandb_project) as outputs,
            PackedRows.open(self.rows[stage.context] / "train.h5") as rows,
        ):
            return train(
                training,
                self._model(stage),
                token_loss,
                PackedBatches(rows, training.batch_size, self.mesh, self.config.seed),
                self.mesh,
                *outputs,
                rules=RULES,
                start=lambda: self.starting_params() if params is None else params,
                frozen=self.frozen,
            ).params

    def _model(self, stage: Stage) -> Model:
        return stage_model(self.preset, self.base, stage, self.config.lora, self.mesh)

    def starting_params(self) -> Params:
        """Parameters at the start of the first stage: the folder's weights, fresh ones, or LoRA's zeros."""
        if self.config.lora is None and self.start is not None:
            return self._loaded("float32")
        model = self._model(self.config.stages[0])
        with jax.set_mesh(self.mesh):
            shardings = model.param_shardings(self.mesh, RULES)
            return jax.jit(model.init_params, out_shardings=shardings)(jax.random.key(self.config.seed))

    def _loaded(self, dtype: Any) -> Params:
        assert self.start is not None
        llama = load_weights(self.start, self.base, self.mesh, dtype)
        return nnx.to_pure_dict(nnx.split(llama)[1])

    def initial_loss(self) -> float:
        """Loss before training on the last stage's test rows, at the model's rotary base; kept on disk."""
        path = self.directory / "initial_loss.json"
        if path.exists():
            return read_json(path, _InitialLoss, "delete it to compute it again").loss
        stage = self.config.stages[-1]
        computed = self.preset.model(self.base, stage, self.mesh)
        own = self.base.transformer
        stack = replace(computed.transformer, rope_theta=own.rope_theta, rope_scaling=own.rope_scaling)
        config, lora = replace(computed, transformer=stack), self.config.lora
        model = Model(config) if lora is None else LoraModel(config, lora, stack.dtype)
        loss = self._test_loss(model, self.starting_params())
        if jax.process_index() == 0:
            write_json(path, asdict(_InitialLoss(loss)))
        return loss

    def final_loss(self, params: Params) -> float:
        """Loss after training on the last stage's test rows."""
        return self._test_loss(self._model(self.config.stages[-1]), params)

    def _test_loss(self, model: Model, params: Params) -> float:
        """Nats per answer token over the test rows, at most ``TEST_ROWS``; the same rows on any mesh."""

        @jax.jit
        def sums(params: Params, frozen: Params | None, batch: Any, left: jax.Array) -> jax.Array:
            counts = jnp.arange(rows_at_once) < left  # the last batch may be longer than what is left
            batch = replace(batch, weight=jnp.where(counts[:, None], batch.weight, 0))
            return jnp.stack([token_loss(model.bind(params, frozen), batch), batch.weight.sum()])

        rows_at_once = batch_shards(self.mesh)
        with PackedRows.open(self._test_file) as rows, jax.set_mesh(self.mesh):
            batches = PackedBatches(rows, rows_at_once, self.mesh)
            lefts = range(min(len(rows), TEST_ROWS), 0, -rows_at_once)
            measured = [np.asarray(sums(params, self.frozen, next(batches), left)) for left in lefts]
        loss, weight = np.array(measured, np.float64).sum(axis=0)
        return float(loss / weight)

    @property
    def _test_file(self) -> Path:
        return self.rows[self.config.stages[-1].context] / "test.h5"

    def export(self, params: Params) -> Path:
        """Writes the trained model, LoRA merged, as a folder for ``transformers``; returns the folder."""
        last = self.config.stages[-1]
        stack = replace(self.base.transformer, rope_theta=last.rope_theta, rope_scaling=None)
        model = self._model(last)
        weights = params
        with jax.set_mesh(self.mesh):
            if isinstance(model, LoraModel):
                assert self.frozen is not None
                weights = model.merged(params, self.frozen)
            weights = jax.tree.map(lambda leaf: leaf.astype(stack.dtype), weights)
            llama = Model(replace(self.base, transformer=stack)).bind(weights)
            folder = self.directory / "model"
            context = max(stage.context for stage in self.config.stages)
            save_pretrained(llama, folder, context, self._write_beside_weights)
        return folder

    def _write_beside_weights(self, folder: Path) -> None:
        # What was trained on line retrieval stays so.
        if self.start is not None and read_fields(self.start / "config.json").get("trained_on_task") is True:
            write_beside_weights(self.tokenizer, folder)
        else:
            self.tokenizer.save(folder)

    def figures(self, initial: float, final: float) -> list[Figure]:
        """Every figure of ``results.json``."""
        last = self.directory / f"stage{len(self.config.stages)}"
        rows = read_metrics(last / "metrics.jsonl")
        speed = float(np.median([row["tokens_per_second"] for row in rows]))
        with (
            PackedRows.open(self._test_file) as test,
            PackedRows.open(self._test_file.with_name("train.h5")) as trained,
        ):
            tested, answers, count = min(len(test), TEST_ROWS), trained.answer_tokens(), len(trained)
        return [
            Figure("loss/initial", initial, "nats/token", n=tested),
            Figure("loss/final", final, "nats/token", n=tested),
            Figure("tokens_per_second", speed, "tokens/s", n=len(rows)),
            Figure("answer_tokens", float(answers), "tokens", n=count),
        ]

    def write_report(self, figures: list[Figure], stages: Stages) -> None:
        """Writes ``results.json``, and ``loss.png`` with all stages one after the other."""
        results = Results.of_this_process(asdict(self.config), stages.seconds, figures)
        write_results(self.directory / "results.json", results)
        rows = read_stage_metrics(self.directory, [stage.steps for stage in self.config.stages])
        plot_loss(self.directory / "loss.png", self.directory.name, rows, "nats per answer token")
