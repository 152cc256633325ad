"""A scorer behind HTTP: completions are posted as JSON, and the response contains the scores."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from proxima.data import require
from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import WeightedReward, validated
from proxima.reward.posting import MAX_WAIT, PostLimits, bearer_token, check_url, post, require_reachable, token_note
from proxima.system.bounded_reading import TooLargeError, UnreadableError, parse_json

RESPONSE_BYTES = 1 << 20  # limit of a response, plus for each completion:
COMPLETION_BYTES = 64 << 10
MAX_PARTS = 64  # of a score: each is a metric of the run


@dataclass(frozen=True, kw_only=True)
class Http(WeightedReward):
    """The scores that a server returns for a POST with the completions; a failure gives an invalid score, never 0.

    The request is `{"prompt": {"uid", "messages", "answer", "metadata"}, "completions": [{"sample", "text", "tokens",
    "finish_reason"}, …]}`, the response `{"scores": [s, …]}`, one per completion in the same order. Each s is a
    number, or `{"value": number, "correct": true | false | null, "parts": {name: number}}`, or, if the server could
    not score this one, `{"error": "why"}` or null. Parts are logged as `<name>/<key>`.

    Before the run a request with `"prompt": null` and no completions checks the server: no connection, a redirect, or
    status 401, 403, 404, 405 or 407 prevents the run; any other response is fine. During the run, a connection error, a
    timeout or status 408, 425, 429, 500, 502, 503 or 504 is retried; after the last attempt the request's completions
    are invalid, and the run continues. Redirects are not followed: completions and token are only sent to `url`.

    Args:
        url: `http://` or `https://` address; the proxies of the environment are used, except for this machine.
        seconds: time for one attempt, from connecting to the last byte; > 0.
        retries: attempts after the first; >= 0.
        backoff: seconds before the second attempt, doubled before each further one; a longer `Retry-After` takes
            precedence; at most 30 at a time.
        max_concurrent: simultaneous requests, over all prompts; >= 1.
        per_request: completions of a prompt in one request; 0: all of them.
        token_env: name of the environment variable with a bearer token; null: no `Authorization`. The token itself is
            never written anywhere.
    Returns: Score as sent; `correct` if the server sends it.
    Raises: FieldError at construction for an invalid address, or a variable that isn't set; `score` raises PostFailed,
        or ValueError for an invalid response.
    Edge cases: a response that is not JSON, has no `scores` or a wrong number of them invalidates the whole request,
        which is not retried. NaN, an infinity, a number too large for a float, a bool or a text, as value or as part,
        or more than 64 parts, invalidate only their completion. A response of more than 1 MiB plus 64 KiB per
        completion, a compressed one, and JSON nested more than 64 levels deep are refused.
    """

    url: str
    seconds: float = 30.0
    retries: int = 3
    backoff: float = 0.5
    max_concurrent: int = 8
    per_request: int = 0
    token_env: str | None = None

    kind = "http"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.url, "http://localhost:8000/score")
        require(0 < self.seconds < float("inf"), "seconds", self.seconds, "must be > 0 and finite")
        require(self.retries >= 0, "retries", self.retries, "must be >= 0")
        require(0 <= self.backoff < float("inf"), "backoff", self.backoff, "must be >= 0 seconds and finite")
        require(self.max_concurrent >= 1, "max_concurrent", self.max_concurrent, "must be >= 1")
        bound = "must be >= 0; 0 sends all completions of a prompt at once"
        require(self.per_request >= 0, "per_request", self.per_request, bound)
        if self.token_env is not None:
            bearer_token(self.token_env, "token_env")

    @property
    def concurrency(self) -> int:
        return self.max_concurrent

    @property
    def completions_per_call(self) -> int:
        return self.per_request

    @property
    def call_timeout(self) -> float:
        """Seconds that all attempts may take together, so that the runner interrupts none of them."""
        return self.seconds * (self.retries + 1) + MAX_WAIT * self.retries + 5.0

    def sends(self) -> str:
        shown = "each prompt with its row's answer and columns, and the completions with their tokens"
        return f"{shown} → POST {self.url}{token_note(self.token_env)}"

    def check(self) -> None:
        require_reachable(lambda: self._post(None, ()), "the scorer")

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        data = self._post(prompt, completions)
        try:
            response = parse_json(data, parse_int=_integer)
        except (TooLargeError, UnreadableError) as error:
            verb = "has" if isinstance(error, TooLargeError) else "is"
            raise ValueError(f"the answer {verb} {error}") from None
        scores = response.get("scores") if isinstance(response, dict) else None
        if not isinstance(scores, list):
            raise ValueError(f"the answer has no list 'scores': {data[:80].decode(errors='replace')}")
        if len(scores) != len(completions):
            raise ValueError(f"the answer has {len(scores)} scores for {len(completions)} completions")
        return [_score(item) for item in scores]

    def _post(self, p: Prompt | None, completions: Sequence[Completion]) -> bytes:
        prompt_fields = p and {"uid": p.uid, "messages": p.messages, "answer": p.answer, "metadata": dict(p.metadata)}
        sent = [
            {"sample": c.sample, "text": c.text, "tokens": c.tokens.tolist(), "finish_reason": c.finish_reason}
            for c in completions
        ]
        body = json.dumps({"prompt": prompt_fields, "completions": sent}).encode()
        token = "" if self.token_env is None else bearer_token(self.token_env, "token_env")
        sending = post(
            self.url,
            lambda attempt: body,
            token=token,
            limit=RESPONSE_BYTES + COMPLETION_BYTES * len(sent),
            attempts=PostLimits(seconds=self.seconds, retries=self.retries, backoff=self.backoff),
            read=bytes,
        )
        return asyncio.run(sending)


def _integer(digits: str) -> int | float:
    """One that is too large for a float is infinite, and not a valid score."""
    if len(digits) > 300:
        return float(digits)
    return int(digits)


def _score(item: object) -> Score:
    """One entry of `scores`; an invalid entry is a failed score."""
    try:
        if item is None:
            return Score.failed("the server has no score for it")
        if not isinstance(item, dict):
            return validated(Score(value=_number(item, "value")))
        if item.get("error") is not None:
            return Score.failed(" ".join(str(item["error"]).split())[:300] or "an empty error message")
        if "value" not in item:
            raise ValueError(f"a score without 'value' (keys: {', '.join(item)[:80] or 'none'})")
        parts = item.get("parts")
        correct = item.get("correct")
        if not isinstance(parts, dict | None) or len(parts or ()) > MAX_PARTS:
            raise ValueError(f"returned parts={parts!r:.80}, expected an object with at most {MAX_PARTS} numbers")
        if not isinstance(correct, bool | None):
            raise ValueError(f"returned correct={correct!r:.80}, expected true, false or null")
        numbers = {key: _number(part, key) for key, part in (parts or {}).items()}
        return validated(Score(value=_number(item["value"], "value"), correct=correct, parts=numbers))
    except ValueError as error:
        return Score.failed(f"ValueError: {error}"[:300])


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"returned {key:.80}={value!r:.80}, expected a number")
    return float(value)
