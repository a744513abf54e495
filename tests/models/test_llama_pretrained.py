"""Models from Hugging Face folders compute the logits of transformers on any mesh and are saved unchanged."""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import AgenticRingError, ArgumentError, ConfigError, DataError
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.mesh import MeshShape, make_mesh, mesh_on_first_devices
from agentic_ring.models.llama import Llama, LlamaConfig, TokenBatch, load_pretrained, save_pretrained
from agentic_ring.models.llama.config_file import read_config, usable_context
from agentic_ring.models.llama.tensor_files import SafetensorsFiles
from agentic_ring.models.self_attention import inverse_frequencies
from agentic_ring.models.transformer_config import TransformerConfig
from tests.data.text.tokenizers_for_tests import byte_level
from tests.models.llama_cases import CASES, LENGTH, config_json, logits, tokens, weights, write_model

TOLERANCE = 1e-4
"""Of float32 logits, whose standard deviation is about 1.8."""
RING, EVERY_AXIS = MeshShape(ring=8), MeshShape(fsdp=2, ring=2, tensor=2)
ALIKE = ("gemma2_wide_window", "gemma3_text_local", "mistral_without_window")
"""Cases that differ from another one in few settings."""


def load(folder: Path, **arguments) -> Llama:
    # Only dynamic scaling depends on the context in use.
    return load_pretrained(folder, context=LENGTH, **arguments)


def compute(model: Llama, mesh=None) -> np.ndarray:
    with jax.default_matmul_precision("highest"), jax.set_mesh(mesh) if mesh else nullcontext():
        return np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, tokens()))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in ALIKE else case for case in CASES]
)
def test_logits_are_those_of_transformers_and_saved_again_all_is_the_same(case, tmp_path):
    ids = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}
    fields, folder = {**config_json(case), **ids}, write_model(tmp_path / "from", case, **ids)
    model = load(folder)
    np.testing.assert_allclose(compute(model), logits(case), atol=TOLERANCE)
    if case == "dynamic":
        model = load_pretrained(folder)  # with the context that it was made for
    save_pretrained(model, tmp_path / "to")
    kept, wanted = load_file(tmp_path / "to" / "model.safetensors"), weights(case)
    assert kept.keys() == wanted.keys()
    for name, tensor in kept.items():
        np.testing.assert_array_equal(tensor, wanted[name], err_msg=name)
    assert read_config(tmp_path / "to") == model.config
    saved = json.loads((tmp_path / "to" / "config.json").read_text())
    scaling = fields.pop("rope_scaling", {})
    assert {name: saved[name] for name in fields} == fields
    assert {name: saved["rope_scaling"][name] for name in scaling} == scaling


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        ("two_key_heads", RING),
        ("phi3", EVERY_AXIS),
        *(
            pytest.param(case, shape, marks=pytest.mark.slow)
            for shape, cases in (
                (EVERY_AXIS, ("gemma2", "gemma3_text", "mistral", "qwen2")),
                (RING, ("gemma2_wide_window", "phi3_without_window", "qwen2_tied", "qwen3_wide_heads")),
            )
            for case in cases
        ),
    ],
    ids=str,
)
def test_logits_do_not_change_with_the_mesh(case, shape, tmp_path):
    mesh = mesh_on_first_devices(shape)
    model = load(write_model(tmp_path, case), mesh=mesh)
    np.testing.assert_allclose(compute(model, mesh), logits(case), atol=TOLERANCE)


def test_fields_that_a_file_leaves_out_are_the_familys(tmp_path):
    def stack(case: str, **changes):
        return read_config(write_model(tmp_path, case, **changes)).transformer

    assert stack("mistral").window == 20
    assert stack("mistral", sliding_window=None).window is None
    fields("mistral", without="sliding_window")(tmp_path)
    assert read_config(tmp_path).transformer.window == 4096
    assert read_config(write_model(tmp_path, eos_token_id=2)).eos_token_id == 2
    # A window that the family does not use, and null key heads, are read as transformers does.
    qwen = stack("qwen2", num_key_value_heads=None, sliding_window=20, layer_types=[GLOBAL] * 2)
    assert (qwen.key_value_heads, qwen.window) == (qwen.heads, None)


