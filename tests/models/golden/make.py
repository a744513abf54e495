"""Writes the weights and logits that lie beside this file; needs torch and transformers.

python tests/models/golden/make.py
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
    CASES,
    FFN,
    GOLDEN,
    HEADS,
    LAYERS,
    LENGTH,
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


def main() -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    save_file(shared_weights(), GOLDEN / "weights.safetensors")
    random = np.random.default_rng(1)
    np.save(GOLDEN / "tokens.npy", random.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32))
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(Path(folder), case)
            model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
            with torch.no_grad():
                logits = model(torch.from_numpy(tokens()).long()).logits
        np.save(GOLDEN / f"{case}.npy", logits.numpy())
        print(case, f"{logits.std():.3f}")


if __name__ == "__main__":
    main()
