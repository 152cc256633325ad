"""A scorer behind HTTP: completions are posted as JSON, scores come back."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from proxima.data import Completion, Prompt, Score, UserError, require
from proxima.reward.base import WeightedReward, validated
from proxima.reward.post import MAX_WAIT, PostFailed, post
from proxima.reward.workers.graders import number_of

_REFUSING = frozenset(
    {401, 403, 404, 405, 407}
)  # wrong address, wrong method, no right: another attempt changes nothing


@dataclass(frozen=True, kw_only=True)
class Http(WeightedReward):
    """What a server answers to a POST with the completions; a failure is invalid, never 0.

    It is sent `{"prompt": {"uid", "messages", "answer", "metadata"}, "completions": [{"sample", "text", "tokens",
    "finish_reason"}, …]}` and answers `{"scores": [s, …]}`, one for each completion in the same order. Each s is a
    number, or `{"value": number, "correct": true | false | null, "parts": {name: number}}`, or, where the server could
    not score this one, `{"error": "why"}` or null. Parts are logged as `<name>/<key>`.

    Before the run a request with `"prompt": null` and no completions asks whether somebody is there: no connection, a
    redirect, or an answer of 401, 403, 404, 405 or 407, refuses the run; whatever else the server says to it is fine.
    During the run a request that fails by connection, time-out or status 408, 425, 429, 500, 502, 503 or 504 is tried
    again; after the last attempt its completions are invalid, and the run goes on. No redirect is followed: completions
    and token go to `url` and nowhere else.

    Args:
        url: `http://` or `https://` address; the proxies of the environment are used.
        seconds: time for one attempt, from connecting to the last byte; > 0.
        retries: attempts after the first; >= 0.
        backoff: seconds before the second attempt, doubled before each further one; a longer `Retry-After` is kept; at
            most 30 at a time.
        max_concurrent: requests open at once, over all prompts; >= 1.
        per_request: completions of a prompt in one request; 0: all of them.
        token_env: name of the environment variable with a bearer token; none: no `Authorization`. The token itself is
            written nowhere.
        weight: factor of the value in the sum of the rewards.
        name: key among the parts; none: `http`.
    Returns: Score as answered; `correct` where the server says so.
    Raises: ValueError at construction for an address that is none, or a variable that isn't set; in `score`, what the
        request came to.
    Edge cases: an answer that is no JSON, has no `scores` or a wrong number of them costs the whole request and is not
        asked for again; NaN, an infinity, a number beyond any float or a text costs its completion alone, as value and
        as part. Answers over 64 MiB are not read.
    """

    url: str
    seconds: float = 30.0
    retries: int = 3
    backoff: float = 0.5
    max_concurrent: int = 8
    per_request: int = 0
    token_env: str | None = None

    kind: ClassVar[str] = "http"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_url(self.url)
        require(0 < self.seconds < float("inf"), "seconds", self.seconds, "must be > 0 and finite")
        require(self.retries >= 0, "retries", self.retries, "must be >= 0")
        require(0 <= self.backoff < float("inf"), "backoff", self.backoff, "must be >= 0 seconds and finite")
        require(self.max_concurrent >= 1, "max_concurrent", self.max_concurrent, "must be >= 1")
        require(
            self.per_request >= 0,
            "per_request",
            self.per_request,
            "must be >= 0; 0 sends all completions of a prompt at once",
        )
        known = self.token_env is None or bool(os.environ.get(self.token_env))
        require(known, "token_env", self.token_env, "must name an environment variable that is set")

    @property
    def concurrency(self) -> int:
        return self.max_concurrent

    @property
    def per_call(self) -> int:
        return self.per_request

    @property
    def deadline(self) -> float:
        """By when all attempts are over: what the runner waits, so that none is cut off half-way."""
        return self.seconds * (self.retries + 1) + MAX_WAIT * self.retries + 5.0

    def check(self) -> None:
        try:
            self._post(None, ())
        except PostFailed as problem:
            if problem.code is None:
                raise UserError(f"{problem}; start the scorer before the run") from None
            if 300 <= problem.code < 400:
                raise UserError(f"{problem}; give the address that it leads to") from None
            if problem.code in _REFUSING:
                raise UserError(f"{problem}; is it the right address, and may you use it?") from None

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        data = self._post(prompt, completions)
        try:
            answer = json.loads(data, parse_int=_whole)
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"the answer is not JSON: {problem}") from None
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise ValueError(f"the answer has no list 'scores': {data[:80].decode(errors='replace')}")
        if len(scores) != len(completions):
            raise ValueError(f"the answer has {len(scores)} scores for {len(completions)} completions")
        return [_score(item) for item in scores]

    def _post(self, prompt: Prompt | None, completions: Sequence[Completion]) -> bytes:
        asked = None
        if prompt is not None:
            asked = {
                "uid": prompt.uid,
                "messages": prompt.messages,
                "answer": prompt.answer,
                "metadata": dict(prompt.metadata),
            }
        sent = [
            {"sample": c.sample, "text": c.text, "tokens": c.tokens.tolist(), "finish_reason": c.finish_reason}
            for c in completions
        ]
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "proxima"}
        if self.token_env is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.token_env]}"
        body = json.dumps({"prompt": asked, "completions": sent}).encode()
        return post(self.url, body, headers, seconds=self.seconds, retries=self.retries, backoff=self.backoff)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number
        whole = False
    require(
        whole and not re.search(r"[\s\x00-\x1f]", url),
        "url",
        url,
        "must be an address such as http://localhost:8000/score",
    )
    require(
        parts.password is None,
        "url",
        f"{parts.scheme}://…@{parts.hostname}",
        "must hold no password: it would be written down; use token_env",
    )


def _whole(digits: str) -> int | float:
    """An integer of JSON; what no float can hold is infinite here, and so no score."""
    return int(digits) if len(digits) <= 300 else float(digits)


def _score(item: Any) -> Score:
    """One entry of `scores`; a bad one is a failed score, and costs its own completion."""
    try:
        if item is None:
            return Score.failed("the server has no score for it")
        if isinstance(item, dict):
            if item.get("error") is not None:
                return Score.failed(" ".join(str(item["error"]).split())[:300] or "an error without a word")
            if "value" not in item:
                raise ValueError(f"a score without 'value' (keys: {', '.join(item) or 'none'})")
            return validated(Score(value=item["value"], correct=item.get("correct"), parts=item.get("parts") or {}))
        return validated(Score(value=number_of(item, "value")))
    except (AttributeError, TypeError, ValueError) as problem:
        return Score.failed(f"ValueError: {problem}"[:300])
