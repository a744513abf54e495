"""Models from Hugging Face folders compute the logits of transformers on any mesh and are saved unchanged."""

import dataclasses
import json
import resource
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentic_ring.errors import AgenticRingError, ArgumentError, DataError, UnknownNameError
from agentic_ring.mesh import MeshShape, make_mesh, mesh_on_first_devices
from agentic_ring.models.llama import Llama, TokenBatch, load_pretrained, pretrained, save_pretrained
from agentic_ring.models.llama.config_file import read_config
from agentic_ring.models.rotary import inverse_frequencies
from tests.models.llama_cases import (
    CASES,
    FAMILIES,
    LENGTH,
    config_json,
    family,
    logits,
    tokens,
    weights,
    write_model,
)

TOLERANCE = 1e-4
"""Of float32 logits, whose standard deviation is about 1.8."""


def load(folder: Path, **arguments) -> Llama:
    # Only dynamic scaling depends on the context in use.
    return load_pretrained(folder, context=LENGTH, **arguments)


def compute(model: Llama, mesh=None) -> np.ndarray:
    call = jax.jit(lambda model, tokens: model(tokens))
    with jax.default_matmul_precision("highest"), jax.set_mesh(mesh) if mesh else nullcontext():
        return np.asarray(call(model, tokens()))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, tmp_path):
    np.testing.assert_allclose(compute(load(write_model(tmp_path, case))), logits(case), atol=TOLERANCE)


@pytest.mark.parametrize(
    "shape",
    [*(MeshShape(ring=ring) for ring in (1, 2, 4, 8)), MeshShape(fsdp=2, ring=2, tensor=2)],
    ids=str,
)
@pytest.mark.parametrize("case", ["two_key_heads", "tied", "llama3"])
def test_logits_do_not_change_with_the_mesh(case, shape, tmp_path):
    mesh = mesh_on_first_devices(shape)
    model = load(write_model(tmp_path, case), mesh=mesh)
    np.testing.assert_allclose(compute(model, mesh), logits(case), atol=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_families_do_not_change_on_a_mesh_of_every_axis(name, tmp_path):
    mesh = mesh_on_first_devices(MeshShape(fsdp=2, ring=2, tensor=2))
    model = load(write_model(tmp_path, name), mesh=mesh)
    np.testing.assert_allclose(compute(model, mesh), logits(name), atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("ring", [2, 4, 8])
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(FAMILIES)])
def test_logits_of_families_do_not_change_with_the_ring(case, ring, tmp_path):
    mesh = mesh_on_first_devices(MeshShape(ring=ring))
    model = load(write_model(tmp_path, case), mesh=mesh)
    np.testing.assert_allclose(compute(model, mesh), logits(case), atol=TOLERANCE)


def test_a_window_that_the_file_leaves_out_is_the_familys(tmp_path):
    def window(**changes) -> int | None:
        folder = write_model(tmp_path, "mistral", **changes)
        fields = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v != "absent"}))
        return load(folder).config.transformer.window

    assert window() == 20
    assert window(sliding_window=None) is None
    assert window(sliding_window="absent") == 4096


def test_a_window_that_a_family_does_not_use_and_null_key_heads_are_read_as_transformers_does(tmp_path):
    fields = {"num_key_value_heads": None, "sliding_window": 20, "layer_types": ["full_attention"] * 2}
    stack = read_config(write_model(tmp_path, "qwen2", **fields)).transformer
    assert (stack.key_value_heads, stack.window) == (stack.heads, None)


