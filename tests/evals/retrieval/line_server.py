"""A real server, in a thread, that finds the asked line by a regular expression, or misbehaves as told."""

import json
import re
import threading
import time
from collections import deque

from tests.local_server import LocalServer, QuietHandler


def looked_up(prompt: str) -> str:
    key = re.findall(r"in line (.+)\? I need the number\.\s*$", prompt)[-1]
    value = re.findall(rf"^line {re.escape(key)}: REGISTER_CONTENT is <(\d+)>$", prompt, re.MULTILINE)[0]
    return f"The <REGISTER_CONTENT> in line {key} is <{value}>."


class LineServer(LocalServer):
    """Serves ``/v1/chat/completions`` and ``/v1/completions``.

    ``plan`` holds what the next replies are; when it is used up, replies are answers. Each is
    ("status", number, headers, body), ("body", text), ("silence", seconds), ("answer", text),
    ("half", body), which announces more than it sends, or ("hang up",).

    Attributes:
      delay: seconds before each answer.
      context: characters of a prompt that are read, from its end; None for all.
      starving: whether each answer is cut off at the limit of tokens.
    """

    def __init__(self):
        super().__init__(_Handler)
        self.plan: deque[tuple] = deque()
        self.requests: list[dict] = []
        self.times: list[float] = []
        self.keys: list[str | None] = []
        self.delay = 0.0
        self.context: int | None = None
        self.starving = False
        self.at_once: list[int] = []
        self.open = 0
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
        self._reply(body)

    def _reply(self, body: dict):
        server = self.server
        kind, *rest = server.plan.popleft() if server.plan else ("lookup",)
        if kind == "status":
            self._send(*rest)
        elif kind == "body":
            self._send(200, {}, rest[0])
        elif kind == "silence":
            time.sleep(rest[0])
        elif kind == "half":
            self._send(200, {}, rest[0], announced=len(rest[0]) + 100)
            self.close_connection = True
        elif kind == "hang up":
            self.connection.close()
        else:
            chat = self.path.endswith("/chat/completions")
            prompt = body["messages"][-1]["content"] if chat else body["prompt"]
            seen = prompt if server.context is None else prompt[-server.context :]
            text = rest[0] if kind == "answer" else looked_up(prompt)
            choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choice["finish_reason"] = "length" if server.starving else "stop"
            cached = {"prompt_tokens_details": {"cached_tokens": len(seen) // 2}}
            usage = {"prompt_tokens": len(seen), "completion_tokens": len(text), **cached}
            self._send(200, {}, json.dumps({"choices": [choice], "usage": usage}))

    def _send(self, status: int, headers: dict[str, str], body: str, announced: int | None = None):
        content = body.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(announced or len(content)))
        self.end_headers()
        self.wfile.write(content)
