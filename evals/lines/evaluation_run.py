"""A resumable run of line retrieval: cases, answers and scores in one folder."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agentic_ring.errors import ConfigError
from agentic_ring.files.run_folder import Stages, enter_directory
from agentic_ring.results.results_file import Results, write_results
from agentic_ring.terminal.progress import progress, say
from agentic_ring.token_units import short_tokens
from evals.lines.accuracy_plots import plot_accuracy, plot_depths, plot_word_partners
from evals.lines.keys import KeyKind
from evals.lines.longchat_files import read_cases, write_cases
from evals.lines.longchat_prompt import (
    Document,
    DocumentT,
    LineDocument,
    LineQuestion,
    longest_document,
    plan_documents,
)
from evals.lines.prediction_log import Prediction, PredictionLog, Row, prompt_digest
from evals.lines.prices import Forecast, Prices
from evals.lines.readers import Answer, Reader
from evals.lines.scores import Rule, SetScore, parsed_number, score_table, write_responses, write_summary
from evals.lines.word_partners import count_word_partners


@dataclass(frozen=True)
class LineRunConfig:
    """Everything that determines an answer except the length: one folder holds all lengths.

    Attributes:
      reader: name of the model.
      trained_on_task: whether the model was trained on line retrieval itself.
      source: the endpoint, or "local".
      completions: whether the endpoint receives bare prompts.
      request_json: more fields of the endpoint's requests, as JSON text, or None.
      tokenizer: tokenizer that measures prompts for an endpoint, or None for an estimate.
      line_idx: kind of keys.
      num_samples: questions per length.
      questions_per_document: maximum number of questions about one document.
      seed: seed of the lines and questions.
      max_new_tokens: maximum number of tokens of an answer.
      template: chat template of a local model, or None for its own.
    """

    reader: str
    trained_on_task: bool
    source: str
    completions: bool
    tokenizer: str | None
    line_idx: KeyKind
    num_samples: int
    questions_per_document: int
    seed: int
    max_new_tokens: int
    template: str | None = None
    request_json: str | None = None


class LineRun:
    """A folder of cases and answers.

    testcases/NAME.jsonl               the cases, in LongChat's format
    predictions/NAME.jsonl             the answers, one row each as soon as it is known
    predictions/NAME_response.txt      the same in LongEval's format
    results.json, summary.csv, accuracy.png, depths.png
    word_partners.png                  only for keys of words
    """

    def __init__(self, directory: Path, config: LineRunConfig, reader: Reader):
        self._directory = directory
        self._config = config
        self._reader = reader
        self._stages = Stages()

    @contextmanager
    def prepare(self, contexts: Sequence[int], files: Sequence[Path], resume: bool) -> Iterator[list[str]]:
        """Generates or reads all cases; during the block this process is the only writer of the folder.

        Yields:
          Names of the sets: first the lengths in ascending order, then the files.

        Raises:
          FolderInUseError: another process writes to the folder.
          ConfigError: there are no cases, two sets have the same name, or the folder holds another run.
          DataError: a file cannot be read.
        """
        names = [short_tokens(context) for context in contexts] + [path.stem for path in files]
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"the sets of cases are {names or 'none'}; expected at least one, with different names"
            )
        from_files = [read_cases(path) for path in files]
        with enter_directory(self._directory, self._config, resume):
            self._stages.keep_in(self._directory)
            with self._stages.stage("cases"):
                for name, context in zip(names, contexts, strict=False):
                    if not self._cases(name).exists():
                        write_cases(self._cases(name), self._make(name, context))
                for name, documents in zip(names[len(contexts) :], from_files, strict=True):
                    if not self._cases(name).exists():
                        write_cases(self._cases(name), documents)
                    elif not _same(read_cases(self._cases(name)), documents):
                        raise ConfigError(
                            f"{self._directory} holds other cases with the name {name}; give another --output"
                        )
            yield names

    def ask(self, name: str) -> None:
        """Asks the questions of a set that have no answer yet."""
        documents = read_cases(self._cases(name))
        prompts = prompt_digests(documents)
        log = PredictionLog(self._predictions(name), prompts, Prediction)
        started, answered = time.monotonic(), 0
        with self._stages.stage(name), progress(f"questions of {name}", len(prompts)) as advance:
            for number, (document, asked) in enumerate(open_questions(documents, log)):
                if not asked:
                    continue
                texts = [question.text for _, question in asked]
                answers = self._reader.answers(document.text, texts, self._config.max_new_tokens)
                for index, answer in answers:
                    case, question = asked[index]
                    partners = (
                        count_word_partners(document.text, str(question.key))
                        if self._config.line_idx == "LRT-NL" and "-" in str(question.key)
                        else None
                    )
                    log.add(_prediction(case, number, question, answer, prompts[case], partners))
                    answered += answer.error is None
                    failed = sum(row.error is not None for row in log.rows.values())
                    advance(len(log.rows), f"{failed} failed" if failed else "")
        seconds = time.monotonic() - started
        if answered:
            say(f"{name}: {answered} questions in {seconds:.2f} s, {60 * answered / seconds:,.0f} a minute")

    def forecast(self, name: str) -> Forecast:
        """What the questions of a set that have no answer yet will ask of a server."""
        documents = read_cases(self._cases(name))
        log = PredictionLog(self._predictions(name), prompt_digests(documents), Prediction)
        requests = prompt_tokens = repeated_tokens = 0
        for document, asked in open_questions(documents, log):
            if asked:
                tokens = self._reader.count_tokens(document.text, asked[0][1].text)
                requests += len(asked)
                prompt_tokens += tokens * len(asked)
                repeated_tokens += tokens * (len(asked) - 1)
        answer_tokens = requests * self._config.max_new_tokens
        return Forecast(name, requests, prompt_tokens, repeated_tokens, answer_tokens)

    def report(self, rule: Rule, prices: Prices | None = None) -> list[SetScore]:
        """Writes results, summary, responses and plots of all completed sets, and returns their scores."""
        scores = []
        for path in sorted((self._directory / "testcases").glob("*.jsonl")):
            documents = read_cases(path)
            prompts = prompt_digests(documents)
            log = PredictionLog(self._predictions(path.stem), prompts, Prediction)
            if all(case in log.rows for case in range(len(prompts))):
                lines = sum(document.num_lines for document in documents) / len(documents)
                scores.append(SetScore(path.stem, lines, [log.rows[case] for case in range(len(prompts))]))
        scores.sort(key=lambda score: score.prompt_tokens)
        for each in scores:
            write_responses(self._directory / "predictions" / f"{each.name}_response.txt", each, rule)
        write_summary(self._directory / "summary.csv", scores, rule)
        figures = [figure for each in scores for figure in each.figures(rule, prices)]
        settings = {**asdict(self._config), "score": rule}
        results = Results.of_this_process(settings, self._stages.seconds, figures)
        write_results(self._directory / "results.json", results)
        if any(each.answered for each in scores):
            plot_accuracy(self._directory / "accuracy.png", self._reader.name, scores, rule)
            plot_depths(self._directory / "depths.png", self._reader.name, scores, rule)
            plot_word_partners(self._directory / "word_partners.png", self._reader.name, scores, rule)
        return scores

    def conclude(self, scores: Sequence[SetScore], rule: Rule, prices: Prices | None = None) -> int:
        """Prints the table; returns the exit status, 1 if questions failed or answers are unfinished."""
        title = f"line retrieval, {self._reader.name}"
        if self._reader.trained_on_task:
            title += " (trained on this task)"
        console = Console(width=None if sys.stdout.isatty() else 200)
        console.print(score_table(scores, rule, title, prices).rich())
        console.print(f"written to {self._directory}: results.json, summary.csv, answers and plots")
        return say_what_is_missing([row for score in scores for row in score.predictions])

    def _make(self, name: str, context: int) -> list[LineDocument]:
        config = self._config
        plans = plan_documents(
            config.line_idx, name, config.seed, config.num_samples, config.questions_per_document
        )
        room = context - config.max_new_tokens
        return [longest_document(plan, room, self._reader.count_tokens) for plan in plans]

    def _cases(self, name: str) -> Path:
        return self._directory / "testcases" / f"{name}.jsonl"

    def _predictions(self, name: str) -> Path:
        return self._directory / "predictions" / f"{name}.jsonl"


def say_what_is_missing(rows: Sequence[Row]) -> int:
    """Prints how many answers count in no score, and why; returns the exit status, 1 if there are any."""
    failures = [row for row in rows if row.error is not None]
    if failures:
        say(
            f"{len(failures)} questions have no answer and count in no score; the last error: "
            f"{failures[-1].error}. Run the same command again to ask them again"
        )
    unfinished = [row for row in rows if row.unfinished is not None]
    if unfinished:
        say(
            f"{len(unfinished)} answers are unfinished and count in no score; the last one: "
            f"{unfinished[-1].unfinished}. Ask with a larger --max-new-tokens, or turn reasoning off "
            "with --request-json"
        )
    return 1 if failures or unfinished else 0


def open_questions(
    documents: Sequence[DocumentT], log: PredictionLog
) -> Iterator[tuple[DocumentT, list[tuple[int, Any]]]]:
    """Each document, with the cases and questions of it that have no answer yet."""
    first = 0
    for document in documents:
        cases = enumerate(document.questions, first)
        first += len(document.questions)
        yield (
            document,
            [
                (case, question)
                for case, question in cases
                if case not in log.rows or log.rows[case].error is not None
            ],
        )


def prompt_digests(documents: Sequence[Document]) -> list[str]:
    """``prompt_digest`` of every case, in order."""
    return [
        prompt_digest(document.text, question.text)
        for document in documents
        for question in document.questions
    ]


def _prediction(
    case: int,
    document: int,
    question: LineQuestion,
    answer: Answer,
    prompt_digest: str,
    word_partners: int | None,
) -> Prediction:
    return Prediction(
        case=case,
        document=document,
        key=question.key,
        depth=question.depth,
        expected=question.expected,
        value_duplicates=question.value_duplicates,
        text=answer.text,
        last=parsed_number(answer.text, "last"),
        first=parsed_number(answer.text, "first"),
        prompt_tokens=answer.prompt_tokens,
        seconds=answer.seconds,
        prompt_digest=prompt_digest,
        error=answer.error,
        unfinished=answer.unfinished,
        answer_tokens=answer.answer_tokens,
        cached_tokens=answer.cached_tokens,
        reading_seconds=answer.reading_seconds,
        word_partners=word_partners,
    )


def _same(first: Sequence[LineDocument], second: Sequence[LineDocument]) -> bool:
    """Whether records and questions are the same."""
    return [(d.text, d.questions) for d in first] == [(d.text, d.questions) for d in second]