@pytest.mark.parametrize(("context", "lengths"), [(None, (1, 32)), (200, (1, 32, 64, 200, 300))])
def test_dynamic_scaling_is_saved_as_transformers_computes_it(context, lengths, tmp_path):
    model = load_pretrained(write_model(tmp_path / "from", "dynamic"), context=context)
    save_pretrained(model, tmp_path / "to")
    saved, stack = json.loads((tmp_path / "to" / "config.json").read_text()), model.config.transformer
    ours = inverse_frequencies(stack.rope_theta, stack.head_dim, stack.rope_scaling)
    known = context or lengths[1]
    assert saved["max_position_embeddings"] == known
    for length in lengths:  # as modeling_rope_utils.py computes it for a text of this length
        base, scaling = saved["rope_theta"], saved["rope_scaling"]
        if scaling is not None:
            assert scaling["rope_type"] == "dynamic"
            longer = scaling["factor"] * max(length, known) / known - (scaling["factor"] - 1)
            base *= longer ** (stack.head_dim / (stack.head_dim - 2))
        theirs = 1.0 / base ** (np.arange(0, stack.head_dim, 2) / stack.head_dim)
        np.testing.assert_allclose(theirs, ours, rtol=1e-12)
    again = load_pretrained(tmp_path / "to").config.transformer
    assert inverse_frequencies(again.rope_theta, again.head_dim, again.rope_scaling).tolist() == ours.tolist()
    with pytest.raises(ArgumentError, match=rf"300 tokens, .* {known}"):
        save_pretrained(model, tmp_path / "other", context=300)
    assert not (tmp_path / "other").exists()


def test_a_model_on_a_mesh_is_saved_in_several_files_and_over_another_one(tmp_path, monkeypatch):
    model = load(write_model(tmp_path / "from"), mesh=make_mesh(MeshShape(fsdp=2, ring=4)))
    for size, count in ((20_000, 5), (10**9, 1), (20_000, 5)):
        monkeypatch.setattr("agentic_ring.models.llama.pretrained.SHARD_BYTES", size)
        model = jax.tree.map(lambda x: 2 * x, model)
        save_pretrained(model, tmp_path / "to")
        files = sorted(path.name for path in (tmp_path / "to").glob("*.safetensors"))
        assert len(files) == count
        assert len({path.stat().st_mode for path in (tmp_path / "to").iterdir()}) == 1
        assert files[0] == ("model.safetensors" if count == 1 else f"model-00001-of-{count:05}.safetensors")
        again = load(tmp_path / "to")
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again), jax.tree.leaves(model))


def test_weights_are_stored_and_used_in_the_requested_dtype(tmp_path):
    model = load(write_model(tmp_path), dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model)} == {"bfloat16"}
    assert 1e-3 < np.abs(compute(model) - logits("two_key_heads")).mean() < 0.1


