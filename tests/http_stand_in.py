"""A server that answers with what a test wrote down, on a free port of 127.0.0.1."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StandIn:
    """Its address, the answers it gives by path, and the bodies it was sent."""

    def __init__(self, url: str, answers: dict[str, Any]) -> None:
        self.url, self.answers = url, answers
        self.received: list[tuple[str, dict[str, Any]]] = []


@contextmanager
def answering(answers: dict[str, Any]) -> Iterator[StandIn]:
    """Serve `answers`: text as it is, anything else as JSON; 404 for other paths."""
    stand_in = StandIn("", answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = stand_in.answers.get(self.path)
            text = found if isinstance(found, str) else json.dumps(found)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            stand_in.received.append((self.path, json.loads(body)))
            self.do_GET()

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
