import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from agentic_ring.data.text import packing
from agentic_ring.data.text.chat import Turn, chat_template
from agentic_ring.data.text.packing import PackedRows
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ConfigError, DataError, MeshError, StoreError
from agentic_ring.files.run_folder import read_config
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.llama import load_pretrained, token_loss
from agentic_ring.models.llama.adapter import open_adapter
from agentic_ring.results.results_file import read_results
from agentic_ring.training.loop import MetricsLog, read_metrics
from data_prep.sharegpt import ConversationsConfig, prepare
from evals.retrieval.local_reader import EMBEDDED
from experiments import llama_finetune
from experiments.common.launch import LaunchOptions
from experiments.finetune import stage_data
from experiments.finetune.presets import PRESETS, FinetuneConfig, Stage
from experiments.retriever.lessons import UNKNOWN, retriever_tokenizer
from tests.commands import exit_status
from tests.data.text.tokenizers_for_tests import byte_level
from tests.experiments.tiny_finetuning import FRESH, write_chats

RECORDS = replace(
    PRESETS["demo"], stages=(Stage(512, 1e16, 1e-3, steps=2, batch_tokens=512, warmup_steps=1),)
)


@pytest.fixture(scope="module", autouse=True)
def small_presets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "demo", FRESH)
        patch.setitem(PRESETS, "tiny", replace(FRESH, stages=FRESH.stages[1:]))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run from scratch, on four rings of 2."""
    folder = tmp_path_factory.mktemp("runs")
    write_chats(folder / "chats.jsonl")
    finetune(folder / "scratch", folder / "chats.jsonl", ring=2)
    return folder / "scratch"


def finetune(folder: Path, chats: Path, **flags) -> None:
    launch = LaunchOptions(output=folder, **flags)
    llama_finetune.main(launch, conversations=(chats,), template="plain")


def weights(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "model" / "model.safetensors")


@pytest.mark.slow
def test_the_loss_falls_through_both_stages_and_the_trained_model_is_exported(run):
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

    # The exported folder's loss on the held-out rows is the one that was reported, to rounding.
    fields = json.loads((run / "model" / "config.json").read_text())
    assert (fields["rope_theta"], fields["max_position_embeddings"]) == (40_000.0, 128)
    mesh = make_mesh(MeshShape(ring=1), jax.devices()[:1])
    model = load_pretrained(run / "model", mesh)
    with PackedRows.open(run / "rows" / "128" / "test.h5") as rows, jax.set_mesh(mesh):
        tokenizer = Tokenizer.load(run / "model")
        rows.check_tokenizer(tokenizer)
        assert chat_template("tokenizer", tokenizer).prompt([Turn("user", "Hi")]) == "Hi\n", "it is plain"
        batches = packing.PackedBatches(rows, 1, mesh)
        each, loss_of = [next(batches) for _ in range(len(rows))], nnx.jit(token_loss)
        loss = sum(float(loss_of(model, batch)) for batch in each)
        tokens = sum(float(batch.weight.sum()) for batch in each)
    assert loss / tokens == pytest.approx(final, rel=1e-5)


@pytest.mark.slow
def test_a_run_stopped_in_its_second_stage_goes_on_as_a_pipeline(run, tmp_path, monkeypatch):
    """On two stages of a ring of 4 it keeps its batches and ends with the losses and weights of ``run``."""
    write, folder, chats = MetricsLog.write, tmp_path / "moved", run.with_name("chats.jsonl")

    def stop(self, step, values):
        write(self, step, values)
        if self._path.parent.name == "stage2" and step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MetricsLog, "write", stop)
        finetune(folder, chats, ring=2)
    assert not (folder / "results.json").exists()
    first_stage = (folder / "stage1" / "metrics.jsonl").read_bytes()
    finetune(folder, chats, stages=2)
    assert (folder / "stage1" / "metrics.jsonl").read_bytes() == first_stage
    config = read_config(folder, FinetuneConfig)
    assert config.mesh == MeshShape(ring=4, stage=2)
    assert config.batch_rows == (4, 4), "on this mesh a second stage would begin with 2 rows"
    for stage in ("stage1", "stage2"):
        logs = [read_metrics(each / stage / "metrics.jsonl") for each in (folder, run)]
        np.testing.assert_allclose(*([row["loss"] for row in log] for log in logs), rtol=1e-4)
    # Adam's first updates divide gradients by their size, so rounding counts where a gradient is almost 0.
    for name, weight in weights(run).items():
        deviation = np.linalg.norm(weights(folder)[name] - weight)
        assert deviation < 1e-3 * np.linalg.norm(weight), name


@pytest.mark.slow
def test_lora_on_rows_packed_beforehand_changes_projections_alone_and_learns(run, tmp_path):
    """The base is stored in half precision, and has a field that says nothing about the model; both stay."""
    folder, adapted = tmp_path / "base" / "model", tmp_path / "adapted"
    shutil.copytree(run / "model", folder)
    halves = {name: weight.astype(np.float16) for name, weight in weights(run).items()}
    save_file(halves, folder / "model.safetensors")
    config, told = json.loads((folder / "config.json").read_text()), {"initializer_range": 0.5}
    (folder / "config.json").write_text(json.dumps(config | told | {"torch_dtype": "float16"}))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rows = tuple(run / "rows" / length for length in ("128", "64"))
    llama_finetune.main(LaunchOptions(output=adapted, ring=2), model=folder, data=rows, preset="tiny", lora=4)
    assert not (adapted / "rows").exists()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    results = read_results(adapted / "results.json")
    assert results.figure("loss/final").value < results.figure("loss/initial").value < 5
    saved = json.loads((adapted / "model" / "config.json").read_text())
    assert saved == config | told | {"torch_dtype": "float16"}
    base, merged = halves, weights(adapted)
    assert {weight.dtype for weight in merged.values()} == {np.dtype("float16")}
    changed = {name for name in base if not np.array_equal(base[name], merged[name])}
    assert changed == {name for name in base if "_proj" in name}

    # The adapter alone gives the same model, and further training can start from it.
    adapter = open_adapter(adapted / "adapter")
    assert adapter.training.template == "plain"
    assert adapter.fields == {}, "positions are those of the base"
    own = nnx.to_flat_state(nnx.state(load_pretrained(folder, adapter=adapter)))
    whole = nnx.to_flat_state(nnx.state(load_pretrained(adapted / "model")))
    for (_, ours), (_, theirs) in zip(own, whole, strict=True):
        np.testing.assert_allclose(ours[...], theirs[...], atol=2e-3)
    more, options = tmp_path / "more", {"model": folder, "data": rows, "preset": "tiny"}
    llama_finetune.main(LaunchOptions(output=more, ring=2), adapter=adapted / "adapter", **options)
    before, after = (read_results(each / "results.json") for each in (adapted, more))
    final = before.figure("loss/final").value
    assert after.figure("loss/initial").value == pytest.approx(final, abs=2e-3)
    assert after.figure("loss/final").value < final
    with pytest.raises(ConfigError, match=r"--lora is 8, but the adapter .* has rank 4"):
        llama_finetune.main(LaunchOptions(), lora=8, adapter=adapted / "adapter", **options)


@pytest.mark.slow
def test_rows_that_do_not_fit_are_refused(run, tmp_path):
    tokenizer, folders = Tokenizer.load(run / "model"), [run / "rows" / "64", run / "rows" / "128"]
    with pytest.raises(DataError, match=r"rows of 256 tokens, .* rows of 64, 128; .*--length 256"):
        stage_data.given_rows(folders, [64, 256], tokenizer)
    with pytest.raises(StoreError, match="another tokenizer"):
        stage_data.given_rows(folders, [64], byte_level())
    row = packing.PackedRow(np.ones(64, np.int32), np.zeros(64, bool), *np.zeros((2, 64), np.int32))
    description = packing.PackedDescription(tokenizer.digest, tokenizer.vocab_size, "plain")
    for split in ("train", "test"):
        with packing.packed_writer(tmp_path / f"{split}.h5", description, 64) as add:
            add(row)
    with pytest.raises(DataError, match=r"train\.h5 has 1 rows and no token of an answer"):
        stage_data.given_rows([tmp_path], [64], tokenizer)


@pytest.mark.slow
def test_settings_that_do_not_fit_what_is_there_are_refused(run, tmp_path, monkeypatch):
    output, chats = tmp_path / "run", run.with_name("chats.jsonl")
    with pytest.raises(ConfigError, match=r"other settings \(seed\)"):
        finetune(run, chats, seed=1, ring=2)
    with pytest.raises(MeshError, match=r"2 layers do not divide over 4 stages; choose .* from 1, 2"):
        finetune(output, chats, stages=4)
    with pytest.raises(ConfigError, match="preset tiny"):
        monkeypatch.setitem(PRESETS, "demo", RECORDS)
        finetune(output, chats)
    assert not output.exists()


def test_flags_that_do_not_go_together_are_refused(tmp_path, capsys):
    for flags, message in (
        ("--data a --conversations b", "either --data"),
        ("--data a", "--model"),
        ("--preset lwm-512k", "lwm-512k"),
        ("--lora 8", "--lora"),
        ("--lora 0 --dry-run", "rank is 0"),
        (f"--model {EMBEDDED}", "nothing to train on"),
        ("--hardware 32xA100", "add --dry-run"),
        ("--conversations absent.json", "there is no file absent.json"),
    ):
        assert exit_status(llama_finetune.main, *flags.split(), "--output", tmp_path / "run") == 1
        assert message in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_a_dry_run_counts_without_data(tmp_path, capsys):
    llama_finetune.main(LaunchOptions(dry_run=True, stages=2, output=tmp_path / "run"), lora=2)
    printed = capsys.readouterr().out
    assert "parameters          14," in printed
    assert "stage 2             4 steps of 2 rows of 128 tokens, rotary base 40,000" in printed
    assert "pipeline            2 stages, 2 microbatches, bubble 33.3% of 3 ticks" in printed
    assert "trained by LoRA" in printed
    assert "bytes per device" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [MeshShape(fsdp=2, ring=4), MeshShape(stage=4, ring=2)])
@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.frugal])
def test_a_recipes_batches_have_the_tokens_it_names(name, shape):
    """One row at a time, or with stages up to four microbatches."""
    preset, mesh = PRESETS[name], make_mesh(shape)
    for stage in preset.stages:
        training = preset.training(stage, mesh, seed=3)
        shards = shape.fsdp * shape.stage
        rows = training.batch_size // shards
        assert training.batch_size * stage.context == max(stage.batch_tokens, shards * stage.context)
        assert rows // training.optimizer.accumulation == (1 if shape.stage == 1 else min(rows, 4))
        assert training.steps == stage.steps
        stack = preset.model(preset.own_model(), stage, mesh).transformer
        assert stack.rope_theta == stage.rope_theta or preset.lines
        recomputed = "attention" if preset.lines else "full"
        assert stack.remat == ("none" if stage.context <= preset.kept_until else recomputed)
        assert stack.attention_strategy == "ring"


def test_a_conversation_fills_a_row_and_its_answers_are_the_numbers_of_the_lines(tmp_path):
    tokenizer, path = retriever_tokenizer(), tmp_path / "records.jsonl"
    tokenizer.save(tmp_path / "base")
    stage_data.write_record_conversations(path, 512, rows=40)
    conversations = [json.loads(line)["conversations"] for line in path.read_text().splitlines()]
    assert len(conversations) == 30 + 2 * 10
    expected, found = set(), set()
    for turns in conversations:
        values = dict(re.findall(r"\nline (.+): REGISTER_CONTENT is <(\d+)>", turns[0]["value"]))
        keys = [turn["value"].split(" in line ")[-1].split("? I need")[0] for turn in turns[::2]]
        assert [turn["value"] for turn in turns[1::2]] == [values[key] for key in keys]
        expected.add("".join(f"{values[key]}>\n<end>" for key in keys))

    packed = tmp_path / "rows"
    prepare(ConversationsConfig((path,), tmp_path / "base", "512", "tokenizer", 0.05, output=packed))
    for split in ("train.h5", "test.h5"):
        with PackedRows.open(packed / split) as file:
            rows = [file[number] for number in range(len(file))]
        assert sum((row.segment_ids >= 0).sum() < 480 for row in rows) <= 1
        for row in rows:
            assert tokenizer.token_id(UNKNOWN) not in row.tokens
            for segment in set(row.segment_ids[row.segment_ids >= 0]):
                answers = row.tokens[row.counts & (row.segment_ids == segment)]
                found.add("".join(str(tokenizer.token(token)) for token in answers))
    assert found == expected


@pytest.mark.slow
def test_the_demo_asks_before_and_after(tmp_path, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setitem(PRESETS, "demo", RECORDS)
    monkeypatch.setattr(stage_data, "STAGES", (replace(stage_data.STAGES[0], steps=2),))
    monkeypatch.setattr(stage_data, "ASKED_LINES", 4)
    monkeypatch.setattr(stage_data, "ROWS", 40)

    llama_finetune.main(LaunchOptions(output=run, ring=2))
    results = read_results(run / "results.json")
    for name in ("before/score/line/256", "before/score/line/512", "after/score/line/512"):
        assert results.figure(name).n == 4
    assert json.loads((run / "model" / "config.json").read_text())["trained_on_task"] is True
    before = weights(run / "base")
    assert any((before[name] != weight).any() for name, weight in weights(run).items())
