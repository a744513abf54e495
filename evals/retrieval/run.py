"""A resumable run: documents, answers and scores in one folder."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from agentic_ring.errors import ConfigError
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import json_row, read_json_rows
from agentic_ring.files.run_folder import Stages, enter_directory
from agentic_ring.results.results_file import Results, write_results
from agentic_ring.terminal.progress import progress, say
from agentic_ring.token_units import short_tokens
from evals.retrieval.documents import Document, longest_document, plan_lines
from evals.retrieval.keys import KeyKind
from evals.retrieval.ladder_documents import ladder_documents
from evals.retrieval.ladder_report import LadderReport
from evals.retrieval.line_report import LineReport
from evals.retrieval.longchat_files import read_cases, write_cases
from evals.retrieval.prediction_log import PredictionLog, asked_questions
from evals.retrieval.prices import Forecast
from evals.retrieval.readers import Reader
from evals.retrieval.scores import SetScore


@dataclass(frozen=True)
class RetrievalConfig:
    """Everything that determines an answer except the length: one folder holds all lengths.

    Attributes:
      test: line retrieval, whose documents are LongChat's, or the ladder of tasks.
      reader: name of the model.
      trained_on_task: whether the model was trained on line retrieval itself.
      tasks: names of the tasks, separated by commas.
      line_idx: kind of keys.
      num_samples: questions per task and length.
      seed: seed of the documents and questions.
      max_new_tokens: maximum number of tokens of an answer.
      source: the endpoint, or "local".
      completions: whether the endpoint receives bare prompts.
      tokenizer: tokenizer that measures prompts for an endpoint, or None for an estimate.
      questions_per_document: maximum number of questions about one document of line retrieval; None for
        the ladder, whose documents take as many as fit.
      template: chat template of a local model, or None for its own.
      request_json: more fields of the endpoint's requests, as JSON text, or None.
    """

    test: Literal["line_retrieval", "ladder"]
    reader: str
    trained_on_task: bool
    tasks: str
    line_idx: KeyKind
    num_samples: int
    seed: int
    max_new_tokens: int
    source: str = "local"
    completions: bool = False
    tokenizer: str | None = None
    questions_per_document: int | None = None
    template: str | None = None
    request_json: str | None = None


class RetrievalRun:
    """A folder of documents and answers.

    testcases/NAME.jsonl      the questions with their documents; of line retrieval in LongChat's format
    predictions/NAME.jsonl    the answers, one row each as soon as it is known
    results.json, summary.csv, and what else the report writes
    """

    def __init__(
        self, directory: Path, config: RetrievalConfig, reader: Reader, report: LineReport | LadderReport
    ):
        self._directory, self._config, self._reader, self._report = directory, config, reader, report
        self._stages = Stages()

    @contextmanager
    def prepare(
        self, contexts: Sequence[int], resume: bool, files: Sequence[Path] = ()
    ) -> Iterator[list[str]]:
        """Generates all documents, or reads LongChat's files; in the block no other process may write here.

        Yields:
          Names of the sets: first the lengths in ascending order, then the files.

        Raises:
          FolderInUseError: another process writes to the folder.
          ConfigError: there is no set, two have the same name, or a length is too short; or the folder holds
            another run.
          DataError: a file cannot be read.
        """
        names = [short_tokens(context) for context in contexts] + [path.stem for path in files]
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"the sets of questions are {names or 'none'}; expected at least one, such as --ctx 4k,16k, "
                "with different names"
            )
        if self._config.num_samples < 1:
            raise ConfigError(f"num_samples is {self._config.num_samples}; it must be at least 1")
        from_files = [read_cases(path) for path in files]
        with enter_directory(self._directory, self._config, resume):
            self._stages.keep_in(self._directory)
            with self._stages.stage("cases"):
                for name, context in zip(names, contexts, strict=False):
                    if not self._cases(name).exists():
                        self._write(name, self._make(name, context))
                for name, documents in zip(names[len(contexts) :], from_files, strict=True):
                    if not self._cases(name).exists():
                        self._write(name, documents)
                    elif not _same(self._read(name), documents):
                        raise ConfigError(
                            f"{self._directory} holds other cases with the name {name}; give another --output"
                        )
            yield names

    def ask(self, name: str) -> None:
        """Asks the questions of a set that have no answer yet."""
        documents, log = self._opened(name)
        pairs_of_words = self._config.line_idx == "LRT-NL" and self._config.test == "line_retrieval"
        total = sum(len(document.questions) for document in documents)
        started, answered = time.monotonic(), 0
        with self._stages.stage(name), progress(f"questions of {name}", total) as advance:
            for document, asked in log.open(documents):
                texts = [each.question.text for each in asked]
                for index, answer in self._reader.answers(document.text, texts, self._config.max_new_tokens):
                    log.add(asked[index].predicted(answer, document.text, pairs_of_words))
                    answered += answer.error is None
                    advance(len(log.rows), f"{log.failed} failed" if log.failed else "")
        seconds = time.monotonic() - started
        if answered:
            say(f"{name}: {answered} questions in {seconds:.2f} s, {60 * answered / seconds:,.0f} a minute")

    def forecast(self, name: str) -> Forecast:
        """What the questions of a set that have no answer yet will ask of a server."""
        documents, log = self._opened(name)
        requests = prompt_tokens = repeated_tokens = 0
        for document, asked in log.open(documents):
            tokens = self._reader.count_tokens(document.text, asked[0].question.text)
            requests += len(asked)
            prompt_tokens += tokens * len(asked)
            repeated_tokens += tokens * (len(asked) - 1)
        answer_tokens = requests * self._config.max_new_tokens
        return Forecast(requests, prompt_tokens, repeated_tokens, answer_tokens)

    def score(self) -> list[SetScore]:
        """Writes results and report of all sets that were asked completely, and returns their scores."""
        scores = []
        for path in sorted((self._directory / "testcases").glob("*.jsonl")):
            documents, log = self._opened(path.stem)
            if log.complete:
                lines = sum(document.num_lines for document in documents) / len(documents)
                rows = [log.rows[case] for case in range(len(log.rows))]
                scores.append(SetScore(path.stem, lines, rows))
        scores.sort(key=lambda score: score.prompt_tokens)
        settings = {**asdict(self._config), **self._report.settings}
        results = Results.of_this_process(settings, self._stages.seconds, self._report.figures(scores))
        write_results(self._directory / "results.json", results)
        self._report.write(self._directory, self._reader.name, scores)
        return scores

    def conclude(self, scores: Sequence[SetScore]) -> int:
        """Prints the table; returns the exit status, 1 if questions failed or answers are unfinished."""
        title = f"{self._report.title}, {self._reader.name}"
        if self._reader.trained_on_task:
            title += " (trained on line retrieval)"
        console = Console(width=None if sys.stdout.isatty() else 200)
        table = self._report.table(scores, title)
        console.print(table.rich(), *table.notes)
        console.print(f"written to {self._directory}: results.json, summary.csv, answers and plots")
        rows = [row for score in scores for row in score.predictions]
        failures = [row.error for row in rows if row.error is not None]
        if failures:
            say(
                f"{len(failures)} questions have no answer and count in no score; the last error: "
                f"{failures[-1]}. Run the same command again to ask them again"
            )
        unfinished = [row.unfinished for row in rows if row.unfinished is not None]
        if unfinished:
            say(
                f"{len(unfinished)} answers are unfinished and count in no score; the last one: "
                f"{unfinished[-1]}. Ask with a larger --max-new-tokens, or turn reasoning off with "
                "--request-json"
            )
        return 1 if failures or unfinished else 0

    def evaluate(self, names: Sequence[str]) -> int:
        """Asks all questions, writes the results after each set, and returns the exit status."""
        scores = []
        for name in names:
            self.ask(name)
            scores = self.score()
        return self.conclude(scores)

    def _make(self, name: str, context: int) -> list[Document]:
        config, count = self._config, self._reader.count_tokens
        room = context - config.max_new_tokens
        if config.test == "ladder":
            tasks = config.tasks.split(",")
            return ladder_documents(
                tasks, config.line_idx, name, config.seed, config.num_samples, room, count
            )
        each = config.questions_per_document or config.num_samples
        plans = plan_lines(config.line_idx, name, config.seed, config.num_samples, each)
        return [longest_document(plan, room, count) for plan in plans]

    def _read(self, name: str) -> list[Document]:
        if self._config.test == "line_retrieval":
            return read_cases(self._cases(name))
        remedy = "give another --output, or --no-resume to start anew"
        return read_json_rows(self._cases(name), Document, remedy)

    def _write(self, name: str, documents: Sequence[Document]) -> None:
        if self._config.test == "line_retrieval":
            write_cases(self._cases(name), documents)
        else:
            with replacing(self._cases(name)) as beside, beside.open("w", encoding="utf-8") as file:
                file.writelines(json_row(asdict(document)) for document in documents)

    def _opened(self, name: str) -> tuple[list[Document], PredictionLog]:
        """The documents of a set, and the answers to their questions so far."""
        documents = self._read(name)
        path = self._directory / "predictions" / f"{name}.jsonl"
        return documents, PredictionLog(path, asked_questions(documents))

    def _cases(self, name: str) -> Path:
        path = self._directory / "testcases" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _same(first: Sequence[Document], second: Sequence[Document]) -> bool:
    """Whether records and questions are the same."""
    return [(d.text, d.questions) for d in first] == [(d.text, d.questions) for d in second]
