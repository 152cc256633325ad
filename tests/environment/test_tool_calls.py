"""Tool calls in what a model wrote: every format, and any text at all."""

import json
import time
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.data import UserError
from proxima.data.episode import Episode, Span, ToolCall
from proxima.environment.call_readers import MOST_CALLS, ReadMessage, ToolFormat, read_calls
from proxima.environment.tool_calls import call_beginning, describe_tools, format_of, write_call
from proxima.model.chat.template_inputs import reads_tools
from tests.rollout.episodes.chat_families import speaker
from tests.tiny import tiny_tokenizer

FORMATS = get_args(ToolFormat)
PARAMETERS = {"properties": {"a": {"type": "integer", "description": "one"}, "b": {"enum": [1, 2]}}}
TEXT = {"properties": {"s": {"type": "string"}}}
FUNCTION = {"name": "add", "description": "Add\n  numbers.", "parameters": PARAMETERS}
TOOLS = {"add": PARAMETERS}
TAGS = "open by <function=x>, close by </function>"  # as an argument


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_call_has_one_beginning_whatever_its_arguments(tool_format):
    beginning = call_beginning("add", tool_format)
    for arguments in ({}, {"a": 1}, {"a": 2, "b": "{}"}):
        written = write_call(call("add", **arguments), tool_format, TOOLS)
        assert written.startswith(beginning) and not beginning.startswith(call_beginning("other", tool_format))