def test_every_device_reads_only_its_own_part(tmp_path, monkeypatch):
    read, whole = [], SafetensorsFiles.read

    def recorded(self, name, index):
        read.append(whole(self, name, index))
        return read[-1]

    monkeypatch.setattr(SafetensorsFiles, "read", recorded)
    load(write_model(tmp_path), mesh=make_mesh(MeshShape(fsdp=8, ring=1)))
    largest = max(tensor.nbytes for tensor in weights("two_key_heads").values())
    assert max(part.nbytes for part in read) <= largest / 8


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 5e5}
GEMMA_ROPE = {
    "full_attention": LINEAR | {"rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": DEFAULT | {"rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("case", "rope", "old"),
    [
        ("two_key_heads", LINEAR, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("two_key_heads", DEFAULT, {"rope_theta": 5e5, "rope_scaling": None}),
        ("llama3", CASES["llama3"]["rope_scaling"] | {"rope_theta": 1e4}, {}),
        ("gemma3_text", GEMMA_ROPE, {"layer_types": None, "sliding_window_pattern": 3}),
    ],
)
def test_old_and_new_names_are_equivalent(case, rope, old, tmp_path):
    new = {"rope_parameters": rope, "rope_theta": None, "rope_scaling": None}
    new, old = (read_config(write_model(tmp_path / str(n), case, **c)) for n, c in enumerate((new, old)))
    assert new == old


def test_a_model_with_own_parts_is_refused_by_name_elsewhere(tmp_path):
    own = {"model_type": "agentic_ring_llama", "architectures": ["AgenticRingLlamaForCausalLM"]}
    model = load(write_model(tmp_path, **own, query_scaling={"floor": 8, "scale": 0.1}))
    assert np.abs(compute(model) - logits("two_key_heads"))[:, 16:].max() > 0.1
    save_pretrained(model, tmp_path / "to")
    assert json.loads((tmp_path / "to" / "config.json").read_text())["model_type"] == "agentic_ring_llama"
    assert load(tmp_path / "to").config == model.config


def fields(case: str = "two_key_heads", without: str = "", **changes):
    content = {**config_json(case), **changes}
    content.pop(without, None)
    return lambda folder: (folder / "config.json").write_text(json.dumps(content))


def tensors(**changes):
    return lambda folder: save_file({**weights("two_key_heads"), **changes}, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def missing_shard(folder: Path) -> None:
    placed = dict.fromkeys(weights("two_key_heads"), "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 16}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config\.json does not exist"),
        (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"neither model\.safetensors"),
        (fields(without="hidden_size"), "hidden_size"),
        (fields(model_type="mamba"), "'mamba'"),
        (fields(rope_scaling={"rope_type": "longrope"}), "'longrope'"),
        (fields(rope_scaling={"rope_type": "linear"}), "factor"),
        (fields(rope_scaling=DYNAMIC), "original_max_position_embeddings 16, but .* 32"),
        (fields(attention_bias=True), "attention_bias True"),
        (fields(rope_interleaved=True), "rope_interleaved True"),
        (fields(quantization_config={"quant_method": "awq", "bits": 4}), "were quantised by awq"),
        (fields(rope_condense_ratio=8, rope_scaling={"type": "linear", "factor": 2.0}), "condense_ratio"),
        (fields(model_type="qwen2"), "'qwen2', but its architecture is 'LlamaForCausalLM'"),
        (fields("qwen2", use_sliding_window=True), "use_sliding_window True"),
        (fields("phi3", partial_rotary_factor=0.75), r"partial_rotary_factor 0\.75"),
        (fields(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.75}), "partial_rotary_factor"),
        (fields("phi3", rope_scaling={"type": "yarn", "factor": 2.0}), "rope_type 'yarn'"),
        (fields("gemma3_text", without="num_hidden_layers"), "num_hidden_layers"),
        (fields("gemma3_text", num_hidden_layers=8), "8 layers, but 7 layer_types"),
        (fields("qwen2", sliding_window=20, layer_types=[LOCAL] * 2), LOCAL),
        (fields("mistral", query_scaling={"floor": 8, "scale": 0.1}), "query_scaling"),
        (fields("mistral", layer_types=[LOCAL, GLOBAL]), GLOBAL),
        (fields("gemma2", layer_types=[GLOBAL, LOCAL]), "not every 1th one"),
        (fields("gemma2", sliding_window=None), "global_every is 2"),
        (fields("gemma3_text", attn_logit_softcapping=50.0), r"attn_logit_softcapping 50\.0"),
        (fields(rope_parameters={GLOBAL: {"rope_theta": 1e6}}), "layers with a window"),
        (fields("qwen3"), r"4 tensors are missing, such as model\.layers\.0\.self_attn\.k_"),
        (fields(hidden_act="gelu"), "hidden_act 'gelu'"),
        (fields(torch_dtype="int4"), "'int4'"),
        (fields(num_key_value_heads=3), "kv_heads 3"),
        (fields(intermediate_size=40), r"gate_proj\.weight has shape \[48, 32\]"),
        (fields(num_hidden_layers=1), r"9 tensors are unknown, such as model\.layers\.1"),
        (truncate, r"model\.safetensors cannot be read"),
        (tensors(**{"lm_head.weight": np.zeros((64, 32), np.int8)}), r"lm_head\.weight in .* I8"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "pickled"),
        (
            lambda folder: fields("qwen2_tied", tie_word_embeddings=False)(write_model(folder, "qwen2_tied")),
            r"such as lm_head\.weight\. .* set tie_word_embeddings to true",
        ),
        (missing_shard, r"model-00001-of-00002\.safetensors does not exist"),
    ],
)
def test_errors_name_the_fault_of_a_folder(damage, named, tmp_path):
    damage(write_model(tmp_path))
    with pytest.raises(AgenticRingError, match=named):
        load_pretrained(tmp_path)


def test_positions_are_condensed_and_other_unknown_fields_are_told_once(tmp_path, capsys):
    folder = write_model(tmp_path)
    fields(rope_condense_ratio=4, logits_scaling=8.0, attention_dropout=0.1)(folder)
    found = [read_config(folder) for _ in range(2)][1]
    fields(rope_scaling={"rope_type": "linear", "factor": 4.0})(folder)
    assert found == read_config(folder)
    warned = capsys.readouterr().err
    assert warned.count("warning") == 1
    assert "not used: logits_scaling;" in warned


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"max_position_embeddings": 100, "rope_scaling": YARN}, 400),
        ({"max_position_embeddings": 400, "rope_scaling": YARN}, 400),
        ({"max_position_embeddings": 500, "rope_scaling": {"type": "linear", "factor": 4.0}}, 500),
        ({"max_position_embeddings": 100, "max_sequence_length": 700}, 700),
        # As Gemma 3's are published now; what the family's defaults add does not count here.
        ({"max_position_embeddings": 300, "rope_parameters": {LOCAL: {"rope_theta": 1e4}}}, 300),
    ],
)
def test_the_context_includes_the_stretching_of_positions(changes, context, tmp_path):
    folder = write_model(tmp_path)
    fields(**changes)(folder)
    assert usable_context(folder, None, False) == context
    with pytest.raises(ConfigError, match=f"made for {context};"):
        usable_context(folder, context + 1, False)


