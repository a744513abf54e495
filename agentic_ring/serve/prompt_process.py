"""A process that renders chat templates and encodes prompts, with limits on its time and memory.

Templates and the regular expressions of tokenizers come with the model's folder and may take any time, during
which they cannot be interrupted and block all other Python code. The process is ended instead, and started
anew. Requests are JSON over a pipe, and so are replies, but for the tokens, which follow as int32 numbers.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from agentic_ring.data.text.chat import Turn, chat_template
from agentic_ring.errors import AgenticRingError, ArgumentError, DataError
from agentic_ring.serve.prompts import TOKENS, ContextLengthError, Prompt, PromptEncoder, PromptLimits
from agentic_ring.serve.remembering_tokenizer import RememberingTokenizer

SECONDS, CHARACTERS_A_SECOND = 5.0, 100_000
"""Time for a request: a constant, and a share for its size. Tokenizers encode about 1,000,000 a second."""
MEMORY_BYTES = 4 * 2**30
"""Memory that a request may take."""
CHECK_SECONDS = 0.1
"""Interval at which a request in process checks whether its client is still connected."""

_ERRORS = {error.__name__: error for error in (ContextLengthError, DataError, ArgumentError)}


class PromptProcess:
    """Encodes prompts in a process of its own, one request at a time; close it, or use it as a context.

    Args:
      folder: folder of the tokenizer.
      template: name of the chat template; None if there is none.
      limits: what is refused before it is encoded.
    """

    def __init__(self, folder: Path | str, template: str | None, limits: PromptLimits):
        self.limits = limits
        self.has_template = template is not None
        self._arguments = [os.fspath(folder), template or "", str(limits.tokens), str(limits.characters)]
        self._process, self._pipe = self._start()

    def texts(self, texts: Sequence[str], check_connected: Callable[[], None]) -> list[Prompt]:
        """Tokenises texts as ``PromptEncoder.text`` does.

        Args:
          check_connected: called regularly; an exception that it raises ends the work.

        Raises:
          ContextLengthError: a text has more characters than the context could hold.
          DataError: the time or memory of a request is exceeded.
        """
        self.limits.check_texts(texts)
        found = self._ask({"texts": texts}, sum(map(len, texts)), check_connected)
        return [replace(prompt, text=text) for text, prompt in zip(texts, found, strict=True)]

    def chat(self, turns: Sequence[Turn], check_connected: Callable[[], None]) -> Prompt:
        """Tokenises a conversation as ``PromptEncoder.chat`` does; arguments and errors as above."""
        self.limits.check_chat(turns)
        size = sum(len(turn.text) for turn in turns)
        (prompt,) = self._ask({"turns": turns}, size, check_connected)
        return prompt

    def check_template(self) -> None:
        """Checks that the tokenizer has the special tokens that the template writes.

        Raises:
          DataError: it lacks one, or the time or memory of a request is exceeded.
        """
        self._ask({}, 0, lambda: None)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> tuple[subprocess.Popen, Connection]:
        ours, theirs = socket.socketpair()
        # The library is found wherever this process has found it.
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TOKENIZERS_PARALLELISM": "false",
            "JAX_PLATFORMS": "cpu",
        }
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), *self._arguments]
        # In a session of its own, Ctrl-C reaches the server only, which then ends this process.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        return process, Connection(ours.detach())

    def _restart(self) -> None:
        self.close()
        self._process, self._pipe = self._start()

    def _ask(
        self, request: dict[str, Any], characters: int, check_connected: Callable[[], None]
    ) -> list[Prompt]:
        seconds = SECONDS + characters / CHARACTERS_A_SECOND
        try:
            self._pipe.send_bytes(json.dumps(request | {"seconds": seconds}).encode())
            while not self._pipe.poll(CHECK_SECONDS):
                check_connected()
            reply = json.loads(self._pipe.recv_bytes())
            tokens = [array(TOKENS, self._pipe.recv_bytes()) for _ in reply.get("added", ())]
        except (EOFError, OSError):
            timed_out = self._process.wait() == -signal.SIGALRM
            self._restart()
            limit = f"the time limit of {seconds:.0f} s" if timed_out else "the memory limit"
            raise DataError(
                f"the chat template or the tokenizer exceeded {limit} for this request; shorten it"
            ) from None
        except BaseException:
            self._restart()
            raise
        if "error" in reply:
            raise _ERRORS[reply["error"]](reply["message"])
        return [Prompt(ids, "", added) for ids, added in zip(tokens, reply["added"], strict=True)]


def main(pipe: int, folder: str, template: str, tokens: int, characters: int) -> None:
    """Answers requests until the server closes the pipe."""
    connection = Connection(pipe)
    tokenizer = RememberingTokenizer.load(folder)
    chats = chat_template(template, tokenizer) if template else None
    encoder = PromptEncoder(tokenizer, chats, PromptLimits(tokens, characters))
    _limit_memory()
    with suppress(EOFError):
        while True:
            request = json.loads(connection.recv_bytes())
            # The default action of the alarm ends the process, whatever it is busy with.
            signal.setitimer(signal.ITIMER_REAL, request["seconds"])
            reply = _reply(encoder, request)
            signal.setitimer(signal.ITIMER_REAL, 0)
            for part in reply:
                connection.send_bytes(part)


def _reply(encoder: PromptEncoder, request: dict[str, Any]) -> list[bytes]:
    """The parts of a reply: an error, or the number of added tokens of each prompt and then its tokens."""
    try:
        if "texts" in request:
            prompts = [encoder.text(text) for text in request["texts"]]
        elif "turns" in request:
            prompts = [encoder.chat([Turn(role, text) for role, text in request["turns"]])]
        else:
            encoder.check_template()
            prompts = []
    except AgenticRingError as error:
        kind = next(name for name, known in _ERRORS.items() if isinstance(error, known))
        return [json.dumps({"error": kind, "message": str(error)}).encode()]
    head = json.dumps({"added": [prompt.added for prompt in prompts]}).encode()
    return [head, *(array(TOKENS, prompt.tokens).tobytes() for prompt in prompts)]


def _limit_memory() -> None:
    """Allows ``MEMORY_BYTES`` more than are mapped now; on Linux only, where the limit is enforced."""
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        import resource

        mapped = int(sizes.read_text().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, most))


if __name__ == "__main__":
    pipe, folder, template, tokens, characters = sys.argv[1:]
    main(int(pipe), folder, template, int(tokens), int(characters))