READABLE = [
    ("hermes", 'So: <tool_call>{"arguments": {}, "name": "go"}</tool_call><|im_end|>', [call("go")]),
    ("hermes", '<tool_call>{"name": "go"}</tool_call> or <tool_call>{"name": "stay"}', [call("go"), call("stay")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}', [call("f", x="</tool_call>")]),
    ("hermes", '<think><tool_call>{"name": "a"}</tool_call></think><tool_call>{"name": "b"}</tool_call>', [call("b")]),
    ("hermes", '<think>or <tool_call>{"name": "a"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "say", "arguments": "{\\"x\\": 1}"}</tool_call>', [call("say", x=1)]),
    ("hermes", '{"name": "add", "arguments": {"a": 1}} is JSON', []),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "go"}', [call("add", a=1), call("go")]),
    ("llama", '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}', [call("add", a=1)]),
    ("llama", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', [call("add", a=1)]),
    ("hermes", '<tool_call>[{"name": "go"}, {"name": "stay"}]</tool_call>', [call("go"), call("stay")]),
    ("llama", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>', [call("add", a=1)]),
    ("llama", '<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>', [call("add", a=1)]),
    ("glm", "So: <tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [call("add", a=1)]),
    ("glm", "<tool_call>go</tool_call><tool_call>stay\n", [call("go"), call("stay")]),
    ("glm", "<tool_call>add<arg_key>s</arg_key><arg_value>1</arg_value></tool_call>", [call("add", s="1")]),
    ("glm", "<tool_call>f<arg_key>x</arg_key><arg_value> {a\n</arg_value>", [call("f", x=" {a\n")]),
    ("glm", '<tool_call>f<arg_key>x</arg_key><arg_value>{"y": [true]}</arg_value>', [call("f", x={"y": [True]})]),
    ("glm", "No call here.", []),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]go[ARGS]{}', [call("add", a=1), call("go")]),
    ("mistral", 'I add. [TOOL_CALLS]add[CALL_ID]aB3[ARGS]{"a": 1}', [call("add", a=1)]),
    ("mistral", 'add[ARGS]{"a": 1}', [call("add", a=1)]),
    ("mistral", 'add{"a": 1}add{"a": 2}\nother{"x": "}"}', [call("add", a=1), call("add", a=2), call("other", x="}")]),
    ("mistral", 'I add.\nadd{"a": 1}', [call("add", a=1)]),
    ("mistral", 'With add {"a": 1} it is 1, I think.', []),
    ("mistral", "It is \\boxed{7}.", []),
    ("mistral", "The sets {1} and add {x} are equal.", []),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
     '<｜tool▁call▁begin｜>go<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [call("add", a=1), call("go")]),
    ("deepseek", 'So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'
     '<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": "```"}\n```', [call("add", a=1),
     call("f", s="```")]),
    ("deepseek", 'functionadd\n```json\n{"a": 1}\n```\nfunctionadd\n```json\n{"a": 2}\n```', [call("add", a=1),
     call("add", a=2)]),
    ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "<｜tool▁call▁begin｜>"}', [
     call("f", s="<｜tool▁call▁begin｜>")]),
    ("deepseek", "The function adds, as add({1}) shows.", []),
    ("kimi", '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}'
     '<|tool_call_end|><|tool_call_begin|>functions.go:1<|tool_call_argument_begin|>{}<|tool_call_end|>', [
     call("add", a=1), call("go")]),
    ("kimi", 'functions.add:0{"a": 1}functions.a.b-c:12 {}', [call("add", a=1), call("a.b-c")]),
    ("kimi", "I would call functions.add:0 with {1}.", []),
    ("minimax", '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="s">1'
     '</parameter>\n</invoke>\n<invoke name="go"></invoke>\n</minimax:tool_call>', [call("add", a=1, s="1"),
     call("go")]),
    ("minimax", '<invoke name="f"><parameter name="c">if a < b:\n <b></parameter></invoke>', [
     call("f", c="if a < b:\n <b>")]),
    ("minimax", 'a <invoke> without a name', []),
    ("llama", 'The object {"name": "Ann"} has a name.', []),
    ("llama", '{"answer": 3}', []),
    ("llama", "Seven.", []),
    ("xml", "<function=go></function> then <function=run>\n</function>", [call("go"), call("run")]),
    ("xml", "<function=f><parameter=c>if a < b:\n  <b>\n</parameter></function>", [call("f", c="if a < b:\n  <b>")]),
    ("xml", "a < b and c > d", []),
    ("xml", f"<function=f><parameter=c>{TAGS}</parameter></function>", [call("f", c=TAGS)]),
    ("code", "First\n```add\n1 + 2\n```\nthen", [call("add", a="1 + 2")]),
    ("code", '```add\n{"a": 1, "b": 2}\n```', [call("add", a=1, b=2)]),
    ("code", "```other\nx\n```\n```add\n{x\n```", [call("add", a="{x")]),
    ("code", "```\nx\n```", []),
]  # fmt: skip
UNREADABLE = [
    ("hermes", '<tool_call>{"name": "add", "argu', "is broken"),
    ("hermes", "<tool_call>add(1)</tool_call>", "must begin with {"),
    ("hermes", '<tool_call>{"name": "add"} and more', "does not follow"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "must have a name"),
    ("hermes", '<tool_call>["add"]</tool_call>', "must be an object with name"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "arguments of add must be an object"),
    ("hermes", '<tool_call>{"name": "add", "name": "sub"}</tool_call>', "a key occurs twice"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not valid JSON"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "too large"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>', "surrogate"),
    ("hermes", '<tool_call>{"name": "x", "arguments": ' + '{"a": ' * 100_000, "nested too deeply"),
    ("hermes", '<tool_call>{"name": "x", "arguments": ' + '{"a": ' * 120 + "1" + "}" * 121, "nested too deeply"),
    ("hermes", '<tool_call>{"name": "x", "arguments": {"a": ' + "9" * 400 + "}}", "is broken"),
    ("llama", '{"name": "add", "parameters": {"a"', "is broken"),
    ("llama", '<|python_tag|>search.call(query="x")', "must begin with {"),
    ("glm", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "is written as hermes, and read as glm"),
    ("glm", "<tool_call>add<arg_key>a</arg_key></tool_call>", "is not <arg_key>"),
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1", "is not <arg_key>"),
    ("glm", "<tool_call>f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2, "occurs twice"),
    ("glm", "<tool_call>add<arg_kex", "is not <arg_key>"),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a"', "is broken"),
    ("mistral", "[TOOL_CALLS]add(1)", "is not followed by a name"),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": NaN}', "NaN is not valid JSON"),
    ("mistral", 'add{"a": ', "is broken"),
    ("deepseek", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a"', "is broken"),
    ("deepseek", '<｜tool▁call▁begin｜>add{"a": 1}', "do not follow <｜tool▁call▁begin｜>"),
    ("kimi", '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": NaN}', "NaN is not valid JSON"),
    ("kimi", "<|tool_call_begin|>add(1)", "do not follow <|tool_call_begin|>"),
    ("minimax", '<invoke name="add"><parameter name="a">1', "before </invoke>"),
    ("minimax", '<invoke name="add">1 + 2</invoke>', "before </invoke>"),
    ("minimax", '<invoke name="f">' + '<parameter name="a">1</parameter>' * 2 + "</invoke>", "occurs twice"),
    ("minimax", "<invoke name=", "is not complete"),
    ("xml", "<function=add><parameter=a>1</function>", "is not closed"),
    ("xml", "<function=add><parameter=a\nb>1", "<parameter=a b> of add is not closed"),
    ("xml", "<function=add", "is not complete"),
    ("xml", "<function=add>", "is not closed"),
    ("xml", "<function=add>1+2</function>", "in place of"),
    ("xml", "<function=add><parameter=a>1</parameter><parameter=a>2</parameter></function>", "twice"),
    ("code", "```add\n1 + 2", "is not closed"),
]


@pytest.mark.parametrize(("tool_format", "text", "calls"), READABLE)
def test_calls_that_can_be_read(tool_format, text, calls):
    tools = {"add": {"properties": PARAMETERS["properties"] | TEXT["properties"]}}
    assert read_calls(text, tool_format, tools) == ReadMessage(tuple(calls))


@pytest.mark.parametrize(("tool_format", "text", "why"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_calls_that_cannot(tool_format, text, why):
    read = read_calls(text, tool_format, TOOLS)
    assert read.calls == () and len(read.unreadable) == 1 and why in read.unreadable[0], read


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"c": GIVEN}}</tool_call>'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"c": GIVEN}'),
        ("glm", "<tool_call>add<arg_key>c</arg_key><arg_value>GIVEN</arg_value></tool_call>"),
    ],
)
def test_an_episode_can_be_read_again_however_deep_its_calls_are(tool_format, text):
    """What is around a call in the file of a step has levels of its own."""
    for depth in (60, 90, 97):
        read = read_calls(text.replace("GIVEN", "[" * depth + "]" * depth), tool_format, {})
        assert len(read.calls) + len(read.unreadable) == 1
        episode = Episode(spans=(Span(role="assistant", tokens=1, calls=read.calls),))
        assert Episode.from_json(episode.to_json()) == episode


