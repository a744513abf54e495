"""A real server, in a thread, that finds the asked line by a regular expression, or misbehaves as told."""

import json
import re
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
    ("status", number, headers, body), ("body", text), ("silence", seconds), ("answer", text) or
    ("hang up",).
    """

    def __init__(self):
        super().__init__(_Handler)
        self.plan: deque[tuple] = deque()
        self.requests: list[dict] = []
        self.times: list[float] = []
        self.keys: list[str | None] = []

    @property
    def address(self) -> str:
        return f"{self.url}/v1"


class _Handler(QuietHandler):
    server: LineServer

    def do_POST(self):
        server = self.server
        server.times.append(time.monotonic())
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append({"path": self.path, **body})
        server.keys.append(self.headers["Authorization"])
        kind, *rest = server.plan.popleft() if server.plan else ("lookup",)
        if kind == "status":
            self._send(*rest)
        elif kind == "body":
            self._send(200, {}, rest[0])
        elif kind == "silence":
            time.sleep(rest[0])
        elif kind == "hang up":
            self.connection.close()
        else:
            chat = self.path.endswith("/chat/completions")
            prompt = body["messages"][-1]["content"] if chat else body["prompt"]
            text = rest[0] if kind == "answer" else looked_up(prompt)
            choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            self._send(200, {}, json.dumps({"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}))

    def _send(self, status: int, headers: dict[str, str], body: str):
        content = body.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
