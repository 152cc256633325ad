"""A real HTTP scorer in a thread, which does what a test tells it."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Scorer:
    """What the server was asked, and what it answers.

    `answer(request, n)` gets the JSON of the n-th request (0, 1 …) and returns JSON, raw bytes, an iterator of them
    that is sent until the connection closes, or one of these as (status, body, headers); what it raises breaks the
    connection off.
    """

    def __init__(self, answer: Callable[[Any, int], Any]) -> None:
        self.answer, self.requests, self.headers = answer, [], []
        self.open = self.most = self.gets = 0
        self.lock = threading.Lock()
        self.url = ""

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        request = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            n = len(self.requests)
            self.requests.append(request)
            self.headers.append(dict(handler.headers))
            self.open += 1
            self.most = max(self.most, self.open)
        try:
            try:
                made = self.answer(request, n)
            finally:  # before the client hears of it, and asks again
                with self.lock:
                    self.open -= 1
            status, body, headers = made if isinstance(made, tuple) else (200, made, {})
            if not isinstance(body, (bytes, Iterator)):
                body = json.dumps(body).encode()
            length = {"Content-Length": str(len(body))} if isinstance(body, bytes) else {}
            handler.send_response(status)
            for name, value in {**length, **headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            for part in [body] if isinstance(body, bytes) else body:
                handler.wfile.write(part)
        except Exception:
            handler.close_connection = True


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server of these handlers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def scorer(answer: Callable[[Any, int], Any]) -> Iterator[Scorer]:
    made = Scorer(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.respond(self)

        def do_GET(self) -> None:
            made.gets += 1
            self.send_error(405)

        def log_message(self, *args: Any) -> None: ...

    with served(Handler) as address:
        made.url = f"{address}/score"
        yield made


def lengths(request: Any, n: int) -> Any:
    """Every text's length."""
    return {"scores": [len(completion["text"]) for completion in request["completions"]]}