def test_one_broken_call_leaves_the_others():
    text = '<tool_call>{"name": "a"}</tool_call><tool_call>{</tool_call><tool_call>{"name": "b"}</tool_call>'
    read = read_calls(text, "hermes", {})
    assert [call.name for call in read.calls] == ["a", "b"] and len(read.unreadable) == 1


NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | FINITE | TEXTS,
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(TEXTS, inside, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(st.builds(ToolCall, name=NAMES, arguments=st.dictionaries(TEXTS, VALUES, max_size=2)), max_size=3)
PLAIN = st.text(st.characters(exclude_characters="<`{["), max_size=20)


@pytest.mark.slow
@given(CALLS, PLAIN)
def test_what_is_written_is_read_hermes(calls, between):
    bodies = [json.dumps({"name": c.name, "arguments": c.arguments}) for c in calls]
    text = between + between.join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    assert read_calls(text, "hermes", {}) == ReadMessage(tuple(calls))


@pytest.mark.slow
@given(CALLS, st.sampled_from(["; ", "\n", ""]))
def test_what_is_written_is_read_llama(calls, between):
    bodies = [json.dumps({"name": c.name, "parameters": c.arguments}, ensure_ascii=False) for c in calls]
    assert read_calls(between.join(bodies), "llama", {}) == ReadMessage(tuple(calls))


@pytest.mark.slow
@given(st.lists(st.tuples(NAMES, st.dictionaries(NAMES, TEXTS, max_size=3)), max_size=4), PLAIN)
def test_what_is_written_is_read_xml(calls, between):
    inside = ["".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in a.items()) for _, a in calls]
    text = between.join(f"<function={name}>\n{i}</function>" for (name, _), i in zip(calls, inside, strict=True))
    written = tuple(ToolCall(name=name, arguments=arguments) for name, arguments in calls)
    if not any("<" in value for _, arguments in calls for value in arguments.values()):
        assert read_calls(text, "xml", {}) == ReadMessage(written)