def interleaved(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a head in the order of Meta's own files: pairs side by side."""
    by_half = tensor.reshape(-1, 2, head_dim // 2, tensor.shape[1])
    return np.ascontiguousarray(by_half.swapaxes(1, 2).reshape(tensor.shape))


def regrouped(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    """Query heads in the order that takes key head n mod K for query head n."""
    by_group = tensor.reshape(2, 2, head_dim, tensor.shape[1])
    return np.ascontiguousarray(by_group.swapaxes(0, 1).reshape(tensor.shape))


@pytest.mark.parametrize("mistake", [interleaved, regrouped])
def test_a_wrong_order_of_heads_changes_the_logits(mistake, tmp_path):
    folder = write_model(tmp_path)
    changed = {
        name: mistake(tensor, 8)
        if "q_proj" in name or ("k_proj" in name and mistake is interleaved)
        else tensor
        for name, tensor in weights("two_key_heads").items()
    }
    save_file(changed, folder / "model.safetensors")
    assert np.abs(compute(load(folder)) - logits("two_key_heads")).max() > 1


@pytest.mark.parametrize("case", CASES)
def test_saved_again_every_tensor_and_the_configuration_are_the_same(case, tmp_path):
    model = load_pretrained(write_model(tmp_path / "from", case))
    save_pretrained(model, tmp_path / "to")
    kept, wanted = load_file(tmp_path / "to" / "model.safetensors"), weights(case)
    assert kept.keys() == wanted.keys()
    for name, tensor in kept.items():
        np.testing.assert_array_equal(tensor, wanted[name], err_msg=name)
    assert load_pretrained(tmp_path / "to").config == model.config


IDS = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}


@pytest.mark.parametrize("case", CASES)
def test_every_field_of_the_configuration_is_saved(case, tmp_path):
    context = 32 if case == "dynamic" else 131_072
    fields = {**config_json(case), **IDS, "max_position_embeddings": context}
    save_pretrained(load_pretrained(write_model(tmp_path / "from", case, **fields)), tmp_path / "to")
    saved = json.loads((tmp_path / "to" / "config.json").read_text())
    scaling = fields.pop("rope_scaling", {})
    assert {name: saved[name] for name in fields} == fields
    assert {name: saved["rope_scaling"][name] for name in scaling} == scaling
    one = load_pretrained(write_model(tmp_path / "one", case, eos_token_id=2))
    assert one.config.eos_token_id == 2


def rotated(config: dict, length: int, head_dim: int) -> np.ndarray:
    """Inverse frequencies that transformers computes for a text of this length (modeling_rope_utils.py)."""
    scaling, base, known = config["rope_scaling"], config["rope_theta"], config["max_position_embeddings"]
    if scaling is not None:
        assert scaling["rope_type"] == "dynamic"
        longer = scaling["factor"] * max(length, known) / known - (scaling["factor"] - 1)
        base = base * longer ** (head_dim / (head_dim - 2))
    return 1.0 / base ** (np.arange(0, head_dim, 2) / head_dim)


@pytest.mark.parametrize(("context", "lengths"), [(None, (1, 32)), (200, (1, 32, 64, 200, 300))])
def test_dynamic_scaling_is_saved_as_transformers_computes_it(context, lengths, tmp_path):
    model = load_pretrained(write_model(tmp_path / "from", "dynamic"), context=context)
    save_pretrained(model, tmp_path / "to")
    saved, stack = json.loads((tmp_path / "to" / "config.json").read_text()), model.config.transformer
    ours = inverse_frequencies(stack.rope_theta, stack.head_dim, stack.rope_scaling)
    for length in lengths:
        np.testing.assert_allclose(rotated(saved, length, stack.head_dim), ours, rtol=1e-12)
    assert saved["max_position_embeddings"] == max(lengths[1], context or 0)
    again = load_pretrained(tmp_path / "to").config.transformer
    assert inverse_frequencies(again.rope_theta, again.head_dim, again.rope_scaling).tolist() == ours.tolist()


def test_dynamic_scaling_for_another_context_is_refused(tmp_path):
    model = load_pretrained(write_model(tmp_path / "from", "dynamic"), context=200)
    with pytest.raises(ArgumentError, match=r"300 tokens, but dynamic .* 200; .* load_pretrained"):
        save_pretrained(model, tmp_path / "to", context=300)
    assert not (tmp_path / "to").exists()
    scaling = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16}
    with pytest.raises(DataError, match=r"original_max_position_embeddings 16, but .* 32"):
        load_pretrained(write_model(tmp_path / "other", rope_scaling=scaling))


def test_a_model_on_a_mesh_is_saved_in_several_files_and_read_from_them(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "SHARD_BYTES", 20_000)
    model = load(write_model(tmp_path / "from"), mesh=make_mesh(MeshShape(fsdp=2, ring=4)))
    save_pretrained(model, tmp_path / "to")
    index = json.loads((tmp_path / "to" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    np.testing.assert_allclose(compute(load(tmp_path / "to")), logits("two_key_heads"), atol=TOLERANCE)


@pytest.mark.parametrize("sizes", [(20_000, 10**9), (10**9, 20_000)], ids=["fewer files", "more files"])
def test_a_model_saved_over_another_one_replaces_it(sizes, tmp_path, monkeypatch):
    old = load(write_model(tmp_path / "from"))
    new = jax.tree.map(lambda x: 2 * x, old)
    for model, size in zip((old, new), sizes, strict=True):
        monkeypatch.setattr(pretrained, "SHARD_BYTES", size)
        save_pretrained(model, tmp_path / "to")
    again = load(tmp_path / "to")
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again), jax.tree.leaves(new))


def test_weights_that_the_disk_refuses_are_an_error_that_names_them(tmp_path):
    model = load(write_model(tmp_path / "model"))
    save_pretrained(model, tmp_path / "saved")
    whole = (tmp_path / "saved" / "model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*saved/model\.safetensors"):
            save_pretrained(model, tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "saved" / "model.safetensors").read_bytes() == whole
    assert {path.name for path in tmp_path.iterdir()} == {"model", "saved"}


def test_weights_are_stored_and_used_in_the_requested_dtype(tmp_path):
    model = load(write_model(tmp_path), dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model)} == {"bfloat16"}
    assert model.config.transformer.dtype == "bfloat16"
    error = np.abs(compute(model) - logits("two_key_heads"))
    assert 1e-3 < error.mean() < 0.1
    save_pretrained(model, tmp_path / "to")
    np.testing.assert_array_equal(compute(load(tmp_path / "to")), compute(model))


