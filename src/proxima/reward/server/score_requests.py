"""Validates the JSON of a request field by field; nothing is guessed."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np
from starlette.exceptions import HTTPException

from proxima.data.errors import suggestion
from proxima.data.flow import Completion, FinishReason, Group, Prompt
from proxima.reward.base import unscored
from proxima.reward.server.scorer_limits import ScorerLimits
from proxima.system.jsonl import utf8

SLICE_CHARACTERS = 32_768  # about a forward pass of ModelReward.tokens_per_forward
SLICE_COMPLETIONS = 64


def slices(group: Group) -> Iterator[Sequence[Completion]]:
    """Split the completions of a group into parts of bounded work."""
    asked = sum(len(message["content"]) for message in group.prompt.messages)
    start, size = 0, asked
    for end, completion in enumerate(group.completions):
        size += len(completion.text)
        if end > start and (size > SLICE_CHARACTERS or end - start == SLICE_COMPLETIONS):
            yield group.completions[start:end]
            start, size = end, asked + len(completion.text)
    if group.completions:
        yield group.completions[start:]


# The form of a value: fields of an object, elements of a list, some words, or a type: `object` for what no model reads.
PROMPT = {
    "uid": object,
    "messages": [{"role": ("system", "user", "assistant"), "content": str}],
    "answer": object,
    "metadata": object,
}
COMPLETION = {"sample": object, "text": str, "tokens": object, "finish_reason": (*get_args(FinishReason), None)}
SCORE = {"completions": [COMPLETION], "prompt": object}
NAMES: dict[Any, str] = {dict: "an object", list: "a list", str: "text"}


def submitted_group(given: Any, limits: ScorerLimits) -> Group:
    """Parse a request; HTTPException names the invalid field."""
    _require(given, SCORE, "")
    prompt, completions, messages = given.get("prompt"), given["completions"], []
    if len(completions) > limits.completions:
        limit = f"the limit is {limits.completions:,}, --max-completions"
        raise HTTPException(413, f"{len(completions):,} completions; {limit}")
    if prompt is not None or completions:  # else a health check
        _require(prompt, PROMPT, "prompt")
        if not (messages := prompt["messages"]):
            raise HTTPException(400, "prompt.messages=[] must be at least one {role, content}")
    lengths = {"prompt": sum(len(message["content"]) for message in messages)}
    lengths |= {f"completions[{i}].text": len(c["text"]) for i, c in enumerate(completions)}
    for name, length in lengths.items():
        if length > limits.characters:
            raise HTTPException(413, f"{name}: {length:,} characters; the limit is {limits.characters:,}")
    texts = tuple({"role": message["role"], "content": utf8(message["content"])} for message in messages)
    reasons: list[FinishReason] = [completion.get("finish_reason") or "stop" for completion in completions]
    made = [Completion.of_text(0, i, utf8(c["text"]), finish_reason=reasons[i]) for i, c in enumerate(completions)]
    return unscored(Prompt(uid=0, messages=texts, tokens=np.zeros(0, np.int32)), made)


def _require(value: Any, form: Any, place: str) -> None:
    """Raise HTTPException, which names the field at `place` (empty: the request), unless the value has the form."""
    kind = type(form) if isinstance(form, dict | list) else form
    if not (value in kind if isinstance(kind, tuple) else isinstance(value, kind)):
        expected = f"one of {', '.join(filter(None, kind))}" if isinstance(kind, tuple) else NAMES[kind]
        raise HTTPException(400, f"{place or 'the request'}={json.dumps(value)[:48]} must be {expected}")
    if isinstance(form, list):
        for i, entry in enumerate(value):
            _require(entry, form[0], f"{place}[{i}]")
    elif isinstance(form, dict):
        above = f"{place}." if place else ""
        for key in value:
            if key not in form:
                raise HTTPException(400, f"unknown field {above}{key:.60}; {suggestion(key[:60], form)}")
        for key, inner in form.items():
            _require(value.get(key), inner, above + key)
