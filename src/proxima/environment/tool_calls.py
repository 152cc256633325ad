"""The formats of tool calls: which one a chat template shows, and how to write it if the template has no tools.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>     Hermes, Qwen2.5, Qwen3, SmolLM3 …
    llama    {"name": "add", "parameters": {"a": 1}}, or a list of them        Llama 3, Mistral before v11, Phi-4-mini …
    glm      <tool_call>add <arg_key>a</arg_key><arg_value>1</arg_value></tool_call>    GLM 4.5 and later
    mistral  [TOOL_CALLS]add[ARGS]{"a": 1}                                     Mistral from v11 on
    deepseek <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>       DeepSeek V3.1; V3 and R1 in a fence
    kimi     <|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>       Kimi K2
    minimax  <invoke name="add"><parameter name="a">1</parameter></invoke>     MiniMax M2
    xml      <function=add><parameter=a>1</parameter></function>               Qwen3-Coder; templates without tools
    code     a fenced block, with the tool's name after the fence              templates without tools

`format_of` chooses the format of a chat template: the one whose reader (`call_readers`) recovers a call that the
template has rendered. A tag is not enough: `<tool_call>` contains JSON in Hermes' format, XML in Qwen3-Coder's and keys
and values in GLM's. A template that does not render calls is recognised by the format in its source or its
instructions.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, cast, get_args

from proxima.data import UserError
from proxima.data.episode import ToolCall
from proxima.environment.call_readers import Parameters, ReadMessage, ToolFormat, call_start, read_calls
from proxima.model.chat.answer import turn_end
from proxima.model.chat.encode import control_texts
from proxima.model.chat.template_inputs import reads_tools


def parameters_of(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each tool's parameters, by the tool's name."""
    return {schema["function"]["name"]: schema["function"].get("parameters") or {} for schema in schemas}


def before_calls(text: str, tool_format: ToolFormat, tools: Parameters) -> str:
    """The part of a message that precedes its first call, which is not in its thinking."""
    thinking, end, said = text.partition("</think>")
    if not end:
        thinking = ""
        said = text
    at = call_start(said, tool_format, tools)
    if at < 0:
        return text
    return (thinking + end + said[:at]).rstrip()


def describe_tools(schemas: Sequence[Mapping[str, Any]], tool_format: ToolFormat) -> str:
    """Return the text for the system message that describes the tools if the template can't."""
    tools = parameters_of(schemas)
    lines = ["You can use these tools:", *(_described(schema["function"], tools) for schema in schemas)]
    name, parameters = next(iter(tools.items()))
    call = ToolCall(name=name, arguments=dict.fromkeys(parameters.get("properties", {}), "..."))
    lines += ["To use one, write, for example:", write_call(call, tool_format, tools)]
    return "\n".join([*lines, "The result is in the next message."])


def _described(function: Mapping[str, Any], tools: Parameters) -> str:
    properties = tools[function["name"]].get("properties", {})
    signature = ", ".join(f"{name}: {_type_name(schema)}" for name, schema in properties.items())
    schemas = {name: schema for name, schema in properties.items() if isinstance(schema, Mapping)}
    about = [f"  {name}: {schema['description']}" for name, schema in schemas.items() if schema.get("description")]
    description = " ".join((function.get("description") or "").split())
    return "\n".join([f"- {function['name']}({signature}): {description}", *about])


def _type_name(schema: Mapping[str, Any] | bool) -> str:
    if isinstance(schema, bool):  # a JSON schema, too: any value, or none
        return "any"
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    named = schema.get("type", "any")
    if isinstance(named, str):
        return named
    return " or ".join(named)


