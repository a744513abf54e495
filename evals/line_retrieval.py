"""Line retrieval, LongChat's test of long contexts, at any length (the paper's Figure 3).

    python evals/line_retrieval.py --ctx 4k,16k,64k,512k
    python evals/line_retrieval.py --ctx 16k --endpoint http://127.0.0.1:8000/v1 --model NAME
    python evals/line_retrieval.py --test-file 200_lines.jsonl --endpoint URL --model NAME

writes cases, answers, results.json, summary.csv and plots to a folder under runs/. The same command resumes
an interrupted run and asks failed questions again; other lengths are added to the same folder. Exit status
1 means that some questions have no answer or an unfinished one; they count in no score.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import rich

from agentic_ring.errors import ConfigError
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.terminal import cli
from agentic_ring.token_units import parse_tokens
from evals.lines.endpoint_reader import LEAST_SHARE, LEAST_SHARE_COUNTED, EndpointModel, EndpointReader
from evals.lines.evaluation_run import LineRun, LineRunConfig
from evals.lines.keys import KeyKind
from evals.lines.local_reader import EMBEDDED_KEYS, open_reader
from evals.lines.prices import Prices, forecast_table
from evals.lines.request_limits import RequestPolicy
from evals.lines.scores import Rule
from evals.lines.token_counts import token_counter


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
    request_json: Annotated[str | None, cli.optional_flag(metavar="JSON")] = None,
    timeout: float = RequestPolicy.timeout,
    concurrency: int = RequestPolicy.concurrency,
    requests_per_minute: Annotated[float | None, cli.optional_flag(metavar="N")] = None,
    dry_run: Annotated[bool, cli.switch] = False,
    prices: Annotated[
        tuple[float, float, float] | None, cli.optional_flag(metavar="PROMPT CACHED ANSWER")
    ] = None,
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
      ctx: Context lengths, such as 4k,16k,512k; template, prompt and answer fit into each. Default: 4k,16k,
        or none with --test-file.
      test_file: LongChat's own files, such as longeval/evaluation/lines/testcases/200_lines.jsonl.
      model: Folder or Hugging Face name of a model to run locally, or the endpoint's name of its model.
        Default: the small embedded retriever, which was trained on this task.
      endpoint: Base address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1; the key
        comes from OPENAI_API_KEY. Default: the model runs locally.
      completions: Send bare prompts to the endpoint (/completions) instead of chat messages.
      template: Chat template of a local model: vicuna_v1.1, llama-3, plain, or tokenizer for the one in the
        model's folder. Default: tokenizer if the folder has one, else plain.
      allow_extrapolation: Allow contexts that are longer than a local model supports.
      devices: Number of simulated devices that a document is sharded over, on a machine with only a CPU.
      tokenizer: The endpoint model's tokenizer.json, or its folder, to count the tokens of prompts. Default:
        an estimate, about 3% above LLaMA's own count.
      request_json: More fields of each request to an endpoint, such as
        '{"chat_template_kwargs": {"enable_thinking": false}}'; null takes a field away, as in
        '{"max_tokens": null, "max_completion_tokens": 200}'.
      timeout: Seconds that an endpoint may take to answer.
      concurrency: Maximum number of requests to an endpoint at a time. The first question about a record
        goes alone, and there are fewer at a time while the server answers 429.
      requests_per_minute: Maximum rate of requests to an endpoint. Default: no limit.
      dry_run: Print how many requests and tokens an endpoint would receive, and ask nothing.
      prices: Prices of a million tokens of prompts, of prompts from the server's cache, and of answers.
        Default: no cost is shown.
      num_samples: Number of questions per length.
      questions_per_document: Maximum number of questions that share a record; a local model reads a record
        only once.
      line_idx: Keys of the lines: numbers (LRT), words of the letters A to F (LRT-ABCindex), UUIDs
        (LRT-UUID), or adjective-noun pairs as in LongChat's files (LRT-NL).
      max_new_tokens: Maximum number of tokens of an answer.
      score: Which number of an answer counts: the last one, as in LongChat, or the first one.
      seed: Seed of the lines and the questions.
      resume: Continue the run in the output folder; --no-resume moves it aside and starts a new one.
      output: Folder of the run. Default: runs/line_retrieval-MODEL.
    """
    contexts = context_lengths(("" if test_file else "4k,16k") if ctx is None else ctx)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; an answer needs at least 1")
    if endpoint is None and (dry_run or request_json is not None or prices is not None):
        raise ConfigError("dry_run, request_json and prices are of an endpoint; name one with --endpoint URL")
    cost = None if prices is None else Prices(*prices)
    if endpoint is None:
        check_embedded_keys(model, line_idx)
        simulate_cpu_devices(devices)
        reader = open_reader(model, contexts, template, allow_extrapolation)
    else:
        policy = RequestPolicy(timeout, requests_per_minute=requests_per_minute, concurrency=concurrency)
        fields = request_fields(request_json)
        max_new_tokens = answer_limit(fields, max_new_tokens)
        reader = open_endpoint(endpoint, model, tokenizer, completions, fields, policy)
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
        request_json=request_json,
    )
    directory = output or Path("runs") / f"line_retrieval-{re.sub(r'[^A-Za-z0-9._-]+', '-', reader.name)}"
    run = LineRun(directory, config, reader)
    with run.prepare(contexts, test_file, resume) as names:
        if dry_run:
            rich.print(forecast_table([run.forecast(name) for name in names], cost).rich())
            return 0
        return evaluate(run, names, score, cost)


