"""Flags and start of a run, the same for ``evals/line_retrieval.py`` and ``evals/ladder.py``."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from agentic_ring.errors import ConfigError
from agentic_ring.mesh import simulate_cpu_devices
from agentic_ring.terminal import cli
from agentic_ring.token_units import parse_tokens
from evals.retrieval.endpoint_reader import Endpoint, EndpointReader, token_counter
from evals.retrieval.keys import KeyKind
from evals.retrieval.ladder_report import LadderReport
from evals.retrieval.line_report import LineReport
from evals.retrieval.local_reader import EMBEDDED_KEYS, open_reader
from evals.retrieval.run import RetrievalConfig, RetrievalRun


@dataclass(frozen=True)
class RunFlags:
    """The model, how it is asked, and where the answers go.

    Attributes:
      model: Folder or Hugging Face name of a model to run locally, or the endpoint's name of its model.
        Default: the small embedded retriever, which was trained on line retrieval only.
      endpoint: Base address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1; the key
        comes from OPENAI_API_KEY. Default: the model runs locally.
      completions: Send bare prompts to the endpoint (/completions) instead of chat messages.
      template: Chat template of a local model: vicuna_v1.1, llama-3, plain, or tokenizer for the one in the
        model's folder. Default: tokenizer if the folder has one, else plain.
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
    endpoint: Annotated[str | None, cli.optional_flag(metavar="URL")] = None
    completions: Annotated[bool, cli.switch] = False
    template: Annotated[str | None, cli.optional_flag(metavar="NAME")] = None
    allow_extrapolation: Annotated[bool, cli.switch] = False
    devices: int = 1
    tokenizer: Annotated[Path | None, cli.optional_flag(metavar="PATH")] = None
    request_json: Annotated[str | None, cli.optional_flag(metavar="JSON")] = None
    timeout: float = Endpoint.timeout
    concurrency: int = Endpoint.concurrency
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
    ) -> RetrievalRun:
        """Opens the model and the run that asks it; see ``RetrievalConfig``.

        Raises:
          ConfigError: a flag is out of range, or does not fit the others.
          DataError: the model or its tokenizer cannot be read.
        """
        fields = request_fields(self.request_json)
        most = default_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        if most < 1:
            raise ConfigError(f"max_new_tokens is {most}; an answer needs at least 1")
        if self.endpoint is None:
            if fields is not None:
                raise ConfigError("request_json is of an endpoint; name one with --endpoint URL")
            if self.model is None and self.line_idx not in EMBEDDED_KEYS:
                raise ConfigError(
                    f"line_idx is {self.line_idx}; the embedded retriever knows only "
                    f"{' and '.join(EMBEDDED_KEYS)}. Name another --model for other keys"
                )
            simulate_cpu_devices(self.devices)
            reader = open_reader(self.model, contexts, self.template, self.allow_extrapolation)
        else:
            limits = [(fields or {}).get(name) for name in ("max_completion_tokens", "max_tokens")]
            most = next((limit for limit in limits if isinstance(limit, int) and limit > 0), most)
            reader = self._open_endpoint(self.endpoint, fields)
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

    def _open_endpoint(self, address: str, fields: dict[str, Any] | None) -> EndpointReader:
        if self.model is None:
            raise ConfigError(f"which model of {address} should answer? Name it with --model")
        endpoint = Endpoint(
            address,
            self.model,
            self.completions,
            fields,
            self.timeout,
            self.concurrency,
            self.requests_per_minute,
        )
        return EndpointReader(endpoint, token_counter(self.tokenizer), self.tokenizer is not None)


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


def context_lengths(text: str) -> list[int]:
    """The lengths in a list such as ``4k,16k``, in ascending order and without duplicates."""
    return sorted({parse_tokens(length.strip()) for length in text.split(",") if length.strip()})
