"""Validates the JSON of a request field by field; nothing is guessed."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from proxima.data import Completion, FinishReason, Prompt
from proxima.data.errors import suggestion
from proxima.data.jsonl import utf8
from proxima.reward.server.scorer_limits import ScorerLimits

ROLES = ("system", "user", "assistant")
SLICE_CHARACTERS = 32_768  # about a forward pass of ModelReward.tokens_per_forward
SLICE_COMPLETIONS = 64


class RefusedRequest(Exception):
    """A request that gets no scores.

    Args:
        status: HTTP status.
        reason: one line for the client.
        headers: of the response.
    """

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, dict(headers or {})


@dataclass(frozen=True)
class SubmittedGroup:
    """Completions of a prompt to be scored; `number` is the index of the request in its batch."""

    number: int
    prompt: Prompt
    completions: tuple[Completion, ...]
    per_token: bool

    def slices(self) -> Iterator["SubmittedGroup"]:
        """Split the group into parts of bounded work."""
        asked = sum(len(message["content"]) for message in self.prompt.messages)
        part: list[Completion] = []
        size = asked
        for completion in self.completions:
            if part and (size + len(completion.text) > SLICE_CHARACTERS or len(part) == SLICE_COMPLETIONS):
                yield SubmittedGroup(self.number, self.prompt, tuple(part), self.per_token)
                part, size = [], asked
            part.append(completion)
            size += len(completion.text)
        if part:
            yield SubmittedGroup(self.number, self.prompt, tuple(part), self.per_token)


def score_request(content: Any, limits: ScorerLimits) -> list[SubmittedGroup]:
    """Parse a request of `/score`; RefusedRequest names the invalid field."""
    return _within(limits, [_request(0, content, "", limits)])


def score_requests(content: Any, limits: ScorerLimits) -> list[SubmittedGroup]:
    """Parse a request of `/batch`; RefusedRequest names the invalid field."""
    given = _list(_object(content, "", ("requests",)), "requests", "")
    return _within(limits, [_request(i, request, f"requests[{i}].", limits) for i, request in enumerate(given)])


def _within(limits: ScorerLimits, requests: list[SubmittedGroup]) -> list[SubmittedGroup]:
    count = sum(len(request.completions) for request in requests)
    if count > limits.completions:
        raise RefusedRequest(413, f"{count:,} completions; the limit is {limits.completions:,}, --max-completions")
    read = sum(len(c.text) for request in requests if request.per_token for c in request.completions)
    if read > limits.per_token_characters:
        raise RefusedRequest(413, f"per_token of {read:,} characters; the limit is {limits.per_token_characters:,}")
    return requests


def _request(number: int, given: Any, place: str, limits: ScorerLimits) -> SubmittedGroup:
    request = _object(given, place, ("prompt", "completions", "per_token"))
    completions = _list(request, "completions", place)
    per_token = request.get("per_token")
    _demand(isinstance(per_token, bool | None), f"{place}per_token", per_token, "true or false")
    if request.get("prompt") is None and not completions:  # a health check
        prompt = Prompt(uid=0, messages=(), tokens=np.zeros(0, np.int32))
    else:
        prompt = _prompt(request.get("prompt"), f"{place}prompt", limits)
    made = tuple(
        _completion(i, completion, f"{place}completions[{i}]", limits) for i, completion in enumerate(completions)
    )
    return SubmittedGroup(number, prompt, made, bool(per_token))


def _prompt(given: Any, place: str, limits: ScorerLimits) -> Prompt:
    prompt = _object(given, f"{place}.", ("uid", "messages", "answer", "metadata"))
    _demand(isinstance(prompt.get("metadata"), dict | None), f"{place}.metadata", prompt.get("metadata"), "an object")
    _demand(_is_count(prompt.get("uid", 0)), f"{place}.uid", prompt.get("uid"), "a whole number >= 0")
    messages = _list(prompt, "messages", f"{place}.")
    _demand(len(messages) > 0, f"{place}.messages", messages, "at least one {role, content}")
    for i, message in enumerate(messages):
        where = f"{place}.messages[{i}]"
        role, content = (_object(message, f"{where}.", ("role", "content")).get(key) for key in ("role", "content"))
        _demand(role in ROLES, f"{where}.role", role, f"one of {', '.join(ROLES)}")
        _demand(isinstance(content, str), f"{where}.content", content, "text")
    length = sum(len(message["content"]) for message in messages)
    if length > limits.characters:
        raise RefusedRequest(413, f"{place}: {length:,} characters; the limit is {limits.characters:,}")
    texts = tuple({"role": message["role"], "content": utf8(message["content"])} for message in messages)
    return Prompt(uid=0, messages=texts, tokens=np.zeros(0, np.int32))


def _completion(sample: int, given: Any, place: str, limits: ScorerLimits) -> Completion:
    completion = _object(given, f"{place}.", ("sample", "text", "tokens", "finish_reason"))
    text, tokens, reason = completion.get("text"), completion.get("tokens"), completion.get("finish_reason")
    _demand(_is_count(completion.get("sample", 0)), f"{place}.sample", completion.get("sample"), "a whole number >= 0")
    listed = tokens is None or (isinstance(tokens, list) and all(map(_is_count, tokens)))
    _demand(listed, f"{place}.tokens", tokens, "a list of token ids")
    reasons = get_args(FinishReason)
    _demand(reason is None or reason in reasons, f"{place}.finish_reason", reason, f"one of {', '.join(reasons)}")
    if not isinstance(text, str):
        raise RefusedRequest(400, f"{place}.text={_shown(text)} must be text")
    if len(text) > limits.characters:
        raise RefusedRequest(413, f"{place}.text: {len(text):,} characters; the limit is {limits.characters:,}")
    return Completion.of_text(0, sample, utf8(text), finish_reason=reason or "stop")


def _object(given: Any, place: str, fields: Iterable[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise RefusedRequest(400, f"{place.rstrip('.') or 'the request'}={_shown(given)} must be an object")
    for key in given:
        if key not in fields:
            raise RefusedRequest(400, f"unknown field {place}{key:.60}; {suggestion(key[:60], fields)}")
    return given


def _list(given: dict[str, Any], key: str, place: str) -> list[Any]:
    value = given.get(key)
    if not isinstance(value, list):
        raise RefusedRequest(400, f"{place}{key}={_shown(value)} must be a list")
    return value


def _demand(condition: bool, field: str, value: Any, expected: str) -> None:
    if not condition:
        raise RefusedRequest(400, f"{field}={_shown(value)} must be {expected}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (list, dict)):
        return f"a {'list' if isinstance(value, list) else 'n object'} of {len(value):,}".replace("a n ", "an ")
    return ascii(value[:40] if isinstance(value, str) else value)[:48]
