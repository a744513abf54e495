"""A local HTTP server of a few files that can fail as real servers do."""

import re

from tests.local_server import LocalServer, QuietHandler


class FileServer(LocalServer):
    """Files by path, and how they are served.

    Attributes:
      files: path -> bytes; may be changed while it runs.
      break_after: bytes after which a connection is cut; None for never.
      ranges: whether it can send the rest of a file.
      sent: for each GET, (path, first byte it was asked for).
    """

    def __init__(self):
        super().__init__(_Handler)
        self.files: dict[str, bytes] = {}
        self.break_after: int | None = None
        self.ranges = True
        self.sent: list[tuple[str, int]] = []


class _Handler(QuietHandler):
    server: FileServer

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool):
        served = self.server
        content = served.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        etag = f'"{hash(content)}"'
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        resumed = asked and served.ranges and self.headers.get("If-Range", etag) == etag
        first = int(asked[1]) if resumed else 0
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("ETag", etag)
        self.end_headers()
        if body:
            served.sent.append((self.path, int(asked[1]) if asked else 0))
            end = len(content) if served.break_after is None else first + served.break_after
            self.wfile.write(content[first:end])
