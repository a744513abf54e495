"""Adapter that makes our models available to lm-evaluation-harness. Needs the extra ``harness``."""

from collections.abc import Iterable, Iterator
from typing import Any

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)

from agentic_ring.data.text.chat import ChatTemplate, Turn
from agentic_ring.data.text.tokenizer import Tokenizer
from agentic_ring.errors import ConfigError, DataError
from agentic_ring.terminal.progress import progress
from evals.harness_model.engine_requests import HarnessRequests, chat_prompt


class HarnessModel(TemplateLM):
    """The harness's interface of a model; without a template, prompts are bare."""

    def __init__(self, requests: HarnessRequests, tokenizer: Tokenizer, template: ChatTemplate | None):
        super().__init__()
        self._requests, self._ids, self._template = requests, tokenizer, template

    @property
    def eot_token_id(self) -> int:
        """The token that ends an answer."""
        if not self._ids.eos_ids:
            raise DataError("the tokenizer names no token that ends an answer; set eos_token")
        return self._ids.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that is scored without context."""
        return self.eot_token_id if self._ids.bos_id is None else self._ids.bos_id

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a text."""
        return self._requests.max_length

    @property
    def tokenizer_name(self) -> str:
        """Key under which the harness caches requests."""
        return f"{self._ids.digest}-{self.chat_template()}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Name of the template, which the harness records."""
        return "" if self._template is None else self._template.name

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation; a final turn of the assistant is continued."""
        if self._template is None:
            raise ConfigError("the task needs a chat template; name one with --template")
        turns = [Turn(turn["role"], turn["content"]) for turn in chat_history]  # pyright: ignore[reportArgumentType]
        return chat_prompt(self._template, turns)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, with exactly one BOS token in front unless ``add_special_tokens`` is False."""
        return (self._ids.encode if add_special_tokens is False else self._ids.encode_prompt)(string)

    def _cached(self, kind: str, keys: list[Any], found: Iterable[Any]) -> list[Any]:
        """The results of requests, kept in the harness's cache under their keys as each is known."""
        results = []
        with progress(kind, len(keys)) as advance:
            for key, result in zip(keys, found, strict=True):
                self.cache_hook.add_partial(kind, key, result)
                results.append(result)
                advance(len(results), "")
        return results

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return self._cached("loglikelihood", [key for key, _, _ in requests], self._requests.scores(pairs))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log probability of whole texts; longer ones are scored in windows of ``max_length``."""

        def totals() -> Iterator[float]:
            for request in requests:
                tokens = self._ids.encode(request.args[0])
                windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length - 1, 1)
                scores = self._requests.scores([make_disjoint_window(window) for window in windows])
                yield sum(total for total, _ in scores)

        return self._cached("loglikelihood_rolling", [request.args for request in requests], totals())

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, each up to its task's first stop string."""
        keys = [request.args for request in requests]
        return self._cached("generate_until", keys, (self._requests.answer(*key) for key in keys))
