"""A fake of the program `vllm`: the words, log lines, children and deaths of the real one, without a model.

Its behavior is chosen by the words of its arguments: `--die TEXT` dies while loading, `--child` leaves a process in a
session of its own, `--deaf` never answers, `--stubborn` ignores SIGTERM. GET /die ends it, and after
GET /fail it is not healthy.
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PREFIX = "(APIServer pid=7) INFO 11-21 09:02:38 [api_server.py:93] "
MODEL = "the model"


class Handler(BaseHTTPRequestHandler):
    """`/health`, `/v1/models` with the key, and `/die`."""

    def do_GET(self) -> None:
        key = os.environ.get("VLLM_API_KEY")
        if self.path == "/die":
            os._exit(9)
        if self.path == "/fail":
            print("RuntimeError: the core is gone", flush=True)
            self.server.failed = True
        if self.path == "/health" and getattr(self.server, "failed", False):
            self.answer(503, {})
            return
        if self.path.startswith("/v1") and key and self.headers["Authorization"] != f"Bearer {key}":
            self.answer(401, {"error": "Unauthorized"})
        else:
            self.answer(200, {"data": [{"id": MODEL, "argv": sys.argv, "environment": dict(os.environ)}]})

    def answer(self, status: int, body: object) -> None:
        """JSON."""
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def main() -> None:
    words = sys.argv[1:]
    if words == ["--version"]:
        print("0.0.0+fake")
        return
    print(PREFIX + "Loading the weights from somewhere", flush=True)
    if "--die" in words:
        print(words[words.index("--die") + 1], flush=True)
        sys.exit(1)
    if "--stubborn" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--child" in words:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        Path(words[words.index("--child") + 1]).write_text(f"{os.getpid()} {child.pid}")
    if "--deaf" in words:
        signal.pause()
    port = int(words[words.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
