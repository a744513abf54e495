"""Finetuning from flags to files, on written conversations, with a LLaMA that trains in seconds."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from agentic_ring.data.text.packing import (
    PackedBatches,
    PackedDescription,
    PackedRow,
    PackedRows,
    packed_writer,
)
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ArgumentError, ConfigError, DataError, MeshError, StoreError
from agentic_ring.files.run_folder import read_config
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.llama import load_pretrained, token_loss
from agentic_ring.results.results_file import read_results
from agentic_ring.training.metrics_log import MetricsLog, read_metrics
from data_prep.sharegpt import ConversationsConfig, prepare
from evals.compile.llama_step import Shape
from evals.retrieval.local_reader import EMBEDDED
from experiments import llama_finetune
from experiments.common.launch import LaunchOptions
from experiments.finetune import presets
from experiments.finetune.pipeline import FinetuneConfig
from experiments.finetune.presets import PRESETS, FinetunePreset, Stage
from experiments.finetune.stage_data import given_rows, write_demo_conversations
from tests.data.text.tokenizers_for_tests import byte_level

TINY = FinetunePreset(
    stages=(
        Stage(64, 10_000.0, 2e-2, steps=6, batch_tokens=256, warmup_steps=1),
        Stage(128, 40_000.0, 1e-2, steps=4, batch_tokens=256, warmup_steps=1),
    ),
    shape=Shape(16, 32, 2, 2, vocab_size=300),
    checkpoint_every=2,
    base="fresh",
    frugal=False,
)


@pytest.fixture(scope="module", autouse=True)
def tiny_demo():
    """The demo preset with a model and lengths for tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "demo", TINY)
        yield


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    write_demo_conversations(path, count=120)
    return path


@pytest.fixture(scope="module")
def run(chats, tmp_path_factory) -> Path:
    """A finished run from scratch."""
    folder = tmp_path_factory.mktemp("runs") / "scratch"
    finetune(folder, chats)
    return folder


def finetune(
    folder: Path, chats: Path, seed: int = 0, ring: int | None = None, stages: int = 1, **options
) -> None:
    launch = LaunchOptions(output=folder, seed=seed, ring=ring, stages=stages)
    llama_finetune.main(launch, conversations=(chats,), template="plain", **options)


def weights(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "model" / "model.safetensors")


def test_the_loss_falls_through_both_stages(run):
    results = read_results(run / "results.json")
    initial, final = (results.figure(f"loss/{when}").value for when in ("initial", "final"))
    assert initial == pytest.approx(np.log(300), abs=0.5)
    assert final < 0.9 * initial
    assert results.figure("tokens_per_second").value > 0
    with PackedRows.open(run / "rows" / "128" / "train.h5") as rows:
        assert results.figure("answer_tokens").value == rows.answer_tokens() > 1000
    first, second = (read_metrics(run / f"stage{number}" / "metrics.jsonl") for number in (1, 2))
    assert [row["step"] for row in (*first, *second)] == [*range(1, 7), *range(1, 5)]
    assert second[0]["loss"] < 0.9 * first[0]["loss"], "it starts from the weights of the first stage"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_pipeline_trains_the_same_model(run, chats, tmp_path):
    """Two stages of a ring of 4 against one ring of 8: the same losses and the same weights."""
    finetune(tmp_path / "staged", chats, stages=2)
    assert json.loads((tmp_path / "staged" / "config.json").read_text())["mesh"]["stage"] == 2
    for number in (1, 2):
        found, expected = (
            [row["loss"] for row in read_metrics(folder / f"stage{number}" / "metrics.jsonl")]
            for folder in (tmp_path / "staged", run)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    # Adam's first updates divide gradients by their size, so rounding counts where a gradient is almost 0.
    for name, weight in weights(run).items():
        deviation = np.linalg.norm(weights(tmp_path / "staged")[name] - weight)
        assert deviation < 1e-3 * np.linalg.norm(weight), name


def test_the_exported_folder_is_the_trained_model(run):
    """Its loss on the held-out rows is the one that was reported, to rounding."""
    fields = json.loads((run / "model" / "config.json").read_text())
    assert fields["rope_theta"] == 40_000.0
    assert fields["max_position_embeddings"] == 128
    mesh = make_mesh(MeshShape(ring=1), jax.devices()[:1])
    model = load_pretrained(run / "model", mesh)
    with PackedRows.open(run / "rows" / "128" / "test.h5") as rows, jax.set_mesh(mesh):
        rows.check_tokenizer(Tokenizer.load(run / "model"))
        batches = PackedBatches(rows, 1, mesh)
        each = [next(batches) for _ in range(len(rows))]
        loss = sum(float(token_loss(model, batch)) for batch in each)
        count = sum(float(batch.weight.sum()) for batch in each)
    reported = read_results(run / "results.json").figure("loss/final").value
    assert loss / count == pytest.approx(reported, rel=1e-5)


@pytest.mark.slow
def test_a_run_stopped_in_its_second_stage_goes_on_bit_for_bit(run, chats, tmp_path, monkeypatch):
    write = MetricsLog.write

    def stop(self, step, values):
        if self._path.parent.name == "stage2" and step == 4:
            raise KeyboardInterrupt
        write(self, step, values)

    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MetricsLog, "write", stop)
        finetune(folder, chats)
    assert not (folder / "results.json").exists()
    first_stage = (folder / "stage1" / "metrics.jsonl").read_text()
    (folder / "stage1" / "checkpoints" / "removed.2.partial").mkdir()  # left by a kill
    finetune(folder, chats)
    assert not [*(folder / "stage1" / "checkpoints").glob("*.partial")]
    assert (folder / "stage1" / "metrics.jsonl").read_text() == first_stage
    resumed, undisturbed = weights(folder), weights(run)
    assert resumed.keys() == undisturbed.keys()
    for name, values in undisturbed.items():
        np.testing.assert_array_equal(resumed[name], values, err_msg=name)

    with pytest.raises(ConfigError, match=r"other settings \(seed\)"):
        finetune(folder, chats, seed=1)


