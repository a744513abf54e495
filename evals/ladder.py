"""A ladder of retrieval tasks on one record: from one line to lists, chains, repeated keys, counts and JSON.

    python evals/ladder.py --ctx 4k,16k,64k --model FOLDER
    python evals/ladder.py --ctx 4k,128k --endpoint http://127.0.0.1:8000/v1 --model NAME

All questions of a length are asked behind one prefilled record, where it has room for all of them; JSON has
a record of its own. Writes records, answers, results.json, summary.csv and a picture to a folder under runs/,
and prints a table of scores with each task's effective length. The same command resumes an interrupted run
and asks failed questions again. Exit status 1 means that some questions have no answer or an unfinished one;
they count in no score.
"""

import re
from pathlib import Path
from typing import Annotated

from agentic_ring.errors import ConfigError
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.terminal import cli
from evals.ladder_tasks.report import ruler_scores
from evals.ladder_tasks.run import LadderConfig, LadderRun
from evals.ladder_tasks.tasks import named_tasks
from evals.line_retrieval import (
    answer_limit,
    check_embedded_keys,
    context_lengths,
    open_endpoint,
    request_fields,
)
from evals.lines.keys import KeyKind
from evals.lines.local_reader import open_reader
from evals.lines.request_limits import RequestPolicy


def main(
    ctx: str = "4k,16k",
    tasks: str = "all",
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
    num_samples: int = 50,
    line_idx: KeyKind = "LRT-NL",
    max_new_tokens: int = 200,
    seed: int = 0,
    ruler: Annotated[Path | None, cli.optional_flag(metavar="FILE")] = None,
    resume: bool = True,
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None,
) -> int:
    """Asks a model questions of several kinds about long records, and scores its answers.

    Args:
      ctx: Context lengths, such as 4k,16k,512k; template, prompt and answer fit into each. Effective lengths
        need 4k among them.
      tasks: Tasks, separated by commas: line, lines, hop2, hop3, occurrence, value, count, json; or all, or
        literal for those whose answer follows from finding equal words.
      model: Folder or Hugging Face name of a model to run locally, or the endpoint's name of its model.
        Default: the small embedded retriever, which was trained on the task line only.
      endpoint: Base address of an OpenAI-compatible server; the key comes from OPENAI_API_KEY. Default: the
        model runs locally.
      completions: Send bare prompts to the endpoint (/completions) instead of chat messages.
      template: Chat template of a local model: vicuna_v1.1, llama-3, plain, or tokenizer for the one in the
        model's folder. Default: tokenizer if the folder has one, else plain.
      allow_extrapolation: Allow contexts that are longer than a local model supports.
      devices: Number of simulated devices that a record is sharded over, on a machine with only a CPU.
      tokenizer: The endpoint model's tokenizer.json, or its folder, to count the tokens of prompts. Default:
        an estimate.
      request_json: More fields of each request to an endpoint, as a JSON object; null takes a field away.
      timeout: Seconds that an endpoint may take to answer.
      concurrency: Maximum number of requests to an endpoint at a time.
      num_samples: Number of questions per task and length.
      line_idx: Keys of the lines: numbers (LRT), words of the letters A to F (LRT-ABCindex), UUIDs
        (LRT-UUID), or adjective-noun pairs (LRT-NL).
      max_new_tokens: Maximum number of tokens of an answer.
      seed: Seed of the records and the questions.
      ruler: Results of RULER's tasks from evals/harness.py, to be shown in the same table.
      resume: Continue the run in the output folder; --no-resume moves it aside and starts a new one.
      output: Folder of the run. Default: runs/ladder-MODEL.
    """
    contexts, names = context_lengths(ctx), named_tasks(tasks)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; an answer needs at least 1")
    if not names:
        raise ConfigError("there is no task; give --tasks all, or some of its tasks")
    beside = None if ruler is None else ruler_scores(ruler)
    if endpoint is None:
        if request_json is not None:
            raise ConfigError("request_json is of an endpoint; name one with --endpoint URL")
        check_embedded_keys(model, line_idx)
        simulate_cpu_devices(devices)
        reader = open_reader(model, contexts, template, allow_extrapolation)
    else:
        policy = RequestPolicy(timeout, concurrency=concurrency)
        fields = request_fields(request_json)
        max_new_tokens = answer_limit(fields, max_new_tokens)
        reader = open_endpoint(endpoint, model, tokenizer, completions, fields, policy)
    config = LadderConfig(
        reader=reader.name,
        trained_on_task=reader.trained_on_task,
        source=endpoint or "local",
        completions=completions,
        tokenizer=None if tokenizer is None else str(tokenizer),
        tasks=",".join(names),
        line_idx=line_idx,
        num_samples=num_samples,
        seed=seed,
        max_new_tokens=max_new_tokens,
        template=template,
        request_json=request_json,
    )
    directory = output or Path("runs") / f"ladder-{re.sub(r'[^A-Za-z0-9._-]+', '-', reader.name)}"
    run = LadderRun(directory, config, reader)
    with run.prepare(contexts, resume) as lengths:
        scores = []
        for length in lengths:
            run.ask(length)
            scores = run.report()
        return run.conclude(scores, beside)


if __name__ == "__main__":
    cli.run(main)
