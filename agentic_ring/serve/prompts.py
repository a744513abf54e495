"""Prompts of requests: their size limit, and the process that renders chat templates and encodes them.

Templates and the regular expressions of tokenizers come with the model's folder and may take any time, during
which they cannot be interrupted and block all other Python code. The process is ended instead, and started
anew.
"""

import multiprocessing
import os
import signal
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentic_ring.data.text.chat import ChatTemplate, Turn, chat_template, check_special_tokens
from agentic_ring.data.text.conversation_tokens import prompt_ids
from agentic_ring.data.text.tokenizer import RememberingTokenizer, Tokenizer
from agentic_ring.errors import AgenticRingError, ArgumentError, DataError

TOKENS = "i"
"""Type of the arrays of a prompt's tokens: int32, many of which are compared faster than lists."""
SECONDS, CHARACTERS_A_SECOND = 5.0, 100_000
"""Time for a request: a constant, and a share for its size. Tokenizers encode about 1,000,000 a second."""
MEMORY_BYTES = 4 * 2**30
"""Memory that a request may take."""
CHECK_SECONDS = 0.1
"""Interval at which a request in process checks whether its client is still connected."""


AnyPrompt = str | Sequence[int] | Sequence[Turn]


class ContextLengthError(ArgumentError):
    """A prompt and its answer exceed the maximum context."""


@dataclass(frozen=True)
class Prompt:
    """A tokenised prompt."""

    tokens: Sequence[int]
    text: str
    """The given text, or the decoded tokens; empty for a chat, which is never echoed."""
    added: int = 0
    """Number of leading tokens that the tokenizer added, such as the beginning-of-text token."""
    ends: Sequence[int] = ()
    """Tokens that end an answer to it."""


class PromptProcess(AbstractContextManager):
    """Encodes prompts in a process of its own, one request at a time, for as long as it is open as a context.

    It loads the tokenizer of ``folder``, and a chat template by name. A prompt has at most ``context`` tokens
    of at most ``longest_token`` characters.
    """

    def __init__(self, folder: Path | str, template: str | None, context: int, longest_token: int):
        self._context, self._characters = context, context * longest_token
        self._arguments = (folder, template)
        self._start()

    def check(self, prompts: Sequence[AnyPrompt]) -> None:
        """Checks prompts before they are encoded, which then takes bounded time.

        Raises:
          ContextLengthError: a prompt has more tokens, messages or characters than the context could hold.
        """
        for prompt in prompts:
            size = 0 if isinstance(prompt, str) else len(prompt)  # a message has at least one token
            for unit, found, most in (
                ("tokens or messages", size, self._context),
                ("characters", _characters(prompt), self._characters),
            ):
                if found > most:
                    context = f"the context of {self._context} tokens holds at most {most}"
                    raise ContextLengthError(f"the prompt has {found} {unit}; {context}")

    def check_template(self) -> None:
        """Refuses a template that does not fit the tokenizer, within the time and memory of a request."""
        self.encode((), lambda: None)

    def encode(
        self,
        prompts: Sequence[str | Sequence[Turn]],
        check_connected: Callable[[], None],
        variables: Mapping[str, Any] = {},
    ) -> list[Prompt]:
        """Tokenises texts, and conversations that end with the user's turn in the template.

        They have passed ``check``. An exception that ``check_connected`` raises ends the work. ``variables``
        are those of ``ChatTemplate.with_variables``.

        Raises:
          DataError: there is no template, the turns do not form a conversation, or the time or memory of a
            request is exceeded.
        """
        seconds = SECONDS + sum(map(_characters, prompts)) / CHARACTERS_A_SECOND
        try:
            self._pipe.send((seconds, prompts, variables))
            while not self._pipe.poll(CHECK_SECONDS):
                check_connected()
            error, found = self._pipe.recv()
        except (EOFError, OSError):  # it has ended
            self._process.join(1)
            timed_out = self._process.exitcode == -signal.SIGALRM
            self._restart()
            limit = f"the time limit of {seconds:.0f} s" if timed_out else "the memory limit"
            what = "this request; shorten it" if prompts else "a short chat; choose another --template"
            raise DataError(f"the chat template or the tokenizer exceeded {limit} for {what}") from None
        except BaseException:
            self._restart()
            raise
        if error is not None:
            raise error(found)
        return found

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _restart(self) -> None:
        self.__exit__()
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # threads and JAX do not survive a fork
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer_pipe, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()


def _characters(prompt: AnyPrompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(turn.text) for turn in prompt if isinstance(turn, Turn))


def _answer_pipe(pipe: Connection, folder: Path | str, template: str | None) -> None:
    """Answers requests until the server closes the pipe; runs in the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which then ends this process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = RememberingTokenizer.load(folder)
    chats = None
    _limit_memory()
    with suppress(EOFError):
        while True:
            seconds, prompts, variables = pipe.recv()
            # The default action of the alarm ends the process, whatever it is busy with.
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                if template is not None and chats is None:
                    chats = chat_template(template, tokenizer)  # within the limits: Jinja computes constants
                if chats is not None and not prompts:
                    check_special_tokens(chats, tokenizer)
                chosen = None if chats is None else chats.with_variables(variables)
                reply = None, [_encode(tokenizer, chosen, prompt) for prompt in prompts]
            except AgenticRingError as error:
                reply = type(error), str(error)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send(reply)


def _encode(tokenizer: Tokenizer, chats: ChatTemplate | None, prompt: str | Sequence[Turn]) -> Prompt:
    if isinstance(prompt, str):
        tokens = tokenizer.encode_prompt(prompt)
        added = len(tokens) - len(tokenizer.encode(prompt))
        return Prompt(array(TOKENS, tokens), prompt, added, tokenizer.eos_ids)
    if chats is None:
        raise DataError("the model's folder has no chat template; start the server with --template")
    return Prompt(array(TOKENS, prompt_ids(tokenizer, chats, prompt)), "", ends=chats.end_ids)


def _limit_memory() -> None:
    """Allows ``MEMORY_BYTES`` more than are mapped now; on Linux only, where the limit is enforced."""
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        import resource

        mapped = int(sizes.read_text().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, most))