MARKS = ["<tool_call>", "</tool_call>", '{"name": "x", "arguments": {', "}}", "<function=x>", "<parameter=y>", "```x\n"]
MARKS += ["</parameter>", "</function>", "```", "\n", '"', "\\", "\\ud800", "[", "]", "<|python_tag|>", "NaN", "1e999"]
MARKS += [";", "<parameter=\n", "<arg_key>", "</arg_key>", "<arg_value>", "[TOOL_CALLS]", "[ARGS]", "x{"]
MARKS += ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "functionx\n```json\n", "<|tool_call_begin|>", "functions.x:0{"]
MARKS += [
    '<invoke name="x">',
    '<parameter name="y">',
    '<invoke name="a"><parameter name="b">',
    "</invoke>",
    "functions.",
]
MARKS += ["function"]
SCRAPS = st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=30).map("".join)


@pytest.mark.slow
@given(SCRAPS, st.sampled_from(FORMATS), st.integers(0, 200))
def test_any_text_is_read(text, tool_format, cut):
    for part in (text, text[:cut]):
        read = read_calls(part, tool_format, {"x": {}})
        assert len(read.calls) + len(read.unreadable) <= MOST_CALLS + 1
        assert all(why and "\n" not in why and len(why) < 200 for why in read.unreadable)
        for call in read.calls:
            assert call.name == call.name.strip() != ""
            json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("mark", MARKS)