def evaluate(run: LineRun, names: Sequence[str], score: Rule, prices: Prices | None) -> int:
    """Asks all questions of a run, writes its results after each set, and returns the exit status."""
    scores = []
    for name in names:
        run.ask(name)
        scores = run.report(score, prices)
    return run.conclude(scores, score, prices)


def request_fields(text: str | None) -> dict[str, Any] | None:
    """The fields in a JSON object.

    Raises:
      ConfigError: the text is none.
    """
    if text is None:
        return None
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"request_json is {text!r}, which is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"request_json is {text!r}; expected an object such as " + '{"top_p": 1}')
    return fields


def answer_limit(fields: Mapping[str, Any] | None, max_new_tokens: int) -> int:
    """The limit of an answer's tokens: that of the fields of a request, if they have one."""
    limits = [(fields or {}).get(name) for name in ("max_completion_tokens", "max_tokens")]
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), max_new_tokens)


def context_lengths(text: str) -> list[int]:
    """The lengths in a list such as ``4k,16k``, in ascending order and without duplicates."""
    return sorted({parse_tokens(length.strip()) for length in text.split(",") if length.strip()})


def check_embedded_keys(model: str | None, line_idx: KeyKind) -> None:
    """Refuses keys that the embedded retriever was not trained on.

    Raises:
      ConfigError: no model is named, and the keys are of another kind.
    """
    if model is None and line_idx not in EMBEDDED_KEYS:
        raise ConfigError(
            f"line_idx is {line_idx}; the embedded retriever knows only {' and '.join(EMBEDDED_KEYS)}. "
            "Name another --model for other keys"
        )


def open_endpoint(
    address: str,
    model: str | None,
    tokenizer: Path | None,
    completions: bool,
    fields: dict[str, Any] | None,
    policy: RequestPolicy,
) -> EndpointReader:
    """The reader of an endpoint.

    Raises:
      ConfigError: no model is named.
    """
    if model is None:
        raise ConfigError(f"which model of {address} should answer? Name it with --model")
    asked = EndpointModel(address, model, completions, fields)
    least_share = LEAST_SHARE if tokenizer is None else LEAST_SHARE_COUNTED
    return EndpointReader(asked, token_counter(tokenizer), policy, least_share)


if __name__ == "__main__":
    cli.run(main)