@pytest.mark.slow
def test_a_run_keeps_its_batches_and_losses_on_another_ring(chats, tmp_path, monkeypatch):
    write = MetricsLog.write

    def stop(self, step, values):
        write(self, step, values)
        if self._path.parent.name == "stage2" and step == 3:
            raise KeyboardInterrupt

    def losses(name: str) -> list[float]:
        logs = [tmp_path / name / f"stage{number}" / "metrics.jsonl" for number in (1, 2)]
        return [row["loss"] for log in logs for row in read_metrics(log)]

    finetune(tmp_path / "undisturbed", chats, ring=2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MetricsLog, "write", stop)
        finetune(tmp_path / "moved", chats, ring=2)
    finetune(tmp_path / "moved", chats, ring=4)
    config = read_config(tmp_path / "moved", FinetuneConfig)
    assert config.mesh == MeshShape(fsdp=2, ring=4)
    assert config.batch_rows == (4, 4), "on this ring a second stage would begin with 2 rows"
    np.testing.assert_allclose(losses("moved"), losses("undisturbed"), rtol=1e-5)
    moved, undisturbed = (read_results(tmp_path / name / "results.json") for name in ("moved", "undisturbed"))
    for when in ("loss/initial", "loss/final"):
        assert moved.figure(when).value == pytest.approx(undisturbed.figure(when).value, rel=1e-5)


@pytest.mark.slow
def test_lora_on_rows_packed_beforehand_changes_projections_alone_and_learns(run, chats, tmp_path):
    folder, folders = run / "model", []
    for length in ("64", "128"):
        folders.append(tmp_path / length)
        config = ConversationsConfig(
            (chats,), folder, length=length, template="plain", test_share=0.05, output=folders[-1]
        )
        prepare(config)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    adapted = tmp_path / "adapted"
    llama_finetune.main(LaunchOptions(output=adapted), model=folder, data=tuple(folders[::-1]), lora=4)
    assert not (adapted / "rows").exists()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    results = read_results(adapted / "results.json")
    assert results.figure("loss/final").value < results.figure("loss/initial").value < 5
    base, merged = weights(run), weights(adapted)
    changed = {name for name in base if not np.array_equal(base[name], merged[name])}
    assert changed == {name for name in base if "_proj" in name}


def test_a_length_that_no_folder_has_is_named(run):
    folders = [run / "rows" / "64", run / "rows" / "128"]
    message = r"rows of 256 tokens, but --data has rows of 64, 128; .*--length 256"
    with pytest.raises(DataError, match=message):
        given_rows(folders, [64, 256], Tokenizer.load(run / "model"))


def test_rows_of_another_tokenizer_are_refused(run, tmp_path):
    byte_level().save(tmp_path / "other")
    with pytest.raises(StoreError, match="packed with another tokenizer"):
        given_rows([run / "rows" / "64"], [64], Tokenizer.load(tmp_path / "other"))


