"""A scorer on the loopback, and how a test asks it."""

import json
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from types import SimpleNamespace

from proxima.model.compute_thread import ComputeThread
from proxima.reward.server.scorer_app import ScorerApp
from proxima.reward.server.scorer_limits import ScorerLimits
from proxima.system.bounded_server import BoundedServer
from proxima.system.listening import open_socket
from tests.reward.make import LONG
from tests.uvicorn_ticks import quick_ticks

MESSAGES = ({"role": "user", "content": "2 + 2?"},)


@contextmanager
def running(server, run):
    """The port of a server in a thread, where `run` runs its coroutine."""
    listening = open_socket("127.0.0.1", 0)
    listening.listen()
    thread = threading.Thread(target=lambda: run(server.serve([listening])), daemon=True)
    with quick_ticks():
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(timeout=LONG)
            assert not thread.is_alive()


@contextmanager
def served(reward, token="", hosts=(), **limits):
    """A scorer, its server and its address."""
    compute, bounds = ComputeThread(), ScorerLimits(**limits)
    app = ScorerApp(reward, compute, bounds, token, hosts)
    server = BoundedServer(app.asgi, bounds.read_seconds, bounds.connections, app.ending)
    with running(server, compute.serve) as port:
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", server=server, app=app)


def post(url, content, **headers):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers, method="POST"), timeout=LONG) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def request_of(*texts, **fields):
    return {"prompt": {"messages": MESSAGES}, "completions": [{"text": text} for text in texts], **fields}
