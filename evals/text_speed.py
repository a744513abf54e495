"""Speed of prefill and decoding of a LLaMA on a CPU, relative to ``transformers`` on the same weights.

    python evals/text_speed.py --question-at 65536 --rows-to experiments/results/text_speed.csv

Needs the extra hf. Both libraries load one folder with random float32 weights and use all cores: torch by
threads, the text engine by one simulated device per core, which share the model's heads during prefill.
The engine decodes on one device: a token is too little work to share. The two are timed interleaved, and
the ratio, the other library's seconds over ours, is taken within each round: above 1 our engine is faster.

    prefill     from the tokens to the logits of the next one and a full cache, against transformers
    decode      one token after another with that cache, greedily, including the transfer of the cache to
                the decoding device, against transformers
    question    a question after a cached document and a short answer, against the same after encoding
                the document again

Logits and answers of both libraries are compared before anything is timed.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import rich
from rich.box import SIMPLE_HEAD
from rich.table import Table

from agentic_ring.errors import AgenticRingError, ConfigError
from agentic_ring.extras import needs_extra
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.mesh import MeshShape, make_mesh, simulate_cpu_devices
from agentic_ring.models.llama import Llama, LlamaConfig, load_pretrained, save_pretrained
from agentic_ring.models.transformer_config import TransformerConfig
from agentic_ring.results.rows import write_rows
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import say
from evals.speed.interleaved import Spread, time_interleaved

MODELS = {
    "47m": LlamaConfig(TransformerConfig(width=512, layers=8, heads=8, ffn_width=1792), vocab_size=16_000),
    "tiny": LlamaConfig(TransformerConfig(width=32, layers=2, heads=8, ffn_width=64), vocab_size=128),
}
"""Model sizes by name; "tiny" checks in seconds that everything runs."""

QUESTION, ANSWER = 64, 16
"""Tokens of a question and of its answer."""

CHUNK = 2048
"""Tokens encoded at a time: of 1,024, 2,048 and 4,096 the fastest with the least memory."""

LARGEST_DIFFERENCE = 1e-3
"""Largest accepted difference of the logits, whose standard deviation is about 1."""

Phase = Literal["prefill", "decode", "question"]


class DisagreementError(AgenticRingError):
    """The two libraries compute different results, so that their times cannot be compared."""


@dataclass(frozen=True)
class Engines:
    """Engines of one model: ``reader`` encodes on all devices, ``writer`` decodes on one."""

    reader: TextEngine
    writer: TextEngine

    @classmethod
    def of(cls, folder: Path, devices: int) -> "Engines":
        """Loads the model of a folder onto ``devices`` devices."""
        mesh = make_mesh(MeshShape(tensor=devices), jax.devices()[:devices])
        reader = TextEngine(load_pretrained(folder, mesh), mesh, CHUNK)
        return cls(reader, TextEngine(load_pretrained(folder), chunk=CHUNK))

    @property
    def devices(self) -> int:
        """Number of devices that encode."""
        return 1 if self.reader.mesh is None else self.reader.mesh.size


@dataclass(frozen=True)
class SpeedRow:
    """Speed of one phase at one length.

    Attributes:
      phase: the phase that was timed; see the module.
      devices: number of simulated devices that share the model's heads during prefill.
      cached: tokens of the document.
      tokens: tokens that were encoded or decoded in the time.
      seconds: seconds of the text engine.
      other_seconds: seconds of the alternative.
      ratio: the other seconds over ours, taken within each round.
      turns: number of timed rounds.
    """

    phase: Phase
    devices: int
    cached: int
    tokens: int
    seconds: Spread
    other_seconds: Spread
    ratio: Spread
    turns: int

    @classmethod
    def of(
        cls,
        phase: Phase,
        devices: int,
        cached: int,
        tokens: int,
        seconds: list[float],
        others: list[float],
    ) -> "SpeedRow":
        """Summarises the seconds of each round."""
        ratio = Spread.of(y / x for x, y in zip(seconds, others, strict=True))
        return cls(phase, devices, cached, tokens, Spread.of(seconds), Spread.of(others), ratio, len(seconds))

    def columns(self) -> dict[str, Any]:
        """The row as one level of named cells, for a CSV file."""
        cells: dict[str, Any] = {**vars(self)}
        for name in ("seconds", "other_seconds", "ratio"):
            spread = cells[name]
            cells |= spread.cells(name)
        return cells


def beside_transformers(
    engines: Engines, folder: Path, cached: int, new_tokens: int, turns: int
) -> list[SpeedRow]:
    """Times prefill of ``cached`` tokens and decoding of ``new_tokens`` by both libraries.

    Raises:
      MissingExtraError: the extra hf is not installed.
      DisagreementError: the logits or the answers differ.
    """
    with needs_extra("hf"):
        from evals.speed.torch_llama import TorchLlama
    other, tokens = TorchLlama(folder), random_tokens(engines.writer.model, cached)
    document, (logits, cache) = engines.reader.read(tokens), other.prefill(tokens)
    _check(f"logits after {cached} tokens", np.asarray(document.next_logits)[0], logits)

    def write() -> list[int]:
        near = engines.writer.adopt(document)
        return engines.writer.generate([tokens[:1]], new_tokens, document=near)[0].tokens

    def write_by_transformers() -> list[int]:
        return other.decode(tokens[0], new_tokens, cache)

    _check(f"tokens written after {cached}", np.array(write()), np.array(write_by_transformers()))
    # Each of these has run once by now.
    say(f"prefill at {cached:,} tokens")
    reader = engines.reader
    prefill = time_interleaved(
        turns, lambda: reader.read(tokens).cache, lambda: other.prefill(tokens), warm_up=0
    )
    say(f"decode at {cached:,} tokens")
    decode = time_interleaved(turns, write, write_by_transformers, warm_up=0)
    return [
        SpeedRow.of("prefill", engines.devices, cached, cached, *prefill),
        SpeedRow.of("decode", engines.devices, cached, new_tokens, *decode),
    ]


def _check(what: str, ours: np.ndarray, others: np.ndarray) -> None:
    difference = np.abs(ours - others).max()
    if not difference < LARGEST_DIFFERENCE:
        raise DisagreementError(
            f"{what} differ by up to {difference:.2g}; times can be compared only where they agree"
        )


def beside_reading_again(engines: Engines, cached: int, turns: int) -> SpeedRow:
    """Times questions after a cached document; the seconds of encoding it, once, include compilation."""
    tokens = random_tokens(engines.writer.model, cached + QUESTION)
    text, question = tokens[:cached], tokens[cached:]
    say(f"encoding {cached:,} tokens")
    start = time.perf_counter()
    document = engines.writer.adopt(engines.reader.read(text))
    jax.block_until_ready(document.cache)
    reading = time.perf_counter() - start
    (seconds,) = time_interleaved(
        turns, lambda: engines.writer.generate([question], ANSWER, document=document)
    )
    again = [reading + x for x in seconds]
    return SpeedRow.of("question", engines.devices, cached, QUESTION + ANSWER, seconds, again)


def random_tokens(model: Llama, count: int) -> list[int]:
    """Returns ``count`` random tokens, the same at every call."""
    return np.random.default_rng(0).integers(0, model.config.vocab_size, count).tolist()


def print_rows(rows: list[SpeedRow]) -> None:
    """Prints all rows as one table."""
    table = Table(box=SIMPLE_HEAD)
    for column in ("", "document", "tokens/s", "other tokens/s", "speed-up", "min to max"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        table.add_row(
            row.phase,
            f"{row.cached:,}",
            f"{row.tokens / row.seconds.median:,.1f}",
            f"{row.tokens / row.other_seconds.median:,.1f}",
            f"{row.ratio.median:.2f}",
            f"{row.ratio.low:.2f} to {row.ratio.high:.2f}",
        )
    rich.print(table)


def main(
    lengths: tuple[int, ...] = (4096, 16_384),
    model: str = "47m",
    devices: int = 2,
    new_tokens: int = 32,
    turns: int = 5,
    question_at: int | None = None,
    rows_to: Path | None = None,
) -> None:
    """Times the text engine against transformers, and cached documents against encoding them again.

    Args:
      lengths: Lengths of the documents in tokens.
      model: Size of the model: 47m or tiny.
      devices: Simulated devices that share the model's heads; best as many as there are cores.
      new_tokens: Tokens decoded per round.
      turns: Number of timed rounds.
      question_at: Length in tokens of a document to ask a question about; no question if left out.
      rows_to: CSV file for the rows; none is written if left out.
    """
    if model not in MODELS:
        raise ConfigError(f"model is {model!r}; it must be one of {', '.join(MODELS)}")
    longest = (*lengths, question_at or 1)
    simulate_cpu_devices(devices)
    rows: list[SpeedRow] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_pretrained(MODELS[model].build(jax.random.key(0)), folder, context=2 * max(longest))
        engines = Engines.of(folder, devices)
        for cached in lengths:
            rows += beside_transformers(engines, folder, cached, new_tokens, turns)
        if question_at is not None:
            rows.append(beside_reading_again(engines, question_at, turns))
    print_rows(rows)
    if rows_to is not None:
        parameters = sum(leaf.size for leaf in jax.tree.leaves(engines.writer.model))
        cells = {"model": model, "parameters": parameters, "dtype": "float32"}
        write_rows(rows_to, [cells | row.columns() for row in rows])


if __name__ == "__main__":
    cli.run(main)
