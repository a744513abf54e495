"""Writes the logits and answers that lie beside this file, from its weights; needs torch and transformers.

python -m tests.models.golden.make [qwen2 ...]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.models.llama_cases import ANSWER, CASES, FAMILIES, GOLDEN, PROMPT, tokens, write_model

if __name__ == "__main__":
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
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
