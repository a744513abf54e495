"""A local HTTP server of a few files that can fail as real servers do."""

import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer:
    """Files by path, and how they are served.

    Attributes:
      files: path -> bytes; may be changed while it runs.
      break_after: bytes after which a connection is cut; None for never.
      ranges: whether it can send the rest of a file.
      sent: for each GET, (path, first byte it was asked for).
    """

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.break_after: int | None = None
        self.ranges = True
        self.sent: list[tuple[str, int]] = []
        self.url = ""


def _handler(served: FileServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body: bool):
            content = served.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            etag = f'"{hash(content)}"'
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            first = int(asked[1]) if asked and self.headers.get("If-Range", etag) == etag else 0
            first = first if served.ranges else 0
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

        def log_message(self, *_):
            pass

    return Handler


@contextmanager
def running_server():
    """A ``FileServer`` at its ``url`` until the block ends."""
    served = FileServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(served))
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
