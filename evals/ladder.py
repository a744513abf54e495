"""A ladder of retrieval tasks on one record: from one line to lists, chains, repeated keys, counts and JSON.

    python evals/ladder.py --ctx 4k,16k,64k --model FOLDER
    python evals/ladder.py --ctx 4k,128k --endpoint http://127.0.0.1:8000/v1 --model NAME

All questions of a length are asked behind one prefilled record, where it has room for all of them; JSON has
a record of its own. Writes records, answers, results.json, summary.csv and a picture to a folder under runs/,
and prints a table of scores with each task's effective length. The same command resumes an interrupted run
and asks failed questions again. Exit status 1 means that some questions have no answer or an unfinished one;
they count in no score.
"""

from pathlib import Path
from typing import Annotated

import tyro

from agentic_ring.errors import ConfigError
from agentic_ring.terminal import cli
from evals.retrieval.reports import LadderReport, ruler_scores
from evals.retrieval.run import RunFlags, context_lengths
from evals.retrieval.tasks import named_tasks


def main(
    flags: Annotated[RunFlags, tyro.conf.arg(name="")],
    ctx: str = "4k,16k",
    tasks: str = "all",
    ruler: Annotated[Path | None, cli.optional_flag(metavar="FILE")] = None,
) -> int:
    """Asks a model questions of several kinds about long records, and scores its answers.

    Args:
      flags: The model, how it is asked, and where the answers go.
      ctx: Context lengths, such as 4k,16k,512k; template, prompt and answer fit into each. Effective lengths
        need 4k among them.
      tasks: Tasks, separated by commas: line, lines, hop2, hop3, occurrence, value, count, json; or all, or
        literal for those whose answer follows from finding equal words.
      ruler: Results of RULER's tasks from evals/harness.py, to be shown in the same table.
    """
    contexts, names = context_lengths(ctx), named_tasks(tasks)
    if not names:
        raise ConfigError("there is no task; give --tasks all, or some of its tasks")
    report = LadderReport({} if ruler is None else ruler_scores(ruler))
    run = flags.open("ladder", contexts, names, 200, report)
    with run.prepare(contexts, flags.resume) as lengths:
        return run.evaluate(lengths)


if __name__ == "__main__":
    cli.run(main)
