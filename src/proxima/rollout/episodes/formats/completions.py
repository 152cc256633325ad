"""OpenAI's chat completions: `/v1/chat/completions`."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxima.rollout.episodes.formats.chat import ChatAnswer, ChatMessage, ChatRefused, ChatRequest, Stored
from proxima.rollout.episodes.formats.fields import (
    ContentParts,
    Fields,
    asked_grammar,
    checked_chat,
    checked_tools,
    event,
    flag,
    forced_tool,
    list_field,
    model_name,
    not_done,
    refuse_top_log_probs,
    stop_texts,
    whole_number,
    written_call,
)

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TOOLS = ' of {"type": "function", "function": {"name": …, "parameters": …}}'
FIELDS = Fields(
    read=frozenset(
        {
            "add_generation_prompt",
            "continue_final_message",
            "logprobs",
            "max_completion_tokens",
            "max_tokens",
            "messages",
            "model",
            "n",
            "response_format",
            "stop",
            "stream",
            "stream_options",
            "tool_choice",
            "tools",
            "top_logprobs",
        }
    ),
    neutral={
        "add_special_tokens": (False,),
        "best_of": (1,),
        "echo": (False,),
        "ignore_eos": (False,),
        "include_stop_str_in_output": (False,),
        "min_tokens": (0,),
        "modalities": (["text"],),
        "return_token_ids": (False,),
        "return_tokens_as_token_ids": (False,),
        "use_beam_search": (False,),
        "verbosity": ("medium",),
    },
)
CONTENT = ContentParts(("text",), "image_url")


class ChatCompletions:
    """An `ApiFormat`."""

    def parse(self, body: object, stored: Stored) -> ChatRequest:
        """See `ApiFormat`."""
        given = FIELDS.check(body)
        messages = [_message(i, message) for i, message in enumerate(list_field(given, "messages", " of messages"))]
        if not isinstance(given.get("stream_options", {}), dict):
            raise ChatRefused("stream_options: must be an object")
        tools = checked_tools(list_field(given, "tools", TOOLS))
        choice = given.get("tool_choice", "auto")
        forced = ""
        if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
            forced = forced_tool(choice["function"], tools)
        elif choice == "none":
            tools = ()
        elif choice not in ("auto", "required"):
            raise not_done("tool_choice", choice)
        refuse_top_log_probs(given)
        most = whole_number(given, "max_completion_tokens")
        if most is None:
            most = whole_number(given, "max_tokens")
        return ChatRequest(
            messages=checked_chat(messages, "messages"),
            tools=tools,
            max_tokens=most,
            stop=stop_texts(given, "stop"),
            model=model_name(given),
            forced=forced,
            continues=_continues(given, messages),
            answers=whole_number(given, "n") or 1,
            log_probs=flag(given, "logprobs"),
            grammar=asked_grammar(given.get("response_format"), "response_format", within="json_schema"),
        )

    def written(self, body: Mapping[str, Any], answers: Sequence[ChatAnswer], name: str, model: str) -> dict[str, Any]:
        """See `ApiFormat`."""
        prompt = answers[0].prompt_tokens
        completion = sum(answer.completion_tokens for answer in answers)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [_choice(i, answer) for i, answer in enumerate(answers)],
            "usage": usage,
        }

    def events(self, body: Mapping[str, Any], written: Mapping[str, Any]) -> Iterator[str]:
        """See `ApiFormat`."""
        common = {"id": written["id"], "object": "chat.completion.chunk", "created": written["created"]}
        common["model"] = written["model"]
        for choice in written["choices"]:
            message = choice["message"]
            delta = {"role": "assistant", "content": message["content"] or ""}
            if "tool_calls" in message:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            yield event({**common, "choices": [{**_part(choice, delta), "logprobs": choice["logprobs"]}]})
            yield event({**common, "choices": [{**_part(choice, {}), "finish_reason": choice["finish_reason"]}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            yield event({**common, "choices": [], "usage": written["usage"]})
        yield "data: [DONE]\n\n"

    def error(self, refusal: ChatRefused) -> dict[str, Any]:
        """See `ApiFormat`."""
        return openai_error(refusal)


def openai_error(refusal: ChatRefused) -> dict[str, Any]:
    """A refusal in OpenAI's form."""
    facts = {"message": refusal.message, "type": "invalid_request_error", "code": refusal.code, "param": None}
    return {"error": facts}


def _continues(given: Mapping[str, Any], messages: Sequence[ChatMessage]) -> bool:
    """Whether the answer continues the last message, as vLLM's and SGLang's fields say."""
    continues = flag(given, "continue_final_message")
    if given.get("add_generation_prompt", not continues) == continues:
        raise ChatRefused("add_generation_prompt: must be the opposite of continue_final_message")
    if continues and messages and (messages[-1].role != "assistant" or messages[-1].calls):
        raise ChatRefused("continue_final_message=true: the last message must be a text of the assistant")
    return continues


def _message(index: int, message: object) -> ChatMessage:
    where = f"messages.{index}"
    if not isinstance(message, dict) or str(message.get("role")) not in ROLES:
        raise ChatRefused(f"{where}: must have a role of {', '.join(ROLES)}")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ChatRefused(f"{where}.tool_calls: must be a list")
    content, images = CONTENT.read(message.get("content"), f"{where}.content")
    read = tuple(_call(f"{where}.tool_calls", call) for call in calls)
    return ChatMessage(role=ROLES[message["role"]], content=content, calls=read, images=images)


def _call(where: str, call: object) -> Any:
    function = None
    if isinstance(call, dict):
        function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        raise ChatRefused(f"{where}: can't be read")
    return written_call(function.get("name"), function["arguments"], where)


def _choice(index: int, answer: ChatAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": name,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for name, call in answer.calls.items()
        ]
    tokens = None
    if answer.log_probs is not None:
        tokens = [
            {"token": each.text, "logprob": each.log_prob, "bytes": each.bytes, "top_logprobs": []}
            for each in answer.log_probs
        ]
    if tokens is None:
        log_probs = None
    else:
        log_probs = {"content": tokens, "refusal": None}
    return {"index": index, "message": message, "finish_reason": answer.finish_reason, "logprobs": log_probs}


def _part(choice: Mapping[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": choice["index"], "delta": delta, "finish_reason": None, "logprobs": None}
