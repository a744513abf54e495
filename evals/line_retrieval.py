"""Line retrieval, LongChat's test of long contexts, at any length (the paper's Figure 3).

    python evals/line_retrieval.py --ctx 4k,16k,64k,512k
    python evals/line_retrieval.py --ctx 16k --endpoint http://127.0.0.1:8000/v1 --model NAME
    python evals/line_retrieval.py --test-file 200_lines.jsonl --endpoint URL --model NAME

writes cases, answers, results.json, summary.csv and plots to a folder under runs/. Stopped, it goes on
when the same command is given again, and asks again what failed; other lengths join those that are there.
Exit status 1 means that questions were left without an answer, and are in no score.
"""

import re
from pathlib import Path
from typing import Annotated

from agentic_ring import cli
from agentic_ring.errors import ConfigError
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.token_units import parse_tokens
from evals.lines.endpoint_reader import EndpointReader, Patience, token_counter
from evals.lines.evaluation_run import LineRun, LineRunConfig
from evals.lines.keys import KeyKind
from evals.lines.local_reader import EMBEDDED_KEYS, open_reader
from evals.lines.scores import Rule


def main(
    ctx: Annotated[str | None, cli.optional_flag(metavar="TOKENS,...")] = None,
    test_file: Annotated[tuple[Path, ...], cli.optional_flag(metavar="FILE ...")] = (),
    model: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None,
    endpoint: Annotated[str | None, cli.optional_flag(metavar="URL")] = None,
    completions: Annotated[bool, cli.switch] = False,
    template: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None,
    allow_extrapolation: Annotated[bool, cli.switch] = False,
    devices: int = 1,
    tokenizer: Annotated[Path | None, cli.optional_flag(metavar="PATH")] = None,
    timeout: float = Patience.timeout,
    requests_per_minute: Annotated[float | None, cli.optional_flag(metavar="N")] = None,
    num_samples: int = 50,
    questions_per_document: int = 50,
    line_idx: KeyKind = "LRT-NL",
    max_new_tokens: int = 100,
    score: Rule = "last",
    seed: int = 0,
    resume: bool = True,
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
) -> int:
    """Asks a model for numbers in long records of lines, and scores its answers.

    Args:
      ctx: Lengths, as 4k,16k,512k: template, prompt and answer together fit. Default: 4k,16k, or
        none with --test-file.
      test_file: LongChat's own files, such as longeval/evaluation/lines/testcases/200_lines.jsonl.
      model: Folder or Hugging Face name of a model to run here, or the endpoint's name of it. Default: the
        small embedded one, which was trained on this task.
      endpoint: Base address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1; the key
        comes from OPENAI_API_KEY. Default: the model runs here.
      completions: Send an endpoint bare prompts (/completions), not chat messages.
      template: Chat template for a model here: vicuna_v1.1, llama-3, plain or tokenizer, which is its
        folder's own. Default: tokenizer where there is one, else plain.
      allow_extrapolation: Ask a model here also at lengths that it was not made for.
      devices: Simulated devices that a document is shared out over, where there is only a CPU.
      tokenizer: The endpoint model's tokenizer.json, or its folder, to measure prompts with. Default: an
        estimate, about 3% above LLaMA's own count.
      timeout: Seconds that an endpoint may take for an answer.
      requests_per_minute: At most so many, to an endpoint. Default: no limit.
      num_samples: Questions a length.
      questions_per_document: At most so many questions share a record, which a model here reads once.
      line_idx: Keys of the lines: numbers, letters A to F, UUIDs, or pairs of words as LongChat's files have.
      max_new_tokens: Tokens of an answer at most.
      score: Which number of an answer counts: the last one, as in LongChat, or the first.
      seed: Decides the lines and the questions.
      resume: Go on with the run in the output folder; --no-resume moves it aside and starts anew.
      output: Folder of the run. Default: runs/line_retrieval-MODEL.
    """
    if ctx is None:
        ctx = "" if test_file else "4k,16k"
    contexts = sorted({parse_tokens(text.strip()) for text in ctx.split(",") if text.strip()})
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; an answer needs at least 1")
    if endpoint is None:
        if model is None and line_idx not in EMBEDDED_KEYS:
            raise ConfigError(
                f"line_idx is {line_idx}; the embedded retriever knows {' and '.join(EMBEDDED_KEYS)} alone. "
                "Give another --model for other keys"
            )
        simulate_cpu_devices(devices)
        reader = open_reader(model, contexts, template, allow_extrapolation)
    else:
        patience = Patience(timeout=timeout, requests_per_minute=requests_per_minute)
        reader = open_endpoint(endpoint, model, tokenizer, completions, patience)
    config = LineRunConfig(
        reader=reader.name,
        trained_on_task=reader.trained_on_task,
        source=endpoint or "local",
        completions=completions,
        tokenizer=None if tokenizer is None else str(tokenizer),
        line_idx=line_idx,
        num_samples=num_samples,
        questions_per_document=questions_per_document,
        seed=seed,
        max_new_tokens=max_new_tokens,
        template=template,
    )
    directory = output or Path("runs") / f"line_retrieval-{re.sub(r'[^A-Za-z0-9._-]+', '-', reader.name)}"
    run = LineRun(directory, config, reader)
    scores = []
    for name in run.prepare(contexts, test_file, resume):
        run.ask(name)
        scores = run.report(score)
    return run.conclude(scores, score)


def open_endpoint(
    address: str, model: str | None, tokenizer: Path | None, completions: bool, patience: Patience
) -> EndpointReader:
    """The reader behind an address.

    Raises:
      ConfigError: no model is named.
    """
    if model is None:
        raise ConfigError(f"which model of {address} is to answer? Name it with --model")
    return EndpointReader(address, model, token_counter(tokenizer), completions, patience)


if __name__ == "__main__":
    cli.run(main)
