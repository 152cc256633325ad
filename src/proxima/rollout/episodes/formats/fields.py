"""The fields of requests that the APIs have in common, and what happens to those that are not done."""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxima.data.episode import ToolCall
from proxima.data.flow import ESCAPED_PLACEHOLDER, IMAGE_PLACEHOLDER
from proxima.data.json_reader import MAX_DEPTH_RECEIVED, load_json
from proxima.environment.interface import tool_problem
from proxima.rollout.episodes.formats.chat import ChatMessage, ChatRefused, Grammar

MOST_STOPS = 64
# Ignored: the trainer must know the distribution, so that the run's `sampling` counts.
SAMPLING = frozenset(
    {"frequency_penalty", "min_p", "presence_penalty", "repetition_penalty", "seed", "temperature", "top_k", "top_p"}
)
# Ignored: they concern storage, billing, caches and tracing, or are only permissions.
BOOKKEEPING = frozenset(
    {
        "cache_control",
        "cache_salt",
        "client_metadata",
        "diagnostics",
        "inference_geo",
        "max_tool_calls",
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "user_profile_id",
    }
)


def not_done(name: str, value: object, remedy: str = "leave it out") -> ChatRefused:
    """The refusal of a field that would change the answer."""
    shown = json.dumps(value, ensure_ascii=False)
    return ChatRefused(f"{name:.60}={shown:.60}: not supported; {remedy}", code="unsupported_value")


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The fields of an API. Each field of a request is read, ignored since it doesn't change the answer, or refused:
    nothing else is left to chance.

    Args:
        read: those that `parse` reads.
        ignored: those of which no value changes the answer.
        neutral: the values that change nothing, of fields that are not done.
    """

    read: frozenset[str]
    ignored: frozenset[str] = SAMPLING | BOOKKEEPING
    neutral: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def check(self, body: object) -> dict[str, Any]:
        """Return the fields that have a value.

        Raises:
            ChatRefused: names the first field that is not done; the body is no object, or has a lone surrogate.
        """
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ChatRefused("the request has a lone surrogate, which is not text") from None
        if not isinstance(body, dict):
            raise ChatRefused("the request must be an object")
        given = {name: value for name, value in body.items() if value is not None}
        for name, value in given.items():
            if name in self.read or name in self.ignored or value in ({}, [], ""):
                continue
            if not any(value == each and type(value) is type(each) for each in self.neutral.get(name, ())):
                raise not_done(name, value)
        return given


def model_name(body: Mapping[str, Any]) -> str:
    """The name of the model; empty: none."""
    name = body.get("model")
    return name if isinstance(name, str) else ""


def refuse_top_log_probs(body: Mapping[str, Any]) -> None:
    """Refuse log-probs of tokens that were not sampled."""
    if body.get("top_logprobs", 0) != 0:
        raise not_done("top_logprobs", body["top_logprobs"], "set it to 0: the sampled tokens alone have them")


def whole_number(body: Mapping[str, Any], name: str) -> int | None:
    """A field that is a whole number >= 1, or left out."""
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ChatRefused(f"{name}={value!r:.60}: must be a whole number >= 1")
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """A field that is true, or false where it is left out."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise ChatRefused(f"{name}={value!r:.60}: must be true or false")
    return value


def list_field(body: Mapping[str, Any], name: str, remedy: str = "") -> list[Any]:
    """A field that is a list, empty where it is left out."""
    value = body.get(name, [])
    if not isinstance(value, list):
        raise ChatRefused(f"{name}: must be a list{remedy}")
    return value