def test_a_long_text_takes_no_time(tool_format, mark):
    begun = time.process_time()
    read_calls("<tool_call>" + mark * (300_000 // len(mark)), tool_format, {"x": {}})
    read_calls(mark * (300_000 // len(mark)), tool_format, {"x": {}})
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_described_tool_can_be_called_as_described(tool_format):
    text = describe_tools([{"type": "function", "function": FUNCTION}], tool_format)
    assert "- add(a: integer, b: 1 or 2): Add numbers.\n  a: one\n" in text
    lines = text.splitlines()
    example = "\n".join(lines[lines.index("To use one, write, for example:") + 1 : -1])
    assert read_calls(example, tool_format, TOOLS) == ReadMessage((call("add", a="...", b="..."),))


TEMPLATES = {
    None: ("xml", False),
    "{% for message in messages %}{{ message['content'] }}{% endfor %}": ("xml", False),
    "{% for m in messages %}{% endfor %} your tools: <tool_call>": ("xml", False),
    "{%- if tools %}<tool_call>{% endif %}": ("hermes", True),
    "{%- if tools is defined %}<tool_call><function=name>{% endif %}": ("xml", True),
    "{%- if not tools is defined %}{% endif %}<|python_tag|>": ("llama", True),
    "{{ tools | tojson }}[TOOL_CALLS]": ("llama", True),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_format_of_a_template(template):
    tokenizer = speaker("none", template)
    assert (format_of(tokenizer), reads_tools(tokenizer)) == TEMPLATES[template]


def test_a_template_of_another_form_is_refused():
    with pytest.raises(UserError, match="isn't known here; set episode.tool_format"):
        format_of(speaker("none", "{% if tools %}<<call>>{% endif %}"))


@pytest.mark.parametrize("text", ["1 + 2", "{x", '{"b": 1}', "\n1", "1\n```\n", "```add", "", " "])
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_text_in_a_fenced_block_stays_the_argument_that_it_was(name, text):
    written = write_call(call("add", **{name: text}), "code", TOOLS)
    assert read_calls(written, "code", TOOLS) == ReadMessage((call("add", **{name: text}),))
    assert written == "```add\n1 + 2\n```" or (name, text) != ("a", "1 + 2")


# What a template writes for each call `c`, in the style of its models, and the format of its reader; or a refusal.
EACH = "{% for k, v in c.function.arguments.items() %}PAIR{% endfor %}"
NAME, GIVEN = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
NAMED = '{"name": "NAME", "arguments": GIVEN}'
FORMS = {
    "Qwen2.5": (f"<tool_call>\n{NAMED}\n</tool_call>", "hermes"),
    "a thought": ("<think>\n\n</think>\n\n<tool_call>{{ c.function | tojson }}</tool_call>", "hermes"),
    "arguments as JSON": (
        '<tool_call>{"name": "NAME", "arguments": {{ c.function.arguments + "" }}}</tool_call>',
        "hermes",
    ),
    "Llama 3": (NAMED.replace("arguments\":", "parameters\":"), "llama"),
    "Phi-4-mini": (f"<|tool_call|>[{NAMED}]<|/tool_call|>", "llama"),
    "Nemotron": (f"<TOOLCALL>[{NAMED}]</TOOLCALL>", "llama"),
    "Mistral before v11": (f"[TOOL_CALLS] [{NAMED}]", "llama"),
    "Mistral": ("[TOOL_CALLS]NAME[ARGS]GIVEN", "mistral"),
    "GLM": (
        "<tool_call>NAME\n" + EACH.replace("PAIR", "<arg_key>{{ k }}</arg_key>\n<arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>\n") + "</tool_call>", "glm",
    ),
    "Qwen3-Coder": (
        "<tool_call>\n<function=NAME>\n" + EACH.replace("PAIR", "<parameter={{ k }}>\n{{ v }}\n"
        "</parameter>\n") + "</function>\n</tool_call>", "xml",
    ),
    "GLM, without its arguments": ("<tool_call>NAME<arg_key>{{ k }}</arg_key><arg_value>", "glm"),
    "DeepSeek R1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nGIVEN\n```<｜tool▁call▁end｜>",
        "deepseek",
    ),
    "DeepSeek V3.1": ("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>GIVEN<｜tool▁call▁end｜>", "deepseek"),
    "Kimi": ("<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>GIVEN<|tool_call_end|>", "kimi"),
    "LFM2": ("<|tool_call_start|>[NAME(GIVEN)]", "LFM2"),
    "gpt-oss": ("<|channel|>commentary to=functions.NAME GIVEN", "gpt-oss"),
    "MiniMax": (
        '<minimax:tool_call>\n<invoke name="NAME">' + EACH.replace("PAIR", '<parameter name="{{ k }}">'
        "{{ v if v is string else v | tojson }}</parameter>") + "</invoke>", "minimax",
    ),
    "a call in Hermes' tag": ("<tool_call>NAME(GIVEN)</tool_call>", ""),
    "a function in a tag": ("<function=NAME>GIVEN</function>", ""),
    "nested JSON": ('<tool_call>{"NAME": GIVEN}</tool_call>', ""),
}  # fmt: skip
CONTROLS = ("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>")


@pytest.mark.parametrize("controls", [(), CONTROLS], ids=["tags", "control tokens"])
@pytest.mark.parametrize("name", FORMS)
def test_a_format_is_chosen_if_its_reader_reads_the_call_back(name, controls):
    written, expected = FORMS[name]
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(controls)})
    written = written.replace("GIVEN", GIVEN).replace("NAME", NAME)
    calls = "{% for c in m.tool_calls or [] %}CALL{% endfor %}".replace("CALL", written)
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role + ': ' + m.content }}"
        + calls + "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )  # fmt: skip
    if expected in FORMATS:
        assert format_of(tokenizer) == expected
        return
    with pytest.raises(
        UserError, match=f"isn't known here{expected and f', as {expected} does'}: a call becomes "
    ) as e:
        format_of(tokenizer)
    assert "set episode.tool_format to one of hermes, llama, glm, mistral, deepseek, kimi, minimax, xml, code" in str(
        e.value
    )