def test_rows_without_answers_are_refused(run, tmp_path):
    tokenizer = Tokenizer.load(run / "model")
    row = PackedRow(np.ones(64, np.int32), np.zeros(64, bool), np.zeros(64, np.int32))
    for split in ("train", "test"):
        description = PackedDescription(tokenizer.digest, tokenizer.vocab_size, "plain")
        with packed_writer(tmp_path / f"{split}.h5", description, 64) as writer:
            writer.add(row)
    with pytest.raises(DataError, match=r"train\.h5 has 1 rows and no token of an answer"):
        given_rows([tmp_path], [64], tokenizer)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(run, chats, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    byte_level().save(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((run / "model" / name).read_bytes())
    with pytest.raises(DataError, match="the model's vocabulary has 300 entries"):
        finetune(tmp_path / "run", chats, model=folder)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ({"data": (Path("a"),), "conversations": (Path("b"),)}, ConfigError, "either --data"),
        ({"data": (Path("a"),)}, ConfigError, "--model"),
        ({"preset": "lwm-512k"}, ConfigError, "lwm-512k"),
        ({"lora": 8}, ConfigError, "--lora"),
        ({"lora": 0, "dry_run": True}, ConfigError, "rank is 0"),
        ({"model": EMBEDDED}, ConfigError, "nothing to train on"),
        ({"hardware": "32xA100"}, ConfigError, "add --dry-run"),
        ({"conversations": (Path("absent.json"),)}, ArgumentError, "there is no file absent.json"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, error, message, tmp_path):
    with pytest.raises(error, match=message):
        launch = {name: flags[name] for name in ("dry_run", "hardware") if name in flags}
        rest = {name: value for name, value in flags.items() if name not in launch}
        llama_finetune.main(LaunchOptions(output=tmp_path / "run", **launch), **rest)
    assert not (tmp_path / "run").exists()


def test_conversations_without_answers_are_refused(tmp_path):
    path = tmp_path / "chats.jsonl"
    turn = {"from": "human", "value": "Is anybody there at all?"}
    path.write_text(json.dumps({"conversations": [turn]}) + "\n")
    with pytest.raises(DataError, match="no conversation is left to train on"):
        llama_finetune.main(LaunchOptions(output=tmp_path / "run"), conversations=(path,))


def test_a_dry_run_counts_without_data(tmp_path, capsys):
    llama_finetune.main(LaunchOptions(dry_run=True, ring=4, output=tmp_path / "run"), lora=2)
    printed = capsys.readouterr().out
    assert "parameters          14," in printed
    assert "stage 2             4 steps of 2 rows of 128 tokens, rotary base 40,000" in printed
    assert "trained by LoRA" in printed
    assert "bytes per device" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_dry_run_prints_the_bubble_of_a_pipeline(tmp_path, capsys):
    launch = LaunchOptions(dry_run=True, stages=2, output=tmp_path / "run")
    llama_finetune.main(launch)
    printed = capsys.readouterr().out
    assert "pipeline            2 stages, 2 microbatches, bubble 33.3% of 3 ticks" in printed
    assert "bytes per device" in printed


def test_layers_that_do_not_divide_over_the_stages_are_refused(tmp_path):
    with pytest.raises(MeshError, match=r"2 layers do not divide over 4 stages; choose .* from 1, 2"):
        llama_finetune.main(LaunchOptions(stages=4, output=tmp_path / "run"))
    assert not list(tmp_path.iterdir())


def test_microbatches_take_the_place_of_accumulated_rows():
    """A batch is as large as without stages, and a stage has up to four microbatches at a time."""
    preset, mesh = PRESETS["prolong-512k"], make_mesh(MeshShape(stage=4, ring=2))
    for stage in preset.stages:
        training = preset.training(stage, mesh, seed=3)
        rows = training.batch_size // 4
        assert training.batch_size * stage.context == stage.batch_tokens
        assert rows // training.optimizer.accumulation == min(rows, 4)


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.frugal])
def test_a_recipes_batches_have_the_tokens_it_names(name):
    preset = PRESETS[name]
    mesh = make_mesh(MeshShape(fsdp=2, ring=4))
    for stage in preset.stages:
        training = preset.training(stage, mesh, seed=3)
        assert training.batch_size * stage.context == max(stage.batch_tokens, 2 * stage.context)
        assert training.optimizer.accumulation == training.batch_size // 2
        assert training.steps == stage.steps


def test_a_frugal_stage_drops_the_models_scaling_and_works_in_parts():
    preset = PRESETS["prolong-512k"]
    base = preset.shape.llama(dtype="bfloat16")
    mesh = make_mesh(MeshShape(ring=8))
    config = preset.model(base, preset.stages[1], mesh)
    stack = config.transformer
    assert (stack.rope_theta, stack.rope_scaling, stack.remat) == (1.28e8, None, "full")
    assert (stack.ffn_chunk, stack.head_groups, stack.attention_strategy) == (2048, 8, "ring")
