"""OpenAI's Responses: `/v1/responses`, with state by `previous_response_id`."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from proxima.rollout.episodes.formats.chat import ChatAnswer, ChatMessage, ChatRefused, ChatRequest, Stored
from proxima.rollout.episodes.formats.completions import ROLES, openai_error
from proxima.rollout.episodes.formats.fields import (
    ContentParts,
    Fields,
    asked_grammar,
    checked_chat,
    checked_tools,
    event,
    flat_tool,
    forced_tool,
    list_field,
    model_name,
    not_done,
    refuse_top_log_probs,
    whole_number,
    written_call,
)

LOG_PROBS = "message.output_text.logprobs"
INCLUDED = {LOG_PROBS, "reasoning.encrypted_content"}  # the second: there is none
FIELDS = Fields(
    read=frozenset(
        {
            "include",
            "input",
            "instructions",
            "max_output_tokens",
            "model",
            "previous_response_id",
            "reasoning",
            "stream",
            "stream_options",
            "text",
            "tool_choice",
            "tools",
            "top_logprobs",
        }
    ),
    neutral={"background": (False,), "truncation": ("disabled",)},
)
CONTENT = ContentParts(("input_text", "output_text", "text", "refusal"), "input_image")
ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "store": True,
    "temperature": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


class Responses:
    """An `ApiFormat`. A response is an item for the text, unless it is empty, and one for each call."""

    def parse(self, body: object, stored: Stored) -> ChatRequest:
        """See `ApiFormat`."""
        given = FIELDS.check(body)
        tools = [_tool(i, tool) for i, tool in enumerate(list_field(given, "tools"))]
        checked = checked_tools(tools)
        choice = given.get("tool_choice", "auto")
        forced = ""
        if isinstance(choice, dict) and choice.get("type") == "function":
            forced = forced_tool(choice, checked)
        elif choice not in ("auto", "none", "required"):
            raise not_done("tool_choice", choice)
        offered = () if choice == "none" else checked
        included = list_field(given, "include")
        for name in included:
            if name not in INCLUDED:
                raise not_done("include", included)
        refuse_top_log_probs(given)
        _check_text_and_reasoning(given)
        return ChatRequest(
            messages=checked_chat([*_system(given), *chat_of(given, stored)], "input"),
            tools=offered,
            max_tokens=whole_number(given, "max_output_tokens"),
            model=model_name(given),
            forced=forced,
            log_probs=LOG_PROBS in included,
            grammar=asked_grammar(_text_of(given).get("format"), "text.format"),
        )

    def written(self, body: Mapping[str, Any], answers: Sequence[ChatAnswer], name: str, model: str) -> dict[str, Any]:
        """See `ApiFormat`."""
        (answer,) = answers
        cut = answer.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        if answer.calls and not answer.content.strip():
            output = []
        else:
            output = [_text_item(f"msg_{name}", answer, status)]
        for key, call in answer.calls.items():
            called = {"call_id": key, "name": call.name, "arguments": json.dumps(dict(call.arguments))}
            output.append({"id": f"fc_{name}_{key}", "type": "function_call", "status": "completed", **called})
        now = int(time.time())
        completed_at = None if cut else now
        incomplete_details = {"reason": "max_output_tokens"} if cut else None
        echoed = dict(ECHOED)
        for field in ECHOED:
            if body.get(field) is not None:
                echoed[field] = body[field]
        return {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": now,
            "completed_at": completed_at,
            "status": status,
            "error": None,
            "incomplete_details": incomplete_details,
            "model": model,
            "output": output,
            "reasoning": {"effort": None, "summary": None},
            "text": {"format": _text_of(body).get("format") or {"type": "text"}},
            "usage": _usage(answer),
            **echoed,
        }

    def events(self, body: Mapping[str, Any], written: Mapping[str, Any]) -> Iterator[str]:
        """See `ApiFormat`."""
        begun = {**written, "status": "in_progress", "completed_at": None, "incomplete_details": None, "output": []}
        begun["usage"] = None
        numbers = count()
        for kind, facts in _steps(written, begun):
            yield event({"type": f"response.{kind}", "sequence_number": next(numbers), **facts}, named=True)

    def error(self, refusal: ChatRefused) -> dict[str, Any]:
        """See `ApiFormat`."""
        return openai_error(refusal)


def chat_of(given: Mapping[str, Any], stored: Stored) -> list[ChatMessage]:
    """The chat of a request, without its instructions, which hold for that request alone."""
    earlier: Sequence[ChatMessage] = ()
    previous = given.get("previous_response_id")
    if previous:
        if previous not in stored:
            what = f"previous_response_id={previous!r:.80}: no response of this episode that was stored has this id"
            raise ChatRefused(what, code="previous_response_not_found")
        earlier = stored[previous]
    items = given.get("input", [])
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise ChatRefused("input: must be a text or a list of items")
    messages = list(earlier)
    for i, item in enumerate(items):
        message = _message(f"input.{i}", item)
        if message.role == "assistant" and message.calls and messages and messages[-1].role == "assistant":
            last = messages[-1]  # a text and calls are one message of the model
            message = ChatMessage(role="assistant", content=last.content, calls=(*last.calls, *message.calls))
            messages.pop()
        messages.append(message)
    return messages


def _system(given: Mapping[str, Any]) -> list[ChatMessage]:
    instructions = given.get("instructions") or ""
    if not isinstance(instructions, str):
        raise ChatRefused("instructions: must be a text")
    if instructions:
        return [ChatMessage(role="system", content=instructions)]
    return []


def _message(where: str, item: Any) -> ChatMessage:
    kind = None
    if isinstance(item, dict):
        kind = item.get("type", "message")
    if kind == "message" and str(item.get("role")) in ROLES:
        content, images = CONTENT.read(item.get("content"), f"{where}.content")
        return ChatMessage(role=ROLES[item["role"]], content=content, images=images)
    if kind == "function_call":
        call = written_call(item.get("name"), item.get("arguments"), f"{where}.arguments")
        return ChatMessage(role="assistant", calls=(call,))
    if kind == "function_call_output":
        content, images = CONTENT.read(item.get("output"), f"{where}.output")
        return ChatMessage(role="tool", content=content, images=images)
    if kind == "message":
        raise ChatRefused(f"{where}: must have a role of {', '.join(ROLES)}")
    raise not_done(f"{where}.type", kind, "send messages, function calls and their outputs")


def _tool(index: int, tool: object) -> dict[str, Any]:
    if isinstance(tool, dict) and tool.get("type") != "function":
        raise not_done(f"tools.{index}.type", tool.get("type"), "the policy calls functions alone")
    return flat_tool(tool, f"tools.{index}", "parameters")


def _text_of(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The field `text`, empty where it is left out."""
    text = given.get("text")
    return text if isinstance(text, dict) else {}


