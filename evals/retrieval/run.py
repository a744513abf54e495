"""A resumable run of questions: its flags, and documents, answers and scores in one folder."""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from agentic_ring.errors import ConfigError, check_at_least_one
from agentic_ring.files.atomic import replacing
from agentic_ring.files.json_files import json_fault, json_row, parse_json, read_json_rows
from agentic_ring.files.run_folder import Stages, enter_directory
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.results.results_file import Results, write_results
from agentic_ring.terminal import cli
from agentic_ring.terminal.progress import progress, say
from agentic_ring.token_units import parse_tokens, short_tokens
from evals.retrieval.answers import Forecast, PredictionLog, SetScore, asked_questions
from evals.retrieval.documents import Document, KeyKind, longest_document, plan_lines, read_cases, write_cases
from evals.retrieval.endpoint_reader import EndpointReader, token_counter
from evals.retrieval.ladder_documents import ladder_documents
from evals.retrieval.local_reader import LocalReader, open_reader
from evals.retrieval.reports import LadderReport, LineReport


@dataclass(frozen=True)
class RunFlags:
    """The model, how it is asked, and where the answers go.

    Attributes:
      model: Folder, GGUF file or name of a model to run locally, or the endpoint's name of its model.
        Default: the small embedded retriever, which was trained on line retrieval only.
      adapter: LoRA adapter of a local model: its folder.
      endpoint: Base address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1; the key
        comes from OPENAI_API_KEY. Default: the model runs locally.
      completions: Send bare prompts to the endpoint (/completions) instead of chat messages.
      template: Chat template of a local model: vicuna_v1.1, llama-3, plain, or tokenizer for the one in the
        model's folder. Default: the adapter's; else tokenizer if the folder has one, else plain.
      allow_extrapolation: Allow contexts that are longer than a local model supports.
      devices: Number of simulated devices that a record is sharded over, on a machine with only a CPU.
      tokenizer: The endpoint model's tokenizer.json, or its folder, to count the tokens of prompts. Default:
        an estimate, about 3% above LLaMA's own count.
      request_json: More fields of each request to an endpoint, such as
        '{"chat_template_kwargs": {"enable_thinking": false}}'; null takes a field away, as in
        '{"max_tokens": null, "max_completion_tokens": 200}'.
      timeout: Seconds that an endpoint may take to answer.
      concurrency: Maximum number of requests to an endpoint at a time. The first question about a record
        goes alone.
      requests_per_minute: Maximum rate of requests to an endpoint. Default: no limit.
      num_samples: Number of questions per length, and of the ladder per task.
      line_idx: Keys of the lines: numbers (LRT), words of the letters A to F (LRT-ABCindex), UUIDs
        (LRT-UUID), or adjective-noun pairs as in LongChat's files (LRT-NL).
      max_new_tokens: Maximum number of tokens of an answer. Default: 100, or 200 for the ladder.
      seed: Seed of the records and the questions.
      resume: Continue the run in the output folder; --no-resume moves it aside and starts a new one.
      output: Folder of the run. Default: runs/line_retrieval-MODEL or runs/ladder-MODEL.
    """

    model: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None
    adapter: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None
    endpoint: Annotated[str | None, cli.optional_flag(metavar="URL")] = None
    completions: Annotated[bool, cli.switch] = False
    template: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None
    allow_extrapolation: Annotated[bool, cli.switch] = False
    devices: int = 1
    tokenizer: Annotated[Path | None, cli.optional_flag(metavar="PATH")] = None
    request_json: Annotated[str | None, cli.optional_flag(metavar="JSON")] = None
    timeout: float = EndpointReader.timeout
    concurrency: int = EndpointReader.concurrency
    requests_per_minute: Annotated[float | None, cli.optional_flag(metavar="N")] = None
    num_samples: int = 50
    line_idx: KeyKind = "LRT-NL"
    max_new_tokens: Annotated[int | None, cli.optional_flag(metavar="N")] = None
    seed: int = 0
    resume: bool = True
    output: Annotated[Path | None, cli.optional_flag(metavar="DIR")] = None

    def open(
        self,
        test: Literal["line_retrieval", "ladder"],
        contexts: Sequence[int],
        tasks: Sequence[str],
        default_new_tokens: int,
        report: LineReport | LadderReport,
        questions_per_document: int | None = None,
    ) -> "RetrievalRun":
        """Opens the model and the run that asks it; see ``RetrievalConfig``."""
        fields = None if self.request_json is None else request_fields(self.request_json)
        most = default_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        check_at_least_one(replace(self, max_new_tokens=most), "max_new_tokens", "num_samples")
        if self.endpoint is None:
            if fields is not None:
                raise ConfigError("request_json is of an endpoint; name one with --endpoint URL")
            if self.model is None and self.line_idx != "LRT-NL":
                raise ConfigError(
                    f"line_idx is {self.line_idx}; the embedded retriever knows only LRT-NL. Name another "
                    "--model for other keys"
                )
            simulate_cpu_devices(self.devices)
            reader = open_reader(self.model, contexts, self.template, self.allow_extrapolation, self.adapter)
        elif self.adapter is not None:
            raise ConfigError("adapter is of a local model; leave out --endpoint, or serve the model with it")
        elif self.model is None:
            raise ConfigError(f"which model of {self.endpoint} should answer? Name it with --model")
        else:
            limits = [(fields or {}).get(name) for name in ("max_completion_tokens", "max_tokens")]
            most = next((limit for limit in limits if isinstance(limit, int) and limit > 0), most)
            reader = EndpointReader(
                self.endpoint,
                self.model,
                token_counter(self.tokenizer),
                exact=self.tokenizer is not None,
                completions=self.completions,
                fields=fields,
                timeout=self.timeout,
                concurrency=self.concurrency,
                requests_per_minute=self.requests_per_minute,
            )
        config = RetrievalConfig(
            test=test,
            reader=reader.name,
            trained_on_task=reader.trained_on_task,
            tasks=",".join(tasks),
            line_idx=self.line_idx,
            num_samples=self.num_samples,
            seed=self.seed,
            max_new_tokens=most,
            source=self.endpoint or "local",
            completions=self.completions,
            tokenizer=None if self.tokenizer is None else str(self.tokenizer),
            questions_per_document=questions_per_document,
            template=self.template,
            request_json=self.request_json,
        )
        directory = self.output or Path("runs") / f"{test}-{re.sub(r'[^A-Za-z0-9._-]+', '-', reader.name)}"
        return RetrievalRun(directory, config, reader, report)


