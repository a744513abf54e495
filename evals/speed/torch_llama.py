"""A LLaMA run by ``transformers`` and torch, which the extra hf installs."""

from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from agentic_ring.inference.ragged_batch import Tokens


class TorchLlama:
    """Prefill and greedy decoding in float32 with the library's own cache, on all cores.

    Args:
      folder: model as ``save_pretrained`` writes it.
    """

    def __init__(self, folder: Path):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model: Any = model.eval()

    def prefill(self, tokens: Tokens) -> tuple[np.ndarray, Any]:
        """Returns the logits [V] of the next token, and the cache."""
        with torch.inference_mode():
            result = self._model(torch.tensor([list(tokens)]), use_cache=True, logits_to_keep=1)
        return result.logits[0, -1].numpy(), result.past_key_values

    def decode(self, token: int, count: int, cache: Any) -> list[int]:
        """Returns the ``count`` tokens that follow ``token`` greedily; the cache is restored."""
        written = []
        with torch.inference_mode():
            for _ in range(count):
                result = self._model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                token = int(result.logits[0, -1].argmax())
                written.append(token)
        cache.crop(-count)
        return written