def test_a_stored_head_counts_though_the_config_ties_it(tmp_path, capsys):
    folder, own = write_model(tmp_path, "two_key_heads"), logits("two_key_heads")
    fields(tie_word_embeddings=True)(folder)
    np.testing.assert_allclose(compute(load(folder)), own, atol=TOLERANCE)
    assert "a head of its own" in capsys.readouterr().err
    tensors(**{"lm_head.weight": weights("two_key_heads")["model.embed_tokens.weight"]})(folder)
    assert load(folder).config.tied
    assert not capsys.readouterr().err


def test_computing_in_chunks_of_the_vocabulary_pass_gives_the_logits(tmp_path):
    """The loss of training and the logits of inference agree."""
    model = load(write_model(tmp_path, "tied"))
    targets = np.roll(tokens(), -1, axis=1)
    batch = TokenBatch(tokens(), targets, np.ones(targets.shape), np.arange(LENGTH)[None], None, None)
    model.config = dataclasses.replace(model.config, loss_chunk=16)
    expected = np.take_along_axis(jax.nn.log_softmax(logits("tied")), targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(jax.jit(Llama.weighted_cross_entropy)(model, batch), -expected, atol=1e-4)


def test_a_context_is_checked_against_the_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    assert [usable_context(tmp_path, asked, False) for asked in (None, 64, 63)] == [64, 64, 63]
    assert capsys.readouterr().err == ""
    assert usable_context(tmp_path, 65, True) == 65
    assert "65" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    assert usable_context(tmp_path / "other", 64, False) == 64
    for folder, asked, error, named in (
        ("", 65, ConfigError, "65 tokens .* 64"),
        ("", 0, ConfigError, "context of 0"),
        ("other", None, ConfigError, "give a length"),
        ("nowhere", 64, DataError, r"config\.json does not exist"),
    ):
        with pytest.raises(error, match=named):
            usable_context(tmp_path / folder, asked, False)


@pytest.mark.filterwarnings("default")
def test_transformers_writes_the_same_and_stops_where_the_tokenizer_says(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    shape = TransformerConfig(width=32, layers=2, heads=4, kv_heads=2, ffn_width=48)
    model = LlamaConfig(shape, byte_level().vocab_size).build(jax.random.key(0))
    engine, prompt = TextEngine(model), byte_level().encode_prompt("The capital")
    unstopped = engine.generate([prompt], 24)[0].tokens
    # The stop token is one that occurs in the unstopped answer.
    end = unstopped[5]
    tokenizer = byte_level(eos=["</s>", byte_level().token(end)])
    save_pretrained(model, tmp_path, write_others=tokenizer.save)

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    # That class adds BOS only if a post-processor in tokenizer.json does.
    assert theirs("The capital").input_ids == tokenizer.encode("The capital")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    written = other.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    ours = engine.generate([prompt], 24, stop_tokens=[Tokenizer.load(tmp_path).eos_ids])[0]
    assert ours.ended == "stop"
    assert written[0, len(prompt) :].tolist() == [*ours.tokens, end]
    assert theirs.decode(ours.tokens) == tokenizer.decode(ours.tokens)
