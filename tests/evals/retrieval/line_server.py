"""A real server, in a thread, that finds the asked line by a regular expression, or misbehaves as told."""

import json
import re
import threading
import time
from collections import deque

from tests.local_server import LocalServer, QuietHandler


class LineServer(LocalServer):
    """Serves ``/v1/chat/completions`` and ``/v1/completions``.

    ``plan`` holds the next replies: ("lookup",), as all others, ("status", number, body) or also with seconds
    to wait, ("silence", seconds), ("answer", text), ("half", body), which announces more than it sends, or
    ("hang up",). ``delay`` is in seconds before each answer, ``context`` the characters of a prompt that are
    read, or None for all; a server that is ``starving`` cuts each answer off at the limit of tokens.
    """

    def __init__(self):
        super().__init__(_Handler)
        self.plan: deque[tuple] = deque()
        self.requests, self.times, self.keys, self.at_once = [], [], [], []
        self.delay, self.context, self.starving, self.open = 0.0, None, False, 0
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"{self.url}/v1"


class _Handler(QuietHandler):
    server: LineServer

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.open += 1
            server.at_once.append(server.open)
            server.times.append(time.monotonic())
            server.requests.append({"path": self.path, **body})
            server.keys.append(self.headers["Authorization"])
        time.sleep(server.delay)
        with server.lock:  # before the reply leaves: a client that has it may send its next request at once
            server.open -= 1
        match server.plan.popleft() if server.plan else ("lookup",):
            case "status", status, text, *wait:
                self._send(text, status, *wait)
            case "silence", seconds:
                time.sleep(seconds)
            case "half", text:
                self._send(text, missing=100)
                self.close_connection = True
            case ("hang up",):
                self.connection.close()
            case _, *texts:
                self._answer(body, *texts)

    def _answer(self, body: dict, text: str | None = None):
        chat = self.path.endswith("/chat/completions")
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        if text is None:
            key = re.findall(r"in line (.+)\? I need the number\.\s*$", prompt)[-1]
            line = rf"^line {re.escape(key)}: REGISTER_CONTENT is <(\d+)>$"
            text = f"The <REGISTER_CONTENT> in line {key} is <{re.findall(line, prompt, re.MULTILINE)[0]}>."
        read = min(len(prompt), self.server.context or len(prompt))
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice["finish_reason"] = "length" if self.server.starving else "stop"
        cached = {"prompt_tokens_details": {"cached_tokens": read // 2}}
        usage = {"prompt_tokens": read, "completion_tokens": len(text), **cached}
        self._send(json.dumps({"choices": [choice], "usage": usage}))

    def _send(self, body: str, status: int = 200, wait: float = 0.1, missing: int = 0):
        content = body.encode()
        self.send_response(status)
        self.send_header("Retry-After", str(wait))
        self.send_header("Content-Length", str(len(content) + missing))
        self.end_headers()
        self.wfile.write(content)