def write_call(call: ToolCall, tool_format: ToolFormat, tools: Parameters) -> str:
    """Return a call as the model would write it."""
    arguments = dict(call.arguments)
    if tool_format == "hermes":
        return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': arguments})}\n</tool_call>"
    if tool_format == "llama":
        return json.dumps({"name": call.name, "parameters": arguments})
    if tool_format == "mistral":
        return f"[TOOL_CALLS]{call.name}[ARGS]{json.dumps(arguments)}"
    if tool_format == "deepseek":
        body = f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"
    if tool_format == "kimi":
        body = f"functions.{call.name}:0<|tool_call_argument_begin|>{json.dumps(arguments)}"
        return f"<|tool_calls_section_begin|><|tool_call_begin|>{body}<|tool_call_end|><|tool_calls_section_end|>"
    values = {name: _as_text(value) for name, value in arguments.items()}
    if tool_format == "minimax":
        inside = "".join(f'<parameter name="{name}">{value}</parameter>\n' for name, value in values.items())
        return f'<minimax:tool_call>\n<invoke name="{call.name}">\n{inside}</invoke>\n</minimax:tool_call>'
    if tool_format == "glm":
        pairs = (f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n" for name, value in values.items())
        return f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"
    if tool_format == "code":
        bare = f"```{call.name}\n{next(iter(arguments.values()), None)}\n```"
        if read_calls(bare, "code", tools) == ReadMessage((call,)):
            return bare
        return f"```{call.name}\n{json.dumps(arguments)}\n```"
    inside = "".join(f"<parameter={name}>{value}</parameter>\n" for name, value in arguments.items())
    return f"<function={call.name}>\n{inside}</function>"


def _as_text(value: Any) -> str:
    """The value of an argument in a format whose arguments are texts."""
    return value if isinstance(value, str) else json.dumps(value)


def call_beginning(name: str, tool_format: ToolFormat) -> str:
    """Return how a call of a tool begins, up to its arguments: as much as decides which tool is called."""
    if tool_format == "code":
        return f"```{name}\n"
    written = write_call(ToolCall(name=name, arguments={}), tool_format, {})
    at = written.rfind("{}")  # where the arguments are JSON
    if at < 0:
        behind = written.index(name) + len(name)
        places = [written.find(mark, behind) for mark in ">\n"]
        at = min(place for place in places if place >= 0) + 1
    return written[:at]


TRIAL = ToolCall(name="trial_tool", arguments={"text": 'say "{x}"\nto [him]', "count": 7})
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "a text"},
        "count": {"type": "integer", "description": "a number"},
    },
    "required": ["text", "count"],
}
FUNCTION = {"name": TRIAL.name, "description": "Tries a call.", "parameters": PARAMETERS}
SCHEMA = {"type": "function", "function": FUNCTION}
READ_BACK: tuple[ToolFormat, ...] = ("hermes", "llama", "glm", "mistral", "deepseek", "kimi", "minimax", "xml")

# Marks in the source of a template, the most particular first: all of an entry must be there. The last part is the
# format, or the name of the models whose form is not read here.
FORMS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<arg_key>", "<arg_value>"), "glm"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
    (("DSML",), "DeepSeek V3.2"),
    (("tool▁call", "tool▁sep"), "deepseek"),
    (("tool_calls_begin",), "DeepSeek"),
    (("<|tool_call_begin|>",), "kimi"),
    (("<|tool_call_start|>",), "LFM2"),
    (("<|channel|>",), "gpt-oss"),
    (("<minimax:tool_call>",), "minimax"),
    (("<seed:tool_call>",), "Seed-OSS"),
    (("<start_function_call>",), "FunctionGemma"),
    (("<|START_ACTION|>",), "Command R7B"),
    (("Action: ```json",), "Command R"),
    (("<|action_start|>",), "InternLM"),
    (("<function_calls>",), "OLMo 3"),
    (("<invoke name=",), "minimax"),
    (("<function=", "<parameter="), "xml"),
    (("<function=",), "xml"),
    (("<tool_calls>",), "Hunyuan or Jamba"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama"),
    (("[TOOL_CALLS]",), "llama"),
    (("<|tool_call|>",), "llama"),
    (("<TOOLCALL>",), "llama"),
    (('"parameters":',), "llama"),
)


