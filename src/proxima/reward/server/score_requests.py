"""Validates the JSON of a request field by field; nothing is guessed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from starlette.exceptions import HTTPException

from proxima.data import Completion, FinishReason, Prompt
from proxima.data.errors import suggestion
from proxima.reward.server.scorer_limits import ScorerLimits
from proxima.system.jsonl import utf8

SLICE_CHARACTERS = 32_768  # about a forward pass of ModelReward.tokens_per_forward
SLICE_COMPLETIONS = 64


@dataclass(frozen=True)
class SubmittedGroup:
    """Completions of a prompt to be scored."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    per_token: bool

    def slices(self) -> Iterator["SubmittedGroup"]:
        """Split the group into parts of bounded work."""
        asked = sum(len(message["content"]) for message in self.prompt.messages)
        start, size = 0, asked
        for end, completion in enumerate(self.completions):
            size += len(completion.text)
            if end > start and (size > SLICE_CHARACTERS or end - start == SLICE_COMPLETIONS):
                yield replace(self, completions=self.completions[start:end])
                start, size = end, asked + len(completion.text)
        if self.completions:
            yield replace(self, completions=self.completions[start:])


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _one_of(words: tuple[str, ...], *more: Any) -> tuple[Any, str]:
    return lambda value: value in (*words, *more), f"one of {', '.join(words)}"


# The form of a value: fields of an object, elements of a list, or a test with what it expects.
ANYTHING = (lambda value: True, "")
OBJECT = (lambda value: isinstance(value, dict), "an object")
LIST = (lambda value: isinstance(value, list), "a list")
TEXT = (lambda value: isinstance(value, str), "text")
COUNT = (lambda value: value is None or _is_count(value), "a whole number >= 0")
IDS = (lambda value: value is None or (isinstance(value, list) and all(map(_is_count, value))), "a list of token ids")
PROMPT = {
    "uid": COUNT,
    "messages": [{"role": _one_of(("system", "user", "assistant")), "content": TEXT}],
    "answer": ANYTHING,
    "metadata": (lambda value: isinstance(value, dict | None), "an object"),
}
COMPLETION = {"sample": COUNT, "text": TEXT, "tokens": IDS, "finish_reason": _one_of(get_args(FinishReason), None)}
SWITCH = (lambda value: isinstance(value, bool | None), "true or false")
SCORE = {"completions": [COMPLETION], "per_token": SWITCH, "prompt": ANYTHING}


def submitted_groups(content: Any, limits: ScorerLimits, *, batch: bool) -> list[SubmittedGroup]:
    """Parse a request of `/score`, or of `/batch`; HTTPException names the invalid field."""
    if batch:
        _require(content, {"requests": [ANYTHING]}, "")
    requests = content["requests"] if batch else [content]
    groups = [_group(given, f"requests[{i}]." if batch else "", limits) for i, given in enumerate(requests)]
    count = sum(len(group.completions) for group in groups)
    if count > limits.completions:
        raise HTTPException(413, f"{count:,} completions; the limit is {limits.completions:,}, --max-completions")
    read = sum(len(completion.text) for group in groups if group.per_token for completion in group.completions)
    if read > 5 * limits.characters:
        raise HTTPException(413, f"per_token of {read:,} characters; the limit is {5 * limits.characters:,}")
    return groups


def _group(given: Any, place: str, limits: ScorerLimits) -> SubmittedGroup:
    _require(given, SCORE, place)
    prompt, completions, messages = given.get("prompt"), given["completions"], []
    if prompt is not None or completions:  # else a health check
        _require(prompt, PROMPT, f"{place}prompt")
        if not (messages := prompt["messages"]):
            raise HTTPException(400, f"{place}prompt.messages=a list of 0 must be at least one {{role, content}}")
    lengths = {f"{place}prompt": sum(len(message["content"]) for message in messages)}
    lengths |= {f"{place}completions[{i}].text": len(c["text"]) for i, c in enumerate(completions)}
    for name, length in lengths.items():
        if length > limits.characters:
            raise HTTPException(413, f"{name}: {length:,} characters; the limit is {limits.characters:,}")
    texts = tuple({"role": message["role"], "content": utf8(message["content"])} for message in messages)
    reasons: list[FinishReason] = [completion.get("finish_reason") or "stop" for completion in completions]
    made = (Completion.of_text(0, i, utf8(c["text"]), finish_reason=reasons[i]) for i, c in enumerate(completions))
    prompt = Prompt(uid=0, messages=texts, tokens=np.zeros(0, np.int32))
    return SubmittedGroup(prompt, tuple(made), bool(given.get("per_token")))


def _require(value: Any, form: Any, place: str) -> None:
    """Raise HTTPException, which names the field at `place`, unless the value has the form; a `place` that ends in a
    point is the object above."""
    holds, expected = form if isinstance(form, tuple) else OBJECT if isinstance(form, dict) else LIST
    if not holds(value):
        raise HTTPException(400, f"{place.rstrip('.') or 'the request'}={_shown(value)} must be {expected}")
    if isinstance(form, list):
        for i, entry in enumerate(value):
            _require(entry, form[0], f"{place}[{i}]")
    elif isinstance(form, dict):
        above = f"{place}." if place and not place.endswith(".") else place
        for key in value:
            if key not in form:
                raise HTTPException(400, f"unknown field {above}{key:.60}; {suggestion(key[:60], form)}")
        for key, inner in form.items():
            _require(value.get(key), inner, above + key)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value):,}"
    return ascii(value[:40] if isinstance(value, str) else value)[:48]
