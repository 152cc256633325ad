"""A server in this process, with a model that is a formula and faults on demand. It speaks a protocol of its own.

Faults of a completion, by `script` (the next ones) or `rates` (each with its probability, by `seed`):

    error      status 500              overload   status 429           hang       a token, then nothing
    break      a token, then the connection is closed                  nan        a log-prob is NaN
    unstopped  it goes on after the stop token
"""

import asyncio
import json
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from proxima.engine.event_loop_thread import EventLoopThread
from tests.engine.http.fake_model import STOP, draw, log_probs, sequence_log_probs, states, truncated
from tests.engine.http.small_http import Call, HttpListener, chunk, whole
from tests.ports import kept_socket

FACTS: dict[str, Any] = {
    "model": "formula",
    "max_length": 256,
    "log_probs": "processed",
    "keeps_kv": True,
    "version_spans": True,
    "batch_invariant": True,
}


@dataclass(eq=False)
class FakeRequest:
    """A completion that is being generated."""

    body: dict[str, Any]
    fault: str | None
    kv: list[float]
    tokens: list[int] = field(default_factory=list)
    log_prob: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    ended: str | None = None
    answered: bool = False  # a message was sent
    hangs: bool = False

    @property
    def everything(self) -> list[int]:
        return [*self.body["tokens"], *self.tokens]


