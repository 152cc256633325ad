"""Anthropic's Messages: `/v1/messages`, and `/v1/messages/count_tokens`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxima.data.episode import ToolCall
from proxima.rollout.episodes.formats.chat import ChatAnswer, ChatMessage, ChatRefused, ChatRequest, Grammar, Stored
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
    stop_texts,
    whole_number,
    written_call,
)

FIELDS = Fields(
    read=frozenset(
        {
            "max_tokens",
            "messages",
            "model",
            "output_config",
            "output_format",
            "stop_sequences",
            "stream",
            "system",
            "thinking",
            "tool_choice",
            "tools",
        }
    )
)
TEXT = ContentParts(("text",))
SEEN = ContentParts(("text",), "image")
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages:
    """An `ApiFormat`. A chat that ends with the assistant is continued there, as in Anthropic's API."""

    def parse(self, body: object, stored: Stored) -> ChatRequest:
        """See `ApiFormat`."""
        given = FIELDS.check(body)
        tools = checked_tools([_tool(i, tool) for i, tool in enumerate(list_field(given, "tools"))])
        choice = given.get("tool_choice", {"type": "auto"})
        kind = None
        if isinstance(choice, dict):
            kind = choice.get("type")
        if kind not in ("auto", "any", "none", "tool"):
            raise not_done("tool_choice", choice)
        thinking = given.get("thinking", {"type": "disabled"})
        if not isinstance(thinking, dict) or thinking.get("type") != "disabled":
            raise not_done("thinking", thinking, "the chat template decides whether the model thinks")
        system, _ = TEXT.read(given.get("system"), "system")
        messages: list[ChatMessage] = []
        if system:
            messages.append(ChatMessage(role="system", content=system))
        for i, message in enumerate(list_field(given, "messages", " of messages")):
            messages += _messages(f"messages.{i}", message)
        continues = bool(messages) and messages[-1].role == "assistant"
        if continues and messages[-1].calls:
            raise ChatRefused("messages: the last one has calls without their results")
        chat = checked_chat(messages, "messages")
        forced = ""
        if kind == "tool":
            forced = forced_tool(choice, tools)
        elif kind == "none":
            tools = ()
        return ChatRequest(
            messages=chat,
            tools=tools,
            max_tokens=whole_number(given, "max_tokens"),
            stop=stop_texts(given, "stop_sequences"),
            model=model_name(given),
            forced=forced,
            continues=continues,
            grammar=_grammar(given),
        )

    def written(self, body: Mapping[str, Any], answers: Sequence[ChatAnswer], name: str, model: str) -> dict[str, Any]:
        """See `ApiFormat`."""
        (answer,) = answers
        blocks: list[dict[str, Any]] = []
        if answer.content:
            blocks = [{"type": "text", "text": answer.content}]
        for key, call in answer.calls.items():
            blocks.append({"type": "tool_use", "id": key, "name": call.name, "input": dict(call.arguments)})
        reason = STOP_REASONS[answer.finish_reason]
        own_stop = ""
        if answer.stopped_by in stop_texts(body, "stop_sequences"):
            own_stop = answer.stopped_by
        if own_stop and reason == "end_turn":
            reason = "stop_sequence"
        usage = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": own_stop or None,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens, **usage},
        }

    def events(self, body: Mapping[str, Any], written: Mapping[str, Any]) -> Iterator[str]:
        """See `ApiFormat`."""
        usage = written["usage"]
        begun = {**written, "content": [], "stop_reason": None, "stop_sequence": None}
        begun["usage"] = {**usage, "output_tokens": 0}
        steps: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(written["content"]):
            if block["type"] == "text":
                empty = {**block, "text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            else:
                empty = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            steps.append({"type": "content_block_start", "index": index, "content_block": empty})
            steps.append({"type": "content_block_delta", "index": index, "delta": delta})
            steps.append({"type": "content_block_stop", "index": index})
        ended = {name: written[name] for name in ("stop_reason", "stop_sequence")}
        steps.append({"type": "message_delta", "delta": ended, "usage": usage})
        steps.append({"type": "message_stop"})
        for step in steps:
            yield event(step, named=True)

    def error(self, refusal: ChatRefused) -> dict[str, Any]:
        """See `ApiFormat`."""
        kind = ERRORS.get(refusal.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": refusal.message}}


def _grammar(given: Mapping[str, Any]) -> Grammar | None:
    """The form of the answer: in `output_config`, or in `output_format` as SDKs wrote it before."""
    config = given.get("output_config", {})
    if not isinstance(config, dict):
        raise ChatRefused("output_config: must be an object")
    for part, value in config.items():
        if part != "format" and value is not None:
            raise not_done(f"output_config.{part}", value)
    now = asked_grammar(config.get("format"), "output_config.format")
    before = asked_grammar(given.get("output_format"), "output_format")
    if now is not None and before is not None:
        raise ChatRefused("output_format: output_config.format is given too; leave one of the two out")
    return now or before


def _tool(index: int, tool: object) -> dict[str, Any]:
    kind = _kind(tool)
    if kind not in (None, "custom"):
        raise not_done(f"tools.{index}.type", kind, "the policy calls tools with an input_schema alone")
    return flat_tool(tool, f"tools.{index}", "input_schema")


def _kind(block: object) -> Any:
    """The type that an object names, if it is one."""
    return block.get("type") if isinstance(block, dict) else None


def _messages(where: str, message: object) -> list[ChatMessage]:
    """The messages that one of the API is: results of tools have messages of their own."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise ChatRefused(f"{where}: must have a role of user, assistant")
    content = message.get("content")
    if content is None:
        content = []
    elif not isinstance(content, list):
        content = [{"type": "text", "text": content}]
    kinds = list(map(_kind, content))
    if message["role"] == "assistant":
        calls = [_call(f"{where}.content.{i}", content[i]) for i, kind in enumerate(kinds) if kind == "tool_use"]
        texts = [block for block, kind in zip(content, kinds, strict=True) if kind != "tool_use"]
        text, _ = TEXT.read(texts, f"{where}.content")
        return [ChatMessage(role="assistant", content=text, calls=tuple(calls))]
    out = list[ChatMessage]()
    for i, (block, kind) in enumerate(zip(content, kinds, strict=True)):
        if kind == "tool_result":
            text, images = SEEN.read(block.get("content"), f"{where}.content.{i}.content")
            out.append(ChatMessage(role="tool", content=text, images=images))
    others = [block for block, kind in zip(content, kinds, strict=True) if kind != "tool_result"]
    if others or not out:
        text, images = SEEN.read(others, f"{where}.content")
        out.append(ChatMessage(role=message["role"], content=text, images=images))
    return out


def _call(where: str, block: Mapping[str, Any]) -> ToolCall:
    if not isinstance(block.get("input"), dict):
        raise ChatRefused(f"{where}.input: must be an object")
    return written_call(block.get("name"), block["input"], where)
