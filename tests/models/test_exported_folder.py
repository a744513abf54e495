"""A saved folder opens in transformers, which generates the same text as the text engine."""

import jax
import pytest

from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.models.llama import LlamaConfig, save_pretrained
from agentic_ring.models.transformer_config import TransformerConfig
from tests.data.text.tokenizers_for_tests import byte_level

NEW = 24


@pytest.mark.filterwarnings("default")
def test_transformers_writes_the_same_and_stops_where_the_tokenizer_says(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    shape = TransformerConfig(width=32, layers=2, heads=4, kv_heads=2, ffn_width=48)
    model = LlamaConfig(shape, byte_level().vocab_size).build(jax.random.key(0))
    engine, prompt = TextEngine(model), byte_level().encode_prompt("The capital")
    unstopped = engine.generate([prompt], NEW)[0].tokens
    # The stop token is one that occurs in the unstopped answer.
    end = unstopped[5]
    tokenizer = byte_level(eos=["</s>", byte_level().token(end)])
    save_pretrained(model, tmp_path, write_others=tokenizer.save)

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    # That class adds BOS only if a post-processor in tokenizer.json does.
    assert theirs("The capital").input_ids == tokenizer.encode("The capital")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    written = other.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    ours = engine.generate([prompt], NEW, stop_tokens=Tokenizer.load(tmp_path).eos_ids)[0]
    assert ours.ended == "stop"
    assert written[0, len(prompt) :].tolist() == [*ours.tokens, end]
    assert theirs.decode(ours.tokens) == tokenizer.decode(ours.tokens)
