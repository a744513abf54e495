"""Perplexity of a model on text: what finetuning did to its language.

    python evals/perplexity.py --model smollm2
    python evals/perplexity.py --model FOLDER --adapter FOLDER --text book.txt --length 8k

The texts follow each other and are divided into windows of equal length, without overlap; what is left at the
end is left out. Every token of a window but the first is predicted from those before it. Without files it
reads those parts of Python's language reference that ``experiments/llama_finetune.py`` never trains on.
Prints figures, and writes results.json to a folder under runs/.
"""

import math
from pathlib import Path
from typing import Annotated

import rich

from agentic_ring.data.text.ordinary_text import held_out_texts
from agentic_ring.errors import ArgumentError
from agentic_ring.files.read_errors import remedy_for
from agentic_ring.files.run_folder import Stages
from agentic_ring.inference.named_model import NamedModel
from agentic_ring.inference.text_engine import TextEngine
from agentic_ring.mesh import make_mesh
from agentic_ring.results.intervals import mean_interval
from agentic_ring.results.results_file import Figure, Results, figure_table, write_results
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import progress
from agentic_ring.token_units import parse_tokens


def main(
    model: Path,
    adapter: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
    text: Annotated[tuple[Path, ...], cli.optional_flag(metavar="FILE...")] = (),
    length: str = "2k",
    allow_extrapolation: Annotated[bool, cli.switch] = False,
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
) -> None:
    """Measures a model's loss on text, in nats per token, and its perplexity.

    Args:
      model: Folder in Hugging Face's layout with its tokenizer.json, GGUF file, or name of a model.
      adapter: LoRA adapter of the model: its folder.
      text: Text files in UTF-8. Default: held-out parts of Python's language reference.
      length: Tokens of a window, such as 2k.
      allow_extrapolation: Allow windows beyond the model's context length.
      output: Folder of the results. Default: runs/perplexity-MODEL.
    """
    found, tokens = NamedModel.find(model, adapter), parse_tokens(length)
    if tokens < 2:
        raise ArgumentError(f"length is {length}; a window needs at least 2 tokens")
    found.context(tokens, allow_extrapolation)
    tokenizer = found.tokenizer()
    ids = tokenizer.encode("\n\n".join([_read(path) for path in text] or held_out_texts()))
    windows = [ids[start : start + tokens] for start in range(0, len(ids) - tokens + 1, tokens)]
    if not windows:
        raise ArgumentError(f"the text has {len(ids)} tokens; give more, or a --length below {tokens}")
    stages, losses = Stages(), []
    with stages.stage("model"):
        mesh = make_mesh()
        engine = TextEngine(found.load(mesh, context=tokens), mesh)
    with stages.stage("text"), progress("windows", len(windows)) as advance:
        for window in windows:
            (score,) = engine.score([(window[:1], window[1:])])
            losses.append(-math.fsum(score.log_probabilities) / len(score.tokens))
            advance(len(losses), f"{sum(losses) / len(losses):.3f} nats a token")
    loss = mean_interval(losses, "windows")
    low, high = (None if bound is None else math.exp(bound) for bound in (loss.low, loss.high))
    figures = [
        Figure.from_interval("loss", loss, "nats/token"),
        Figure("perplexity", math.exp(loss.value), "", low, high, loss.n, over=loss.over),
    ]
    config = {"model": found.name, "text": [path.name for path in text], "length": tokens}
    folder = output or Path("runs") / f"perplexity-{found.name}"
    write_results(folder / "results.json", Results.of_this_process(config, stages.seconds, figures))
    rich.print(figure_table(figures, f"{found.name}, windows of {length} tokens"))
    print(f"written to {folder / 'results.json'}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = remedy_for(error, "give text files in UTF-8")
        raise ArgumentError(f"{path} cannot be read as text ({error}); {remedy}") from error


if __name__ == "__main__":
    cli.run(main)