def test_every_device_reads_only_its_own_part(tmp_path, monkeypatch):
    read = []
    whole = pretrained.TensorFiles.read

    def recorded(self, name, index):
        part = whole(self, name, index)
        read.append(part.nbytes)
        return part

    monkeypatch.setattr(pretrained.TensorFiles, "read", recorded)
    load(write_model(tmp_path), mesh=make_mesh(MeshShape(fsdp=8, ring=1)))
    largest = max(tensor.nbytes for tensor in weights("two_key_heads").values())
    assert max(read) <= largest / 8


def test_local_and_global_layers_by_old_and_new_names_are_equivalent(tmp_path):
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = {"rope_parameters": rope, "rope_scaling": None, "rope_theta": None, "rope_local_base_freq": None}
    old = {"layer_types": None, "sliding_window_pattern": 3}
    folders = [write_model(tmp_path / str(n), "gemma3_text", **c) for n, c in enumerate(({}, new, old))]
    configs = [load(folder).config for folder in folders]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].transformer.global_every == 3


OLD_AND_NEW = [
    (
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    (
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    (
        CASES["llama3"],
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, **CASES["llama3"]["rope_scaling"]}},
    ),
]


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW)
def test_old_and_new_names_of_rotary_settings_are_equivalent(old, new, tmp_path):
    configs = [load(write_model(tmp_path / str(n), **changes)).config for n, changes in enumerate((old, new))]
    assert configs[0] == configs[1]


def test_a_model_with_own_parts_is_refused_by_name_elsewhere(tmp_path):
    own = {"model_type": "agentic_ring_llama", "architectures": ["AgenticRingLlamaForCausalLM"]}
    model = load(write_model(tmp_path, **own, query_scaling={"floor": 8, "scale": 0.1}))
    assert np.abs(compute(model) - logits("two_key_heads"))[:, 16:].max() > 0.1
    save_pretrained(model, tmp_path / "to")
    assert json.loads((tmp_path / "to" / "config.json").read_text())["model_type"] == "agentic_ring_llama"
    assert load(tmp_path / "to").config == model.config


