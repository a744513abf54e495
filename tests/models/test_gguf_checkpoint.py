"""A GGUF file gives the configuration and the weights of the folder that it was made from."""

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from agentic_ring.errors import AgenticRingError
from agentic_ring.mesh import MeshShape, mesh_on_first_devices
from agentic_ring.models.llama import load_pretrained
from agentic_ring.models.llama.config_file import read_config, usable_context
from agentic_ring.models.llama.gguf_checkpoint import config_of, llama3_scaling
from tests.models.gguf_cases import gguf_fields, gguf_tensors, llama3_factors, write_gguf
from tests.models.llama_cases import config_json, weights, write_model

LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
LLAMA_3 |= {"factor": 8.0, "high_freq_factor": 4.0}
UNCHANGED = ("two_key_heads", "tied", "wide_heads", "linear", "yarn", "mistral", "qwen2", "qwen2_tied")
CASES = {
    **{case: {} for case in (*UNCHANGED, "qwen3_wide_heads", "phi3", "phi3_without_window")},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA_3},
    # A file has the scale of queries only of the published sizes.
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window_pattern": 3},
}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def assert_same(model, other) -> None:
    assert model.config == other.config
    for ours, theirs in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_a_file_holds_the_model_of_the_folder(case, tmp_path):
    changes = CASES[case] | IDS
    folder = write_model(tmp_path / "folder", case, **changes)
    if case.startswith("gemma"):  # adding 1 to a norm and taking it off again rounds
        rounded = {
            n: x + np.float32(1) - np.float32(1) if "norm" in n else x for n, x in weights(case).items()
        }
        save_file(rounded, folder / "model.safetensors")
    file = write_gguf(tmp_path / "a.gguf", gguf_fields(case, **changes), gguf_tensors(case, **changes))
    assert_same(load_pretrained(file), load_pretrained(folder))
    assert usable_context(file, None, False) == usable_context(folder, None, False)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_tensors_are_dequantised_on_any_mesh(kind, tmp_path):
    number = gguf.GGMLQuantizationType[kind]
    rounded = {
        name: tensor
        if tensor.ndim == 1 or tensor.shape[1] % gguf.GGML_QUANT_SIZES[number][0]
        else gguf.dequantize(gguf.quantize(tensor, number), number)
        for name, tensor in weights("two_key_heads").items()
    }
    folder = write_model(tmp_path / "folder")
    save_file(rounded, folder / "model.safetensors")
    file = write_gguf(tmp_path / "a.gguf", gguf_fields("two_key_heads"), gguf_tensors("two_key_heads"), kind)
    mesh = mesh_on_first_devices(MeshShape(fsdp=2, ring=2, tensor=2))
    dtype = "bfloat16" if kind == "BF16" else "float32"
    for options in ({}, {"mesh": mesh}):
        assert_same(load_pretrained(file, **options), load_pretrained(folder, dtype=dtype, **options))


@pytest.mark.parametrize("changed", [{}, {"factor": 32.0}, {"high_freq_factor": 3.5}])
def test_the_parameters_of_llama_3s_rotary_scaling_are_found_from_its_factors(changed, tmp_path):
    for head_dim in (64, 128):
        factors = llama3_factors(5e5, head_dim, LLAMA_3 | changed)
        assert llama3_scaling(tmp_path, factors, 5e5, head_dim) == LLAMA_3 | changed


def test_settings_that_only_some_conversions_write(tmp_path):
    def config(case: str, **changes):
        return config_of(write_gguf(tmp_path / "a.gguf", gguf_fields(case) | changes, gguf_tensors(case)))

    local = config(
        "gemma3_text", **{"gemma3.attention.sliding_window_pattern": [True, True, False] * 2 + [True]}
    )
    assert local["layer_types"] == config_json("gemma3_text")["layer_types"]
    assert config("gemma2", **{"gemma2.block_count": 46})["query_pre_attn_scalar"] == 8
    assert config("gemma2", **{"gemma2.block_count": 46, "gemma2.attention.key_length": 16})[
        "query_pre_attn_scalar"
    ] == (32 // 4)


def fields(**changes):
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return gguf_fields("two_key_heads") | changes, gguf_tensors("two_key_heads")


def tensors(without: str = "", **changes):
    found = gguf_tensors("two_key_heads") | {f"{name}.weight": value for name, value in changes.items()}
    found.pop(without, None)
    return gguf_fields("two_key_heads"), found


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (fields(general__architecture="mamba"), "general.architecture in .*'mamba'; choose one of: llama"),
        (fields(split__count=3), "one of 3 files .* join them"),
        (fields(llama__block_count=None), "llama.block_count None, expected a whole number"),
        (fields(llama__embedding_length="wide"), "llama.embedding_length 'wide'"),
        (fields(llama__feed_forward_length=None), "has no intermediate_size"),
        (fields(llama__rope__dimension_count=4), r"partial_rotary_factor 0\.5"),
        (fields(llama__rope__scaling__type="longrope"), "'longrope'"),
        (gguf_fields("yarn_of_its_own"), "yarn_attn_factor, whose meaning depends on the conversion"),
        (fields(llama__block_count=1), r"9 tensors are unknown, such as blk\.1\.attn_k\.weight"),
        (fields(llama__feed_forward_length=40), r"gate_proj\.weight has shape \[48, 32\].* \[40, 32\]"),
        (fields(general__architecture="qwen3"), "qwen3.embedding_length None"),
        (tensors("blk.1.attn_q.weight"), r"1 tensors are missing, such as blk\.1\.attn_q\.weight"),
        (tensors(rope_freqs=np.array([1, 2, 5, 3], np.float32)), "other than Llama 3's"),
        (
            tensors(output=np.zeros((64, 32), np.int8)),
            "output.weight in .* stored as I8, which is not supported",
        ),
    ],
)
def test_errors_name_the_fault_of_a_file(content, named, tmp_path):
    content = content if isinstance(content, tuple) else (content, gguf_tensors("two_key_heads"))
    with pytest.raises(AgenticRingError, match=named):
        load_pretrained(write_gguf(tmp_path / "a.gguf", *content))


def test_unreadable_files_and_unused_fields_are_named(tmp_path, capsys):
    file, content = tmp_path / "a.gguf", fields(llama__expert_count=2)
    whole = write_gguf(file, *content).read_bytes()
    read_config(file)
    assert "not used: llama.expert_count;" in capsys.readouterr().err
    for size in (len(whole) - 100, 2000, 100, 10, 0):
        file.write_bytes(whole[:size])
        with pytest.raises(AgenticRingError, match=r"a\.gguf cannot be read as GGUF .* cut short; fetch it"):
            load_pretrained(file)
    write_gguf(file, *content, endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(AgenticRingError, match="is big-endian"):
        load_pretrained(file)
    with pytest.raises(AgenticRingError, match=r"other\.gguf cannot be opened \(No such file"):
        load_pretrained(tmp_path / "other.gguf")
