"""A finetuning run of seconds: conversations, and a model from scratch that learns something from them."""

import json
import random
from pathlib import Path

from evals.compile.llama_step import Shape
from experiments.finetune.presets import FinetunePreset, Stage

FRESH = FinetunePreset(
    stages=(
        Stage(64, 10_000.0, 2e-2, steps=6, batch_tokens=256, warmup_steps=1),
        Stage(128, 40_000.0, 1e-2, steps=4, batch_tokens=256, warmup_steps=1),
    ),
    shape=Shape(16, 32, 2, 2, vocab_size=300),
    checkpoint_every=2,
    base="fresh",
    frugal=False,
)
WORDS = ("river", "stone", "lantern", "maple", "copper", "meadow", "window", "harbour", "pepper", "button")


def write_chats(path: Path) -> None:
    """Writes a jsonl of conversations of two to five questions."""
    draw = random.Random(0)
    with path.open("w") as file:
        for number in range(120):
            turns = []
            for _ in range(draw.randrange(2, 6)):
                words = " ".join(draw.sample(WORDS, 5))
                turns.append({"from": "human", "value": f"Repeat after me: {words}"})
                turns.append({"from": "gpt", "value": f"You said: {words}"})
            file.write(json.dumps({"id": f"chat-{number}", "conversations": turns}) + "\n")