def _check_text_and_reasoning(given: Mapping[str, Any]) -> None:
    """Refuse a length of the text, and an effort."""
    for name, neutral in (
        ("text", {"verbosity": "medium"}),
        ("reasoning", {"summary": "auto", "generate_summary": "auto"}),
    ):
        parts = given.get(name, {})
        if not isinstance(parts, dict):
            raise ChatRefused(f"{name}: must be an object")
        for part, value in parts.items():
            read = (name, part) == ("text", "format")
            if not read and value is not None and value != neutral.get(part):
                raise not_done(f"{name}.{part}", value)


def _text_item(name: str, answer: ChatAnswer, status: str) -> dict[str, Any]:
    log_probs = [
        {"token": each.text, "logprob": each.log_prob, "bytes": each.bytes or [], "top_logprobs": []}
        for each in answer.log_probs or ()
    ]
    part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": log_probs}
    return {"id": name, "type": "message", "role": "assistant", "status": status, "content": [part]}


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _steps(written: Mapping[str, Any], begun: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a stream, without their numbers."""
    yield "created", {"response": begun}
    yield "in_progress", {"response": begun}
    for index, item in enumerate(written["output"]):
        place = {"output_index": index}
        steps = _text_steps if item["type"] == "message" else _call_steps
        for kind, facts in steps(item):
            yield kind, place | facts
    yield written["status"], {"response": written}


def _text_steps(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    (part,) = item["content"]
    place = {"item_id": item["id"], "content_index": 0}
    yield "output_item.added", {"item": {**item, "status": "in_progress", "content": []}}
    yield "content_part.added", {**place, "part": {**part, "text": "", "logprobs": []}}
    if part["text"]:
        yield "output_text.delta", {**place, "delta": part["text"], "logprobs": part["logprobs"]}
    yield "output_text.done", {**place, "text": part["text"], "logprobs": part["logprobs"]}
    yield "content_part.done", {**place, "part": part}
    yield "output_item.done", {"item": item}


def _call_steps(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    place = {"item_id": item["id"]}
    yield "output_item.added", {"item": {**item, "status": "in_progress", "arguments": ""}}
    yield "function_call_arguments.delta", {**place, "delta": item["arguments"]}
    yield "function_call_arguments.done", {**place, "name": item["name"], "arguments": item["arguments"]}
    yield "output_item.done", {"item": item}