def stop_texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The texts that end an answer."""
    stop = body.get(name) or []
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ChatRefused(f"{name}: must be a text, or a list of texts that are not empty")
    if len(stop) > MOST_STOPS:
        raise ChatRefused(f"{name}: has {len(stop):,} texts; send at most {MOST_STOPS}")
    return tuple(stop)


def checked_tools(tools: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """Tools in the form of chat completions, valid ones."""
    for i, tool in enumerate(tools):
        problem = tool_problem(tool, f"tools.{i}")
        if problem:
            raise ChatRefused(problem)
    return tuple(tools)


def flat_tool(tool: object, where: str, schema: str) -> dict[str, Any]:
    """A tool of an API that writes it without `function`, in the form of chat completions; `schema` is its name of the
    parameters."""
    if not isinstance(tool, dict):
        raise ChatRefused(f"{where}: must be an object")
    names = {"name": "name", "description": "description", schema: "parameters", "strict": "strict"}
    function = {names[name]: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def forced_tool(choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    """The tool of `{"name": …}`."""
    name = choice.get("name")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise ChatRefused(f"tool_choice: names {name!r:.60}, which is not among the tools")
    return str(name)


def asked_grammar(form: Any, field_name: str, *, within: str = "") -> Grammar | None:
    """The grammar that a form of the answer asks for; None: any text will do.

    Args:
        form: `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", …}` with the schema.
        field_name: of the form.
        within: the key of the object that has the schema; empty: the form itself.

    Raises:
        ChatRefused: it is none of these.
    """
    kind = form.get("type") if isinstance(form, dict) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar(json.dumps({"type": "object"}), field_name)
    if kind != "json_schema":
        raise not_done(field_name, form, "its type must be text, json_object or json_schema")
    facts = form.get(within) if within else form
    schema = None
    if isinstance(facts, dict):
        schema = facts.get("schema")
    if not isinstance(schema, dict):
        where = ".".join(filter(None, (field_name, within, "schema")))
        raise ChatRefused(f"{where}: must be an object, a JSON schema")
    return Grammar(json.dumps(schema, ensure_ascii=False), field_name)


@dataclass(frozen=True)
class ContentParts:
    """The content of a message: a text, or a list of parts.

    Args:
        texts: types of parts that are a text.
        images: the type of a part that is an image; empty: there is none.
    """

    texts: tuple[str, ...] = ("text",)
    images: str = ""

    def read(self, content: object, where: str) -> tuple[str, tuple[bytes, ...]]:
        """The text, with placeholders of images, and the images."""
        if content is None or isinstance(content, str):
            return content or "", ()
        parts = content if isinstance(content, list) else [None]
        texts = list[str | None]()  # None: an image
        images = list[bytes]()
        for i, part in enumerate(parts):
            kind = None
            if isinstance(part, dict):
                kind = part.get("type", self.texts[0])
            if kind == self.images and kind is not None:
                images.append(_image(part, f"{where}.{i}"))
                texts.append(None)
            elif kind in self.texts and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                known = ", ".join(filter(None, (*self.texts, self.images)))
                raise ChatRefused(f"{where}: must be a text, or parts of type {known}")
        written = _escaped if images else str
        pieces = []
        for text in texts:
            if text is None:
                pieces.append(IMAGE_PLACEHOLDER)
            else:
                pieces.append(written(text))
        return "".join(pieces), tuple(images)


def _escaped(text: str) -> str:
    return text.replace(IMAGE_PLACEHOLDER, ESCAPED_PLACEHOLDER)


def _image(part: Mapping[str, Any], where: str) -> bytes:
    """The file of an image, which must be in the request itself."""
    given: Any = part.get("source") or part.get("image_url")
    if isinstance(given, dict):
        if given.get("type") == "base64":
            given = given.get("data")
        else:
            given = given.get("url")
        if part.get("source") and given:
            given = f"data:;base64,{given}"
    if not isinstance(given, str) or not given.startswith("data:"):
        raise ChatRefused(f"{where}: an image must be in the request, as a data URL or in base64")
    try:
        return base64.b64decode(given.partition(",")[2], validate=True)
    except (binascii.Error, ValueError):
        raise ChatRefused(f"{where}: the image is not in base64") from None


def written_call(name: object, arguments: object, where: str) -> ToolCall:
    """A call that the assistant made, with arguments as JSON or as an object."""
    try:
        if isinstance(arguments, str):
            read = load_json(arguments or "{}", depth=MAX_DEPTH_RECEIVED)
        else:
            read = arguments
        json.dumps(read, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        raise ChatRefused(f"{where}: can't be read") from None
    if not (isinstance(name, str) and isinstance(read, dict)):
        raise ChatRefused(f"{where}: must have a name, and arguments that are the JSON of an object")
    return ToolCall(name=name, arguments=read)


def checked_chat(messages: Sequence[ChatMessage], field_name: str) -> tuple[ChatMessage, ...]:
    """The messages of a chat, at least one, in which only users and tools show images."""
    if not messages:
        raise ChatRefused(f"{field_name}: must be a list of at least one message")
    if any(message.images and message.role not in ("user", "tool") for message in messages):
        raise ChatRefused(f"{field_name}: only messages of users and tools show images")
    return tuple(messages)


def event(value: Mapping[str, Any], *, named: bool = False) -> str:
    """A server-sent event; `named`: with its type as its name."""
    name = f"event: {value['type']}\n" if named else ""
    return f"{name}data: {json.dumps(value)}\n\n"
