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


def write_chats(path: Path, count: int = 120) -> None:
    """Writes a jsonl of conversations of two to five questions."""
    draw = random.Random(0)

    def turns() -> list[dict[str, str]]:
        first, words = draw.randrange(1, 90), " ".join(draw.sample(WORDS, 5))
        numbers = ", ".join(str(first + step) for step in range(draw.randrange(3, 8)))
        questions = (f"Count on from {first}.", f"Repeat after me: {words}")
        answers = (f"Here they are: {numbers}.", f"You said: {words}")
        kind = draw.randrange(2)
        return [{"from": "human", "value": questions[kind]}, {"from": "gpt", "value": answers[kind]}]

    with path.open("w") as file:
        for number in range(count):
            conversation = [turn for _ in range(draw.randrange(2, 6)) for turn in turns()]
            file.write(json.dumps({"id": f"chat-{number}", "conversations": conversation}) + "\n")
