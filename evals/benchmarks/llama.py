"""Prefill and decoding of a LLaMA on a CPU, beside ``transformers`` on the same weights.

Both libraries load one folder with random float32 weights, or the file of a named model, and use all cores:
torch by threads, the text engine by simulated devices, which share the model's heads during prefill, or by
threads of a single one. The engine decodes on one device: a token is too little work to share. Logits and
answers are compared before anything is timed.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from agentic_ring.errors import AgenticRingError, MissingExtraError
from agentic_ring.extras import needs_extra
from agentic_ring.files.model_path import find_model, is_gguf
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.mesh import MeshShape, make_mesh
from agentic_ring.models.llama import LlamaConfig, load_pretrained, save_pretrained
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.timing import Spread, time_interleaved
from evals.benchmarks.rows import Line

MODELS = {
    "47M": LlamaConfig(TransformerConfig(width=512, layers=8, heads=8, ffn_width=1792), vocab_size=16_000),
    "tiny": LlamaConfig(TransformerConfig(width=32, layers=2, heads=8, ffn_width=64), vocab_size=128),
}
QUESTION, ANSWER = 64, 16
"""Tokens of a question and of its answer."""
CHUNK = 2048
"""Tokens encoded at a time: of 1,024, 2,048 and 4,096 the fastest with the least memory."""
LARGEST_DIFFERENCE = 1e-3
"""Largest accepted difference of the logits, whose standard deviation is about 1."""
OURS, PEER, AGAIN = "text engine", "transformers", "encoding again"


class DisagreementError(AgenticRingError):
    """Two contenders compute different results, so that their times cannot be compared."""


def llama(model: str, cached: int, devices: int, new_tokens: int, rounds: int) -> list[Line]:
    """Times three phases with a document of ``cached`` tokens.

    prefill     from the tokens to the logits of the next one and a full cache
    decode      ``new_tokens`` with that cache, greedily, including the transfer of the cache to the decoding
                device
    question    a question after the cached document and its answer, against encoding the document again
    """
    mesh = make_mesh(MeshShape(tensor=devices, ring=1), jax.devices()[:devices])
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary)
        if model in MODELS:
            built = MODELS[model].build(jax.random.key(0))
            save_pretrained(built, path, context=2 * (cached + QUESTION) + ANSWER)
        else:
            path = find_model(model)
        reader = TextEngine(load_pretrained(path, mesh), mesh, min(CHUNK, cached))
        writer = TextEngine(load_pretrained(path), chunk=reader.chunk)
        peer, lines = None, []
        try:
            peer = TorchLlama(path)
        except MissingExtraError as error:
            lines.append(Line("prefill, decode", PEER, None, left_out=str(error)))
    vocabulary = reader.model.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, cached + QUESTION).tolist()
    text, question = tokens[:cached], tokens[cached:]
    document = reader.read(text)
    near = writer.adopt(document)

    def decode() -> list[int]:
        own = writer.adopt(document)
        return writer.generate([text[:1]], new_tokens, document=own)[0].tokens

    functions: dict[tuple[str, str], Callable[[], Any]] = {
        ("prefill", OURS): lambda: reader.read(text).cache,
        ("decode", OURS): decode,
        ("question", OURS): lambda: writer.generate([question], ANSWER, document=near),
    }
    if peer is not None:
        logits, cache = peer.prefill(text)
        functions["prefill", PEER] = lambda: peer.prefill(text)
        functions["decode", PEER] = lambda: peer.decode(text[0], new_tokens, cache)
        difference = np.abs(np.asarray(document.next_logits)[0] - logits).max()
        if not difference < LARGEST_DIFFERENCE or decode() != functions["decode", PEER]():
            raise DisagreementError(
                f"after {cached} tokens the logits differ by up to {difference:.2g}, or the next tokens do; "
                "times can be compared only where they agree"
            )
    times = dict(zip(functions, time_interleaved(rounds, *functions.values()), strict=True))
    encoding, answering = times["prefill", OURS], times["question", OURS]
    times["question", AGAIN] = [x + y for x, y in zip(encoding, answering, strict=True)]
    counts = {"prefill": cached, "decode": new_tokens, "question": QUESTION + ANSWER}
    for (phase, contender), seconds in times.items():
        others = {other: times.get((phase, other)) for other in (PEER, AGAIN) if other != contender}
        ratios = {other: Spread.ratio(seconds, known) for other, known in others.items() if known}
        spread = Spread.of(seconds)
        details = {"tokens": counts[phase], "tokens_per_second": counts[phase] / spread.median}
        lines.append(Line(phase, contender, spread, "s", ratios, details))
    return lines


class TorchLlama:
    """Prefill and greedy decoding by ``transformers`` in float32 with its own cache, on all cores."""

    def __init__(self, path: Path):
        with needs_extra("hf"):
            import torch  # pyright: ignore[reportMissingImports]
            import transformers  # pyright: ignore[reportMissingImports]
        self._torch = torch
        named = {"gguf_file": path.name} if is_gguf(path) else {}
        folder = path.parent if named else path
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **named)
        self._model: Any = model.eval()

    def prefill(self, tokens: Sequence[int]) -> tuple[np.ndarray, Any]:
        """Returns the logits [V] of the next token, and the cache."""
        with self._torch.inference_mode():
            result = self._model(self._torch.tensor([list(tokens)]), use_cache=True, logits_to_keep=1)
        return result.logits[0, -1].numpy(), result.past_key_values

    def decode(self, token: int, count: int, cache: Any) -> list[int]:
        """Returns the ``count`` tokens that follow ``token`` greedily; the cache is restored."""
        written = []
        with self._torch.inference_mode():
            for _ in range(count):
                result = self._model(self._torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                token = int(result.logits[0, -1].argmax())
                written.append(token)
        cache.crop(-count)
        return written
