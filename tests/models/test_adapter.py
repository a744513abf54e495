"""LoRA adapters in files: what peft's formula gives, what they change of a base, and what is refused."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentic_ring.errors import ConfigError, DataError
from agentic_ring.inference.named_model import NamedModel
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.llama import load_pretrained
from agentic_ring.models.llama.adapter import (
    CONFIG,
    WEIGHTS,
    AdapterTraining,
    base_digest,
    open_adapter,
    save_adapter,
)
from agentic_ring.models.llama.config_file import read_config, usable_context
from agentic_ring.models.llama.tensor_files import open_tensors
from agentic_ring.models.lora import LoraConfig, LoraModel
from agentic_ring.models.transformer_config import YarnScaling
from tests.models import llama_cases
from tests.models.llama_cases import write_model
from tests.models.tiny_llama import tiny_tokenizer

LORA = LoraConfig(3, scale=1.5)
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def written(base, tmp_path_factory) -> Path:
    """An adapter of the base, as after training: neither A nor B is zero."""
    folder, config = tmp_path_factory.mktemp("adapter"), read_config(base)
    shapes = LoraModel(config, LORA, "float32").abstract_params()
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))
    params = jax.tree.map(lambda leaf: 0.2 * jax.random.normal(next(keys), leaf.shape), shapes)
    training = AdapterTraining(
        {"rope_scaling": YARN, "max_position_embeddings": 64}, "plain", base_digest(open_tensors(base))
    )
    save_adapter(params, config, LORA, folder, "some/base", training)
    return folder


@pytest.fixture
def changed(written, tmp_path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(written, tmp_path / "changed")


def test_a_merged_adapter_is_what_peft_adds_to_each_matrix(base, written, tmp_path):
    """On two rings of 2; B A alpha / r is added to the tensors as Hugging Face stores them."""
    fields, matrices = json.loads((written / CONFIG).read_text()), load_file(written / WEIGHTS)
    assert fields["lora_alpha"] / fields["r"] == 1.5
    assert fields["base_model_name_or_path"] == "some/base"
    assert len(fields["target_modules"]) == 7
    tensors = load_file(base / "model.safetensors")
    for name, a in matrices.items():
        if "lora_A" in name:
            b = matrices[name.replace("lora_A", "lora_B")].astype(np.float32)
            stored = name.removeprefix("base_model.model.").replace("lora_A.", "")
            tensors[stored] = tensors[stored] + 1.5 * b @ a.astype(np.float32)
    merged = tmp_path / "merged"
    shutil.copytree(base, merged)
    save_file(tensors, merged / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    (merged / "config.json").write_text(
        json.dumps(config | {"rope_scaling": YARN, "max_position_embeddings": 64})
    )
    mesh = make_mesh(MeshShape(fsdp=2, ring=2), jax.devices()[:4])
    tokens = llama_cases.tokens()[:, :64]
    with jax.set_mesh(mesh):
        ours, expected = (
            np.asarray(
                jax.jit(lambda model: model(tokens))(load_pretrained(*given, mesh=mesh, adapter=adapter))
            )
            for given, adapter in (((base,), written), ((merged,), None))
        )
    np.testing.assert_allclose(ours, expected, atol=1e-4 * expected.std())
    assert read_config(base, adapter=open_adapter(written)).transformer.rope_scaling == YarnScaling(2.0, 32)
    with pytest.raises(ConfigError, match="made for 32"):
        usable_context(base, 64, allow_extrapolation=False)
    assert usable_context(base, 64, False, open_adapter(written)) == 64


def test_an_adapter_of_some_matrices_leaves_the_others(base, changed):
    """As peft writes them: with rank-stabilised scale, and nothing of ours beside it."""
    matrices = load_file(changed / WEIGHTS)
    save_file({name: each for name, each in matrices.items() if "q_proj" in name}, changed / WEIGHTS)
    fields = json.loads((changed / CONFIG).read_text()) | {"use_rslora": True, "peft_version": "0.18"}
    (changed / CONFIG).write_text(json.dumps(fields))
    (changed / "adapter_training.json").unlink()
    adapter = open_adapter(changed)
    assert adapter.lora.scale == pytest.approx(4.5 / np.sqrt(3))
    plain, adapted = (load_pretrained(base, adapter=each) for each in (None, adapter))
    blocks = plain.transformer.blocks.attention, adapted.transformer.blocks.attention
    assert not np.array_equal(*(each.query[...] for each in blocks))
    for name in ("key", "value", "output"):
        np.testing.assert_array_equal(*(getattr(each, name)[...] for each in blocks))


def test_flags_name_a_model_and_the_adapter_on_it(base, written):
    plain, adapted = NamedModel.find(base), NamedModel.find(base, written)
    assert (plain.name, adapted.name) == (base.name, f"{base.name}+{written.name}")
    assert (plain.context(None, False), adapted.context(None, False)) == (32, 64)
    tokenizer = tiny_tokenizer()
    assert (plain.template(tokenizer), adapted.template(tokenizer)) == ("tokenizer", "plain")


def _without(name):
    def change(folder):
        matrices = load_file(folder / WEIGHTS)
        del matrices[name]
        save_file(matrices, folder / WEIGHTS)

    return change


def _with(name, tensor):
    return lambda folder: save_file(load_file(folder / WEIGHTS) | {name: tensor}, folder / WEIGHTS)


def _field(**fields):
    def change(folder):
        path = folder / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def _pickled(folder):
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def _cut(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(NAME), r"q_proj\.lora_A\.weight of the adapter .* has shape None"),
        (_with(NAME, np.zeros((3, 8), np.float16)), r"shape \[3, 8\]; by the model it should be \[3, 32\]"),
        (_with("base_model.model.lm_head.lora_A.weight", np.zeros((3, 32), np.float16)), "lm_head"),
        (_field(use_dora=True), r"use_dora True, which is not supported; merge"),
        (_field(bias="all"), "bias 'all'"),
        (_field(peft_type="IA3"), "peft_type = 'IA3'"),
        (_field(r=4), r"has shape \[3, 32\]; by the model it should be \[4, 32\]"),
        (_pickled, r"only pickled weights \(adapter_model\.bin\)"),
        (_cut, "cannot be read as safetensors"),
        (lambda folder: (folder / CONFIG).unlink(), "does not exist"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(base, changed, change, message):
    change(changed)
    with pytest.raises(DataError, match=message):
        load_pretrained(base, adapter=changed)


def test_an_adapter_of_another_base_or_family_is_refused(base, changed, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(DataError, match="was trained on another model than"):
        load_pretrained(other, adapter=changed)
    with pytest.raises(DataError, match="there is no adapter absent"):
        open_adapter("absent")
    (changed / "adapter_training.json").unlink()  # so that the base is not known
    with pytest.raises(ConfigError, match=r"adapters of phi3 are not supported"):
        load_pretrained(write_model(tmp_path / "phi3", "phi3"), adapter=changed)