def format_of(tokenizer: Any, arguments: Mapping[str, Any] = MappingProxyType({})) -> ToolFormat:
    """Return the format in which a tokenizer's chat template shows calls; `xml` if it doesn't support tools.

    Args:
        arguments: of the template.

    Raises:
        UserError: it shows calls in a form that no reader here supports.
    """
    if not reads_tools(tokenizer):
        return "xml"
    template = tokenizer.get_chat_template(tools=[{}])
    turns = list(rendered_calls(tokenizer, arguments))
    for turn in turns:
        for tool_format in READ_BACK:
            if _reads_back(turn, tool_format):
                return tool_format
    named = next((name for marks, name in FORMS if all(mark in template for mark in marks)), "")
    values = any(f"{TRIAL.arguments['count']}" in turn and TRIAL.name in turn for turn in turns)
    if named in get_args(ToolFormat) and not values and _may_be(named, turns):
        return cast(ToolFormat, named)
    shown = next((turn for turn in turns if TRIAL.name in turn), "")
    if named and named not in get_args(ToolFormat):
        looks = f", as {named} does"
    else:
        looks = ""
    if shown:
        written = f": a call becomes {shown.strip()!r:.200}"
    else:
        written = ""
    what = f"the chat template shows tools in a form that isn't known here{looks}{written}"
    readable = ", ".join(get_args(ToolFormat))
    raise UserError(what, remedy=f"set episode.tool_format to one of {readable} if the model writes its calls so")


def why_format(tokenizer: Any) -> str:
    """Why `format_of` chooses the format that it does."""
    if reads_tools(tokenizer):
        return "the chat template writes calls so"
    return "the chat template has no tools, so the system message describes them and shows a call in this format"


def rendered_calls(tokenizer: Any, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the template writes for a turn with the call, up to the end of the turn: as the policy would write it,
    and then without control tokens. Templates differ in how they take a call's arguments, as an object or as JSON, and
    some fail for one of them."""
    question = {"role": "user", "content": "Try it."}
    render = partial(tokenizer.apply_chat_template, **{**arguments, "tools": [SCHEMA], "tokenize": False})
    controls = re.compile("|".join(map(re.escape, control_texts(tokenizer))) or r"(?!)")
    ending = turn_end(tokenizer)
    ids = "trial0001", f"functions.{TRIAL.name}:0"  # Mistral's have nine letters; Kimi K2 writes the id, not the name
    for given, number in product((TRIAL.arguments, json.dumps(TRIAL.arguments)), ids):
        call = {"id": number, "type": "function", "function": {"name": TRIAL.name, "arguments": given}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            before = render([question], add_generation_prompt=True)
            chat = render([question, turn])
        except Exception:  # a template is a program and may raise anything
            continue
        same = next((i for i, (a, b) in enumerate(zip(before, chat, strict=False)) if a != b), len(before))
        tag = chat.rfind("<", 0, same)
        if tag >= 0 and ">" not in chat[tag:same]:  # <think> of the generation prompt, and <tool_call>
            same = tag
        written = chat[same:]
        if ending is not None and ending.text and ending.text in written:
            written = written.rpartition(ending.text)[0]
        yield written
        yield controls.sub("", written)


def _reads_back(turn: str, tool_format: ToolFormat) -> bool:
    """True if the reader of a format reads the call, and nothing else, from a turn."""
    read = read_calls(turn, tool_format, {TRIAL.name: PARAMETERS})
    if read.unreadable or len(read.calls) != 1 or read.calls[0].name != TRIAL.name:
        return False
    arguments = read.calls[0].arguments
    same = (arguments.get(name) in (value, str(value)) for name, value in TRIAL.arguments.items())  # XML has texts only
    return arguments.keys() == TRIAL.arguments.keys() and all(same)


def _may_be(tool_format: str, turns: list[str]) -> bool:
    """False if the template writes the name of a call differently from the format."""
    before = {
        "deepseek": r"(?:[｜|]>|function)\s*",
        "glm": r"<tool_call>\s*",
        "kimi": r"functions\.",
        "minimax": "<invoke name=[\"']?",
        "mistral": r"\[TOOL_CALLS\]\s*",
        "xml": "<function=",
    }
    pattern = before.get(tool_format, r'"name"\s*:\s*"') + TRIAL.name
    named = [turn for turn in turns if TRIAL.name in turn]
    return not named or any(re.search(pattern, turn) for turn in named)
