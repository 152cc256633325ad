"""A reward model behind HTTP, in the protocol of the reward `http`.

    POST /score   a prompt with its completions → {"scores": [s, …]}
    POST /batch   {"requests": [what /score takes, …]} → {"results": [what /score answers, …]}

With `"per_token": true` beside the prompt each score also has `tokens`, the score after each token of the completion.
"""

import json
import math
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

import numpy as np

from proxima.data import Completion, Prompt, Score
from proxima.data.columns import Floats
from proxima.data.jsonl import utf8
from proxima.reward.model_reward import ModelReward

MAX_BYTES = 64 << 20


class RewardServer(ThreadingHTTPServer):
    """Serves one reward model until `shutdown`; requests are scored one after the other.

    Args:
        reward: with `encode: text`, because the policy's tokens mean nothing here. Its weights are loaded.
        address: host and port; port 0 takes a free one.

    Raises:
        OSError: the address is in use.
    """

    daemon_threads = True

    def __init__(self, reward: ModelReward, address: tuple[str, int]) -> None:
        super().__init__(address, _Handler)
        self.reward, self.lock = reward, Lock()

    def answer(self, path: str, request: Any) -> dict[str, Any]:
        """The response to a request.

        Raises:
            ValueError: it is not one of the protocol; says why.
        """
        if path == "/score":
            return {"scores": self._scores(request)}
        if path == "/batch":
            return {"results": [{"scores": self._scores(one)} for one in _list(request, "requests")]}
        raise ValueError(f"{path} is not served; post to /score or /batch")

    def _scores(self, request: Any) -> list[dict[str, Any]]:
        completions = [_completion(i, one) for i, one in enumerate(_list(request, "completions"))]
        if request.get("prompt") is None or not completions:  # a check that the server is there
            return []
        prompt = _prompt(request["prompt"])
        with self.lock:
            scores = self.reward.score(prompt, completions)
            if not request.get("per_token"):
                return [_json(score) for score in scores]
            values = self.reward.token_scores(prompt, completions)
        return [_json(score) | {"tokens": _finite(own)} for score, own in zip(scores, values, strict=True)]


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdigit()) or int(size) > MAX_BYTES:
            self.close_connection = True
            self._send(413, {"error": f"the request must have a Content-Length of at most {MAX_BYTES >> 20} MiB"})
            return
        try:
            text = utf8(json.dumps(json.loads(self.rfile.read(int(size))), ensure_ascii=False))  # no lone surrogates
            self._send(200, self.server.answer(self.path, json.loads(text)))
        except (ValueError, RecursionError) as error:
            self._send(400, {"error": " ".join(str(error).split())[:300]})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Requests leave no line."""


def _list(request: Any, key: str) -> list[Any]:
    found = request.get(key) if isinstance(request, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"the request has no list {key!r}")
    return found


def _prompt(given: Any) -> Prompt:
    messages = given.get("messages") if isinstance(given, dict) else None
    known = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not known or not messages:
        raise ValueError("the prompt has no messages, a list of {role, content}")
    return Prompt(uid=0, messages=tuple(messages), tokens=np.zeros(0, np.int32))


def _completion(sample: int, given: Any) -> Completion:
    text = given.get("text") if isinstance(given, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"completion {sample} has no text")
    none = np.zeros(0, np.float32)
    return Completion(
        prompt_uid=0,
        sample=sample,
        tokens=np.zeros(0, np.int32),
        text=text,
        sampled_log_prob=none,
        untruncated_log_prob=none,
        policy_version=np.zeros(0, np.int32),
        finish_reason=given.get("finish_reason") or "stop",
        temperature=1.0,
    )


def _json(score: Score) -> dict[str, Any]:
    if score.valid and math.isfinite(score.value):
        return {"value": score.value}
    return {"error": score.error or f"the score is {score.value}"}


def _finite(values: Floats) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
