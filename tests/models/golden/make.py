"""Writes the weights and logits that lie beside this file; needs torch and transformers.

python tests/models/golden/make.py
python tests/models/golden/make.py qwen2 qwen3
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.models.llama_cases import (
    ANSWER,
    CASES,
    FAMILIES,
    FFN,
    GOLDEN,
    HEADS,
    LAYERS,
    LENGTH,
    PROMPT,
    ROWS,
    STANDARD_DEVIATION,
    VOCAB,
    WIDTH,
    tokens,
    write_model,
)

WIDEST_HEAD = 16


def shared_weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (STANDARD_DEVIATION * random.standard_normal(shape)).astype(np.float32)

    heads = HEADS * WIDEST_HEAD
    tensors = {"model.embed_tokens.weight": normal(VOCAB, WIDTH), "lm_head.weight": normal(VOCAB, WIDTH)}
    tensors["model.norm.weight"] = 1 + normal(WIDTH)
    shapes = {
        **{f"self_attn.{name}_proj": (heads, WIDTH) for name in "qkv"},
        "self_attn.o_proj": (WIDTH, heads),
        "mlp.gate_proj": (FFN, WIDTH),
        "mlp.up_proj": (FFN, WIDTH),
        "mlp.down_proj": (WIDTH, FFN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1 + normal(WIDTH)
    return tensors


def weights_of_families() -> dict[str, np.ndarray]:
    """Biases of projections, and norms of heads."""
    random, tensors = np.random.default_rng(2), {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.self_attn."
        for name in "qkv":
            bias = STANDARD_DEVIATION * random.standard_normal(HEADS * WIDEST_HEAD)
            tensors[f"{prefix}{name}_proj.bias"] = bias.astype(np.float32)
        for name in "qk":
            norm = 1 + STANDARD_DEVIATION * random.standard_normal(WIDEST_HEAD)
            tensors[f"{prefix}{name}_norm.weight"] = norm.astype(np.float32)
    return tensors


def main() -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    save_file(shared_weights(), GOLDEN / "weights.safetensors")
    save_file(weights_of_families(), GOLDEN / "weights_of_families.safetensors")
    random = np.random.default_rng(1)
    np.save(GOLDEN / "tokens.npy", random.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32))
    for case in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(Path(folder), case)
            model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
            text = torch.from_numpy(tokens()).long()
            with torch.no_grad():
                logits = model(text).logits
                if case in FAMILIES:
                    model.generation_config.eos_token_id = None  # so that no answer ends early
                    answer = model.generate(text[:1, :PROMPT], max_new_tokens=ANSWER, do_sample=False)
                    np.save(GOLDEN / f"{case}_answer.npy", answer[0, PROMPT:].numpy().astype(np.int32))
        np.save(GOLDEN / f"{case}.npy", logits.numpy())
        print(case, f"{logits.std():.3f}")


if __name__ == "__main__":
    main()
