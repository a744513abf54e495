"""Line retrieval, LongChat's test of long contexts, at any length (the paper's Figure 3).

    python evals/line_retrieval.py --ctx 4k,16k,64k,512k
    python evals/line_retrieval.py --ctx 16k --endpoint http://127.0.0.1:8000/v1 --model NAME
    python evals/line_retrieval.py --test-file 200_lines.jsonl --endpoint URL --model NAME

writes cases, answers, results.json, summary.csv and plots to a folder under runs/. The same command resumes
an interrupted run and asks failed questions again; other lengths are added to the same folder. Exit status
1 means that some questions have no answer or an unfinished one; they count in no score.
"""

from pathlib import Path
from typing import Annotated

import rich
import tyro

from agentic_ring.errors import ConfigError
from agentic_ring.terminal import cli
from evals.retrieval.answers import Prices, forecast_table
from evals.retrieval.reports import LineReport
from evals.retrieval.run import RunFlags, context_lengths
from evals.retrieval.tasks import Rule


def main(
    flags: Annotated[RunFlags, tyro.conf.arg(name="")],
    ctx: Annotated[str | None, cli.optional_flag(metavar="TOKENS,...")] = None,
    test_file: Annotated[tuple[Path, ...], cli.optional_flag(metavar="FILE ...")] = (),
    questions_per_document: int = 50,
    score: Rule = "last",
    dry_run: Annotated[bool, cli.switch] = False,
    prices: Annotated[
        tuple[float, float, float] | None, cli.optional_flag(metavar="PROMPT CACHED ANSWER")
    ] = None,
) -> int:
    """Asks a model for numbers in long records of lines, and scores its answers.

    Args:
      flags: The model, how it is asked, and where the answers go.
      ctx: Context lengths, such as 4k,16k,512k; template, prompt and answer fit into each. Default: 4k,16k,
        or none with --test-file.
      test_file: LongChat's own files, such as longeval/evaluation/lines/testcases/200_lines.jsonl.
      questions_per_document: Maximum number of questions that share a record; a local model reads a record
        only once.
      score: Which number of an answer counts: the last one, as in LongChat, or the first one.
      dry_run: Print how many requests and tokens an endpoint would receive, and ask nothing.
      prices: Prices of a million tokens of prompts, of prompts from the server's cache, and of answers.
        Default: no cost is shown.
    """
    contexts = context_lengths(("" if test_file else "4k,16k") if ctx is None else ctx)
    if flags.endpoint is None and (dry_run or prices is not None):
        raise ConfigError("dry_run and prices are of an endpoint; name one with --endpoint URL")
    if questions_per_document < 1:
        raise ConfigError(f"questions_per_document is {questions_per_document}; it must be at least 1")
    cost = None if prices is None else Prices(*prices)
    report = LineReport(score, cost)
    run = flags.open("line_retrieval", contexts, ["line"], 100, report, questions_per_document)
    with run.prepare(contexts, flags.resume, test_file) as names:
        if dry_run:
            rich.print(forecast_table({name: run.forecast(name) for name in names}, cost).rich())
            return 0
        return run.evaluate(names)


if __name__ == "__main__":
    cli.run(main)
