"""A local HTTP server in a thread of the tests."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, format, *args):
        """Silence."""


class LocalServer(ThreadingHTTPServer):
    """Serves on a free port for as long as it is open as a context."""

    request_queue_size = 64

    def __init__(self, handler: type[QuietHandler]):
        super().__init__(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """A client that gave up is no news."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()