class FakeServer(HttpListener):
    """Runs in an event loop of its own thread. Attributes may be changed at any time.

    Args:
        facts: what differs from FACTS.
        rates: of faults.
        seed: of their draws, each of which belongs to a request.
        slow: seconds a token.

    `stop_after`: completions stop sampling after so many tokens, until it is None. `ignores_weights`: answers that new
    weights are loaded, and keeps the others. `forgetful`: keeps the label of the weights that it had.
    """

    def __init__(
        self,
        loop: EventLoopThread,
        *,
        facts: dict[str, Any] | None = None,
        rates: dict[str, float] | None = None,
        seed: int = 0,
        slow: float = 0.0,
    ) -> None:
        super().__init__()
        self.loop, self.facts, self.rates, self.slow = loop, FACTS | (facts or {}), rates or {}, slow
        self.script: deque[str | None] = deque()
        self.calls: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.stop_after: int | None = None
        self.ignores_weights = self.forgetful = False
        self.failing: set[str] = set()  # paths that answer with status 500
        self.waiting = 0
        self.begun = 0  # requests that came as far as sampling
        self.seed, self.asked = seed, Counter[str]()
        self.place = kept_socket()  # also while the server is away
        self.port = self.place.getsockname()[1]
        self.come_back()

    def _boot(self) -> None:
        self.weights, self.label, self.paused = 0.5, "start", False
        self.asleep = False
        self.cache: dict[tuple[str | None, tuple[int, ...]], list[float]] = {}
        self.running: dict[str, FakeRequest] = {}

    # ---- what happens to servers -------------------------------------------------------------------------------------

    def die(self) -> None:
        """Close every connection, and accept no other."""
        self.loop.call(self.close())

    def come_back(self) -> None:
        """As a new process, with the weights that it was first started with."""
        self._boot()
        self.loop.call(self.listen(self.port))

    def restart(self) -> None:
        self.die()
        self.come_back()

    # ---- HTTP --------------------------------------------------------------------------------------------------------

    async def respond(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.calls[call.path] += 1
        if call.path == "/generate":
            await self._generate(reader, writer, call.body)
            return False
        if call.path in self.failing:
            _respond(writer, 500, {"error": "broken on purpose"})
        else:
            status, answer = getattr(self, "_" + call.path.strip("/"))((call.body or {}) | call.query)
            if asyncio.iscoroutine(answer):
                answer = await answer
            _respond(writer, status, answer)
        await writer.drain()
        return True

    async def _generate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        fault = self._fault(body)
        if fault in ("error", "overload"):
            _respond(writer, 500 if fault == "error" else 429, {"error": "on purpose"}, last=True)
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        working = asyncio.ensure_future(self._sample(body, fault, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.running.pop(body["id"], None)
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    def _fault(self, body: dict[str, Any]) -> str | None:
        if self.script:
            return self.script.popleft()
        name = "-".join(body["id"].split("-")[1:4])  # an id begins with the engine's and ends with the attempt's
        self.asked[name] += 1
        at = random.Random(f"{self.seed} {name} {self.asked[name]}").random()  # whoever comes first
        for fault, rate in self.rates.items():
            if (at := at - rate) < 0:
                return fault
        return None

    # ---- sampling ----------------------------------------------------------------------------------------------------

    async def _sample(self, body: dict[str, Any], fault: str | None, writer: asyncio.StreamWriter) -> None:
        while self.paused:  # a request that comes in a pause waits
            await asyncio.sleep(0.001)
        request = FakeRequest(body, fault, self._kv(body))
        self.running[body["id"]] = request
        self.begun += 1
        uniforms = np.random.default_rng(body["seed"])
        prompt: list[int] | None = body["tokens"]
        while True:
            at = len(request.tokens)
            await asyncio.sleep(self.slow)
            while request.ended is None and (self.paused or (self.stop_after is not None and at >= self.stop_after)):
                await asyncio.sleep(0.001)
            if request.ended is None and not (at == 1 and fault in ("hang", "break")):
                self._one_token(request, uniforms.random())
            if fault in ("hang", "break") and (at == 1 or request.ended is not None):  # the first token may be the last
                if fault == "break":
                    return
                request.hangs = True
                await asyncio.Event().wait()
            message = {"tokens": request.tokens[at:], "log_probs": request.log_prob[at:], "finish": request.ended}
            if fault == "nan":
                message["log_probs"] = [float("nan")] * len(message["tokens"])
            if prompt is not None:
                message["prompt"], prompt = prompt, None
            if request.ended is not None and self.facts["version_spans"]:
                message["spans"] = spans_of(request.labels)
            request.answered = True
            writer.write(chunk(f"data: {json.dumps(message)}\n\n".encode()))
            await writer.drain()
            if request.ended is not None:
                writer.write(chunk(b"data: [DONE]\n\n") + chunk(b""))
                await writer.drain()
                return

    def _kv(self, body: dict[str, Any]) -> list[float]:
        """Of the prompt, from the cache as far as it goes."""
        tokens, salt = tuple(body["tokens"]), body["cache_salt"]
        prefix = next((kv for n in range(len(tokens), 0, -1) if (kv := self.cache.get((salt, tokens[:n])))), [])
        log_probs = self.cache[salt, tokens] = states(self.weights, tokens, prefix)
        return list(log_probs)

    def _one_token(self, request: FakeRequest, uniform: float) -> None:
        body, request.kv = request.body, states(self.weights, request.everything, request.kv)
        full = log_probs(self.weights, request.everything[-1], request.kv, body["temperature"])
        sampled = truncated(full, body["top_k"])
        token = draw(sampled, uniform, body["temperature"])
        reported = full if self.facts["log_probs"] == "raw" else sampled
        request.tokens.append(token)
        request.log_prob.append(float(reported[token]))
        request.labels.append(self.label)
        text = "".join("abcdefg"[i] for i in request.tokens if i != STOP)
        if (token == STOP and request.fault != "unstopped") or any(entry in text for entry in body["stop"]):
            request.ended = "stop"
        elif len(request.tokens) >= body["max_tokens"]:
            request.ended = "length"

    # ---- the other calls ---------------------------------------------------------------------------------------------

    def _facts(self, _: Any) -> tuple[int, Any]:
        return 200, self.facts

    def _load(self, _: Any) -> tuple[int, Any]:
        return 200, {"waiting": self.waiting, "weight_version": self.label, "model": self.facts["model"]}

    def _tokenize(self, body: Any) -> tuple[int, Any]:
        letters = self.facts.get("letters", "abcdefg")
        return 200, [letters.find(letter) + 1 for letter in body["text"]]

    def _score(self, body: Any) -> tuple[int, Any]:
        return 200, self._scored(body)

    async def _scored(self, body: Any) -> list[float]:
        while self.paused:
            await asyncio.sleep(0.001)
        prompt, tokens = body["prompt"], body["tokens"]
        return [float(x) for x in sequence_log_probs(self.weights, prompt, tokens)]

    def _sleep(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert self.paused and not self.running
        self.asleep = True
        return 200, {}

    def _wake(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.asleep = False
        return 200, {}

    def _pause(self, body: Any) -> tuple[int, Any]:
        self.paused = True
        for request in self.running.values() if body["mode"] == "abort" else ():
            request.ended = request.ended or "abort"
        return 200, None

    def _resume(self, _: Any) -> tuple[int, Any]:
        self.paused = False
        return 200, None

    def _weights(self, body: Any) -> tuple[int, Any]:
        assert self.paused
        if not self.ignores_weights:
            self.weights = body["weights"]
        if not self.forgetful:
            self.label = body["label"]
        return 200, None

    def _forget(self, body: Any) -> tuple[int, Any]:
        self.cache.clear()
        for request in self.running.values() if body["running"] else ():
            request.kv = states(self.weights, request.everything[:-1])
        return 200, None


def spans_of(labels: list[str]) -> list[tuple[str, int, int]]:
    """(label, start, end) of the labels of tokens."""
    starts = [i for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
    return [(labels[a], a, b) for a, b in zip(starts, [*starts[1:], len(labels)], strict=False)]


def _respond(writer: asyncio.StreamWriter, status: int, answer: Any, *, last: bool = False, more: str = "") -> None:
    writer.write(whole(status, json.dumps(answer).encode(), last=last, more=more))
