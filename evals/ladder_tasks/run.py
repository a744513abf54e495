"""A resumable run of the ladder: records, answers and scores in one folder."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from agentic_ring.errors import ConfigError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import json_row, read_json_rows
from agentic_ring.files.run_folder import Stages, enter_directory
from agentic_ring.results.results_file import Results, write_results
from agentic_ring.terminal.progress import progress
from agentic_ring.token_units import short_tokens
from evals.ladder_tasks.documents import LadderDocument, LadderPlan
from evals.ladder_tasks.report import (
    LengthScore,
    TaskAnswer,
    figures,
    plot_ladder,
    score_table,
    write_summary,
)
from evals.ladder_tasks.tasks import TASKS, Record
from evals.lines.evaluation_run import open_questions, prompt_digests, say_what_is_missing
from evals.lines.keys import KeyKind
from evals.lines.longchat_prompt import longest_document
from evals.lines.prediction_log import PredictionLog
from evals.lines.readers import Reader


@dataclass(frozen=True)
class LadderConfig:
    """Everything that determines an answer except the length: one folder holds all lengths.

    Attributes:
      reader: name of the model.
      trained_on_task: whether the model was trained on line retrieval itself.
      source: the endpoint, or "local".
      completions: whether the endpoint receives bare prompts.
      tokenizer: tokenizer that measures prompts for an endpoint, or None for an estimate.
      tasks: names of the tasks, separated by commas.
      line_idx: kind of keys.
      num_samples: questions per task and length.
      seed: seed of the records and questions.
      max_new_tokens: maximum number of tokens of an answer.
      template: chat template of a local model, or None for its own.
      request_json: more fields of the endpoint's requests, as JSON text, or None.
    """

    reader: str
    trained_on_task: bool
    source: str
    completions: bool
    tokenizer: str | None
    tasks: str
    line_idx: KeyKind
    num_samples: int
    seed: int
    max_new_tokens: int
    template: str | None = None
    request_json: str | None = None


class LadderRun:
    """A folder of records and answers.

    records/LENGTH.jsonl       records with their questions, one row each
    predictions/LENGTH.jsonl   the answers, one row each as soon as it is known
    results.json, summary.csv, ladder.png
    """

    def __init__(self, directory: Path, config: LadderConfig, reader: Reader):
        self._directory, self._config, self._reader = directory, config, reader
        self._stages = Stages()

    @contextmanager
    def prepare(self, contexts: Sequence[int], resume: bool) -> Iterator[list[str]]:
        """Generates all records; during the block this process is the only writer of the folder.

        Yields:
          Names of the lengths in ascending order.

        Raises:
          FolderInUseError: another process writes to the folder.
          ConfigError: no length is given, or one is too short; or the folder holds another run.
        """
        if not contexts:
            raise ConfigError("there is no length; give some, such as --ctx 4k,16k")
        if self._config.num_samples < 1:
            raise ConfigError(f"num_samples is {self._config.num_samples}; it must be at least 1")
        with enter_directory(self._directory, self._config, resume):
            self._stages.keep_in(self._directory)
            with self._stages.stage("records"):
                for context in contexts:
                    path = self._records(short_tokens(context))
                    if not path.exists():
                        documents = self._make(context)
                        with replacing(path) as beside, beside.open("w", encoding="utf-8") as file:
                            file.writelines(json_row(asdict(document)) for document in documents)
            yield [short_tokens(context) for context in contexts]

    def ask(self, name: str) -> None:
        """Asks the questions of a length that have no answer yet."""
        documents = self._read(name)
        prompts = prompt_digests(documents)
        log = PredictionLog(self._predictions(name), prompts, TaskAnswer)
        with self._stages.stage(name), progress(f"questions of {name}", len(prompts)) as advance:
            for document, asked in open_questions(documents, log):
                if not asked:
                    continue
                texts = [question.text for _, question in asked]
                for index, answer in self._reader.answers(document.text, texts, self._config.max_new_tokens):
                    case, question = asked[index]
                    log.add(TaskAnswer.of(case, question, answer, prompts[case]))
                    failed = sum(row.error is not None for row in log.rows.values())
                    advance(len(log.rows), f"{failed} failed" if failed else "")

    def report(self) -> list[LengthScore]:
        """Writes results, summary and picture of all completed lengths, and returns their scores."""
        scores = []
        for path in sorted((self._directory / "records").glob("*.jsonl")):
            prompts = prompt_digests(self._read(path.stem))
            log = PredictionLog(self._predictions(path.stem), prompts, TaskAnswer)
            if all(case in log.rows for case in range(len(prompts))):
                scores.append(LengthScore(path.stem, [log.rows[case] for case in range(len(prompts))]))
        scores.sort(key=lambda score: score.prompt_tokens)
        write_summary(self._directory / "summary.csv", scores)
        results = Results.of_this_process(asdict(self._config), self._stages.seconds, figures(scores))
        write_results(self._directory / "results.json", results)
        if any(score.answered() for score in scores):
            plot_ladder(self._directory / "ladder.png", self._reader.name, scores)
        return scores

    def conclude(
        self, scores: Sequence[LengthScore], ruler: Mapping[str, Mapping[int, float]] | None = None
    ) -> int:
        """Prints the table; returns the exit status, 1 if questions failed or answers are unfinished."""
        title = f"ladder, {self._reader.name}"
        if self._reader.trained_on_task:
            title += " (trained on line retrieval)"
        console = Console(width=None if sys.stdout.isatty() else 200)
        table = score_table(scores, title, ruler)
        console.print(table.rich(), *table.notes)
        console.print(f"written to {self._directory}: results.json, summary.csv, ladder.png and answers")
        return say_what_is_missing([row for score in scores for row in score.rows])

    def _make(self, context: int) -> list[LadderDocument]:
        """As few records as hold all questions; each kind of record has its own."""
        tasks = self._config.tasks.split(",")
        documents = []
        for record in ("lines", "json"):
            of_record = [task for task in tasks if TASKS[task].record == record]
            if of_record:
                documents += self._fewest(context, record, of_record)
        return documents

    def _fewest(self, context: int, record: Record, tasks: Sequence[str]) -> list[LadderDocument]:
        config = self._config
        room = context - config.max_new_tokens
        for records in range(1, config.num_samples + 1):
            shares = [len(range(number, config.num_samples, records)) for number in range(records)]
            plans = [
                LadderPlan(
                    config.line_idx,
                    short_tokens(context),
                    config.seed,
                    number,
                    record,
                    tuple((task, share) for task in tasks),
                )
                for number, share in enumerate(shares)
            ]
            try:
                return [longest_document(plan, room, self._reader.count_tokens) for plan in plans]
            except ConfigError:
                if records == config.num_samples:
                    raise
        raise AssertionError("the last try returns or raises")

    def _read(self, name: str) -> list[LadderDocument]:
        remedy = "give another --output, or --no-resume to start anew"
        return read_json_rows(self._records(name), LadderDocument, remedy)

    def _records(self, name: str) -> Path:
        path = self._directory / "records" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _predictions(self, name: str) -> Path:
        return self._directory / "predictions" / f"{name}.jsonl"