def setting(without: str = "", **changes):
    fields = {**config_json("two_key_heads"), **changes}
    fields.pop(without, None)
    return lambda folder: (folder / "config.json").write_text(json.dumps(fields))


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop_tensor(folder: Path) -> None:
    tensors = weights("two_key_heads")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def integers(folder: Path) -> None:
    tensors = weights("two_key_heads")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    save_file(tensors, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def missing_shard(folder: Path) -> None:
    placed = dict.fromkeys(weights("two_key_heads"), "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json does not exist; give the folder"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
        (setting(without="hidden_size"), "has no hidden_size"),
        (setting(model_type="mamba"), "unknown model_type in .* 'mamba'; choose one of: llama"),
        (setting(rope_scaling={"rope_type": "longrope"}), "unknown rope_type 'longrope'"),
        (setting(rope_scaling={"rope_type": "linear"}), "has no factor"),
        (setting(attention_bias=True), "attention_bias True; of LLaMA only models with False are supported"),
        (
            setting(model_type="qwen2"),
            "model_type 'qwen2', but its architecture is 'LlamaForCausalLM'",
        ),
        (
            setting(**family("qwen2", "Qwen2"), use_sliding_window=True),
            "use_sliding_window True; of Qwen2 only models with False",
        ),
        (
            setting(**family("phi3", "Phi3"), partial_rotary_factor=0.75),
            r"partial_rotary_factor 0.75; of Phi-3 only models with 1.0",
        ),
        (
            setting(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.75}),
            r"partial_rotary_factor 0.75; of LLaMA only models with 1.0",
        ),
        (
            setting(**family("phi3", "Phi3"), rope_scaling={"type": "yarn", "factor": 2.0}),
            "rope_type 'yarn'; of Phi-3 only models with 'default'",
        ),
        (
            setting(**CASES["gemma3_text"], without="num_hidden_layers"),
            "has no num_hidden_layers, which a Gemma",
        ),
        (setting(**{**CASES["gemma3_text"], "num_hidden_layers": 8}), "has 8 layers, but 7 layer_types"),
        (
            setting(**family("qwen2", "Qwen2"), sliding_window=20, layer_types=["sliding_attention"] * 2),
            "layers of the type 'sliding_attention'; of Qwen2 only models with 'full_attention'",
        ),
        (
            setting(**family("mistral", "Mistral"), query_scaling={"floor": 8, "scale": 0.1}),
            "query_scaling is .*, but models of the family 'mistral' have None",
        ),
        (
            setting(**family("mistral", "Mistral"), layer_types=["sliding_attention", "full_attention"]),
            "layers of the type 'full_attention'; of Mistral only models with 'sliding_attention' in all",
        ),
        (
            setting(**{**CASES["gemma2"], "layer_types": ["full_attention", "sliding_attention"]}),
            r"global layers that are not every 1th one \(layer_types\); of Gemma 2 only",
        ),
        (
            setting(**{**CASES["gemma2"], "sliding_window": None}),
            "global_every is 2, but local layers need a window",
        ),
        (
            setting(**{**CASES["gemma3_text"], "attn_logit_softcapping": 50.0}),
            "attn_logit_softcapping 50.0; of Gemma 3 only models with None",
        ),
        (
            setting(rope_parameters={"full_attention": {"rope_theta": 1e6}}),
            "rotary positions of layers with a window are not supported",
        ),
        (setting(model_type="gemma3"), "unknown model_type in .* 'gemma3'; choose .* gemma2, gemma3_text"),
        (
            setting(**family("qwen3", "Qwen3")),
            "4 tensors are missing, such as model.layers.0.self_attn.k_",
        ),
        (setting(hidden_act="gelu"), "hidden_act 'gelu'; of LLaMA only models with 'silu'"),
        (setting(torch_dtype="int4"), "unknown dtype 'int4'; choose one of: float32"),
        (setting(num_key_value_heads=3), "kv_heads 3 does not divide heads 4"),
        (
            setting(intermediate_size=40),
            r"mlp.gate_proj.weight has shape \[48, 32\]; .* should be \[40, 32\]",
        ),
        (setting(num_hidden_layers=1), "9 tensors are unknown, such as model.layers.1"),
        (truncate, "cannot be read as safetensors: .* It may be cut short"),
        (drop_tensor, "1 tensors are missing, such as model.layers.1.mlp.up_proj.weight"),
        (integers, "lm_head.weight in .* is stored as I8; only F32, F16, BF16"),
        (pickled, "only pickled weights .pytorch_model.bin.*convert them"),
        (missing_shard, "model-00001-of-00002.safetensors does not exist, though"),
    ],
)
def test_errors_name_the_fault_of_a_folder(damage, message, tmp_path):
    damage(write_model(tmp_path))
    with pytest.raises(AgenticRingError, match=message):
        load_pretrained(tmp_path)


def test_kinds_of_failure_are_typed(tmp_path):
    with pytest.raises(DataError):
        load_pretrained(tmp_path / "nowhere")
    with pytest.raises(UnknownNameError):
        load_pretrained(write_model(tmp_path, model_type="gpt2"))


def test_computing_in_chunks_of_the_vocabulary_pass_gives_the_logits(tmp_path):
    """The loss of training and the logits of inference agree."""
    model = load(write_model(tmp_path, "tied"))
    targets, place = np.roll(tokens(), -1, axis=1), np.arange(LENGTH, dtype=np.int32)[None]
    batch = TokenBatch(tokens(), targets, np.ones(targets.shape, np.float32), place, None, None)
    for chunk in (None, 16):
        model.config = dataclasses.replace(model.config, loss_chunk=chunk)
        found = jax.jit(Llama.cross_entropy)(model, batch)
        expected = jax.nn.log_softmax(logits("tied"))
        of_target = np.take_along_axis(np.asarray(expected), targets[..., None], -1)[..., 0]
        np.testing.assert_allclose(found, -of_target, atol=1e-4)