def request_fields(text: str) -> dict[str, Any]:
    """The fields in a JSON object."""
    try:
        return parse_json(text.encode(), dict[str, Any], foreign=True)
    except ValueError as error:
        fault = f"request_json is {text!r}, which {json_fault(error)}"
        raise ConfigError(fault + '; expected an object such as {"top_p": 1}') from error


def context_lengths(text: str) -> list[int]:
    """The lengths in a list such as ``4k,16k``, in ascending order and without duplicates."""
    return sorted({parse_tokens(length.strip()) for length in text.split(",") if length.strip()})


@dataclass(frozen=True)
class RetrievalConfig:
    """Everything that determines an answer except the length: one folder holds all lengths.

    Attributes:
      reader: name of the model, which may be ``trained_on_task``, on line retrieval itself.
      tasks: names of the tasks, separated by commas; each has ``num_samples`` questions per length.
      source: the endpoint, or "local".
      tokenizer: tokenizer that measures prompts for an endpoint, or None for an estimate.
      questions_per_document: maximum number of questions about one document of line retrieval; None for
        the ladder, whose documents take as many as fit.
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


@dataclass(frozen=True)
class RetrievalRun:
    """A folder of documents and answers.

    testcases/NAME.jsonl      the questions with their documents; of line retrieval in LongChat's format
    predictions/NAME.jsonl    the answers, one row each as soon as it is known
    results.json, summary.csv, and what else the report writes
    """

    directory: Path
    config: RetrievalConfig
    reader: LocalReader | EndpointReader
    report: LineReport | LadderReport
    stages: Stages = field(default_factory=Stages)

    @contextmanager
    def prepare(
        self, contexts: Sequence[int], resume: bool, files: Sequence[Path] = ()
    ) -> Iterator[list[str]]:
        """Generates all documents, or reads LongChat's files; in the block no other process may write here.

        Yields the names of the sets: first the lengths in ascending order, then the files.
        """
        names = [short_tokens(context) for context in contexts] + [path.stem for path in files]
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"the sets of questions are {names or 'none'}; expected at least one, such as --ctx 4k,16k, "
                "with different names"
            )
        from_files = [read_cases(path) for path in files]
        with enter_directory(self.directory, self.config, resume):
            self.stages.keep_in(self.directory)
            (self.directory / "testcases").mkdir(exist_ok=True)
            with self.stages.stage("cases"):
                for name, context in zip(names, contexts, strict=False):
                    if not self._cases(name).exists():
                        self._write(name, self._make(name, context))
                for name, documents in zip(names[len(contexts) :], from_files, strict=True):
                    if not self._cases(name).exists():
                        self._write(name, documents)
                    elif self._read(name) != documents:
                        raise ConfigError(
                            f"{self.directory} holds other cases with the name {name}; give another --output"
                        )
            yield names

    def ask(self, name: str) -> None:
        """Asks the questions of a set that have no answer yet."""
        documents, log = self._opened(name)
        pairs_of_words = self.config.line_idx == "LRT-NL" and self.config.test == "line_retrieval"
        total = sum(len(document.questions) for document in documents)
        started, answered = time.monotonic(), 0
        with self.stages.stage(name), progress(f"questions of {name}", total) as advance:
            for document, asked in log.open(documents):
                texts = [each.question.text for each in asked]
                for index, answer in self.reader.answers(document.text, texts, self.config.max_new_tokens):
                    log.add(asked[index].predicted(answer, document.text, pairs_of_words))
                    answered += answer.error is None
                    failed = sum(row.error is not None for row in log.rows.values())
                    advance(len(log.rows), f"{failed} failed" if failed else "")
        seconds = time.monotonic() - started
        if answered:
            say(f"{name}: {answered} questions in {seconds:.2f} s, {60 * answered / seconds:,.0f} a minute")

    def forecast(self, name: str) -> Forecast:
        """What the questions of a set that have no answer yet will ask of a server."""
        documents, log = self._opened(name)
        requests = prompt_tokens = repeated_tokens = 0
        for document, asked in log.open(documents):
            tokens = self.reader.count_tokens(document.text, asked[0].question.text)
            requests += len(asked)
            prompt_tokens += tokens * len(asked)
            repeated_tokens += tokens * (len(asked) - 1)
        answer_tokens = requests * self.config.max_new_tokens
        return Forecast(requests, prompt_tokens, repeated_tokens, answer_tokens)

    def score(self) -> list[SetScore]:
        """Writes results and report of all sets that were asked completely, and returns their scores."""
        scores = []
        for path in sorted((self.directory / "testcases").glob("*.jsonl")):
            documents, log = self._opened(path.stem)
            rows = [row for _, row in sorted(log.rows.items())]
            if len(rows) == sum(len(document.questions) for document in documents):
                lines = sum(document.num_lines for document in documents) / len(documents)
                scores.append(SetScore(path.stem, lines, rows))
        scores.sort(key=lambda score: score.prompt_tokens)
        settings = {**asdict(self.config), **self.report.settings}
        results = Results.of_this_process(settings, self.stages.seconds, self.report.figures(scores))
        write_results(self.directory / "results.json", results)
        self.report.write(self.directory, self.reader.name, scores)
        return scores

    def evaluate(self, names: Sequence[str]) -> int:
        """Asks all questions, writes the results after each set, and prints the table.

        Returns the exit status: 1 if questions failed or answers are unfinished.
        """
        scores = []
        for name in names:
            self.ask(name)
            scores = self.score()
        title = f"{self.report.title}, {self.reader.name}"
        if self.reader.trained_on_task:
            title += " (trained on line retrieval)"
        console = Console(width=None if sys.stdout.isatty() else 200)
        table = self.report.table(scores, title)
        console.print(table.rich(), *table.notes)
        console.print(f"written to {self.directory}: results.json, summary.csv, answers and plots")
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

    def _make(self, name: str, context: int) -> list[Document]:
        config, count = self.config, self.reader.count_tokens
        room, each = context - config.max_new_tokens, config.questions_per_document or config.num_samples
        what = config.line_idx, name, config.seed, config.num_samples
        if config.test == "ladder":
            return ladder_documents(config.tasks.split(","), *what, room, count)
        plans = plan_lines(*what, each)
        return [longest_document(plan.build, len(plan.strata), room, count) for plan in plans]

    def _read(self, name: str) -> list[Document]:
        if self.config.test == "line_retrieval":
            return read_cases(self._cases(name))
        remedy = "give another --output, or --no-resume to start anew"
        return read_json_rows(self._cases(name), Document, remedy)

    def _write(self, name: str, documents: Sequence[Document]) -> None:
        if self.config.test == "line_retrieval":
            write_cases(self._cases(name), documents)
        else:
            with replacing(self._cases(name)) as beside, beside.open("w", encoding="utf-8") as file:
                file.writelines(json_row(asdict(document)) for document in documents)

    def _opened(self, name: str) -> tuple[list[Document], PredictionLog]:
        """The documents of a set, and the answers to their questions so far."""
        documents = self._read(name)
        path = self.directory / "predictions" / f"{name}.jsonl"
        return documents, PredictionLog(path, asked_questions(documents))

    def _cases(self, name: str) -> Path:
        return self.directory / "testcases" / f"{name}.jsonl"
