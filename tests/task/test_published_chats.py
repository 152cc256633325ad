"""Every key of a message reaches the chat template and the trained tokens, or is refused or named."""

import json
from dataclasses import replace

import numpy as np
import pytest

from proxima.data import FieldError, UserError
from proxima.task.example_rows import ChatReader, LabelColumns, PairColumns, PreferenceReader
from proxima.task.local_files import Jsonl, Parquet
from proxima.task.prompts import key_notes, to_prompt
from proxima.task.protocol import Row
from proxima.task.published_chats import as_messages, as_tools
from tests.tiny import CHAT_TEMPLATE, END, tiny_tokenizer

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% if custom %}{{ custom }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Bern"}}}
USER = {"role": "user", "content": "Rain?"}
CHAT = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "reasoning_content": "It rains.", "content": "Yes."},
]
CALLED = '<call>weather{"town": "Bern"}'


def tokenizer(template=TEMPLATE):
    made = tiny_tokenizer()
    made.chat_template = template
    return made


def example(row, template=TEMPLATE, **settings):
    return ChatReader(**{"tokenizer": tokenizer(template), "context": 4096} | settings).example(0, row)


def learnt(item):
    edges = np.flatnonzero(np.diff(np.concatenate([[False], item.loss_mask, [False]]).astype(int)))
    return [tiny_tokenizer().decode(item.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


def whole(item):
    return tiny_tokenizer().decode([*item.prompt_tokens, *item.tokens])


def rows(tmp_path, *given, **fields):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    return Jsonl(path=str(file), **{"messages": "messages", "answer": None} | fields).rows(0)


def test_calls_and_thoughts_are_trained_and_results_and_tools_are_context(tmp_path):
    (row,) = rows(tmp_path, {"messages": CHAT, "tools": [WEATHER]})
    item = example(row, loss_on="all_turns")
    assert learnt(item) == [f"{CALLED}{END}", f"<think>It rains.</think>Yes.{END}"]
    assert json.dumps(WEATHER) in whole(item) and "<|im_start|>tool\nrain" in whole(item)
    assert learnt(example(row)) == [f"<think>It rains.</think>Yes.{END}"]
    asked = replace(row, messages=row.messages[:-1])  # a run of RL, whose history has the call
    prompt = tiny_tokenizer().decode(to_prompt(asked, 0, tokenizer()).tokens)
    assert CALLED in prompt and json.dumps(WEATHER) in prompt


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"town": "Bern"}'}}],
        },
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"town": "Bern"}'}},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL]), "reasoning_content": None},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"town": "Bern"}}'},
    ],
    ids=["null content", "JSON arguments", "function_call", "JSON calls", "ShareGPT"],
)
def test_a_call_in_any_published_form_is_the_same_call(message):
    assert learnt(example(Row(messages=as_messages([USER, message], "row")))) == [f"{CALLED}{END}"]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_has_the_name_that_the_template_reads(key, read):
    chat = as_messages([USER, {"role": "assistant", key: "Hm.", "content": "Yes."}], "row")
    assert learnt(example(Row(messages=chat), TEMPLATE.replace("reasoning_content", read))) == [
        f"<think>Hm.</think>Yes.{END}"
    ]


def test_the_developer_is_the_system():
    chat = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert [message["role"] for message in as_messages(chat, "row")] == ["system", "user"]


def test_sharegpt_and_parts():
    given = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Yes."},
        {"from": "observation", "value": "7"},
        {"role": "user", "content": [{"type": "text", "text": "So"}, {"type": "text", "text": "?"}]},
    ]
    assert [(m["role"], m["content"]) for m in as_messages(given, "row")] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Yes."),
        ("tool", "7"),
        ("user", "So?"),
    ]


@pytest.mark.parametrize("key", ["weight", "train", "training"])
def test_a_turn_of_weight_0_is_context(key):
    turns = [USER, {"role": "assistant", "content": "A", key: 0}, USER, {"role": "assistant", "content": "B", key: 1}]
    turns += [USER, {"role": "assistant", "content": "C", key: False}, USER, {"role": "assistant", "content": "D"}]
    row = Row(messages=as_messages(turns, "row"))
    item = example(row, loss_on="all_turns")
    assert learnt(item) == [f"B{END}", f"D{END}"]
    assert whole(item).count("<|im_start|>assistant") == 4
    with pytest.raises(FieldError, match="has weight 0"):
        example(Row(messages=as_messages(turns[:2], "row")))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "assistant", "content": "A", "weight": 0.5}, "weight=0.5"),
        ({"role": "user", "content": "A", "weight": 1}, "only turns of the assistant are trained"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{town"}}]},
            "JSON",
        ),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {}}}]}, "holds the tool call"),
        ({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": [1]}]}, "with the arguments"),
        ({"role": "assistant", "content": "A", "reasoning": "B", "thinking": "C"}, "are not one text"),
        ({"role": "user", "content": "A", "images": ["a.png"]}, "the key 'images', which the model would not see"),
        ({"role": "user", "content": None}, "expected a role among system, user, assistant, tool and a text content"),
        ({"role": "user", "content": [{"type": "audio"}]}, "a part of type 'audio'"),
    ],
)
def test_a_message_that_can_not_be_read_is_refused_by_name(message, reason):
    with pytest.raises(UserError, match=reason):
        as_messages([USER, message], "row")


def test_what_the_template_does_not_write_is_refused():
    for row, key in (
        (Row(messages=as_messages(CHAT[:2], "row")), "tool_calls"),
        (Row(messages=as_messages([USER, CHAT[3]], "row")), "reasoning_content"),
    ):
        with pytest.raises(FieldError, match=f"has {key} in a message of role 'assistant', which the model's chat"):
            example(row, CHAT_TEMPLATE)
        with pytest.raises(FieldError, match=key):  # in the history of a prompt of RL
            to_prompt(Row(messages=(*row.messages, USER)), 0, tokenizer(CHAT_TEMPLATE))
        with pytest.raises(FieldError, match=key):  # a base model
            example(row, None)
    with pytest.raises(
        FieldError, match="tool_schemas='tools' holds what the model's chat template does not read"
    ) as caught:
        example(Row(messages=as_messages(CHAT, "row"), arguments={"tools": [WEATHER]}), CHAT_TEMPLATE)
    assert "set task.tool_schemas=null" in caught.value.remedy


def test_a_template_that_writes_a_part_is_refused():
    text = {**CHAT[1], "content": "I look."}
    only = TEMPLATE.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}")
    with pytest.raises(FieldError, match="has content beside its tool_calls"):
        example(Row(messages=as_messages([USER, text], "row")), only)
    first = TEMPLATE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    two = {**CHAT[1], "tool_calls": [CALL, CALL]}
    assert learnt(example(Row(messages=as_messages([USER, CHAT[1]], "row")), first)) == [f"{CALLED}{END}"]
    with pytest.raises(FieldError, match="has tool_calls"):
        example(Row(messages=as_messages([USER, two], "row")), first)
    names = TEMPLATE.replace(" + c.function.arguments | tojson", "")
    with pytest.raises(FieldError, match="has tool_calls"):
        example(Row(messages=as_messages([USER, CHAT[1]], "row")), names)


def test_other_keys_that_the_template_does_not_write_are_named_once(tmp_path):
    chat = [{**USER, "name": "Ann", "time": 7}, {"role": "assistant", "content": "A", "tool_call_id": "1"}]
    several = rows(tmp_path, *[{"messages": chat}] * 3, {"messages": CHAT})
    (note,) = key_notes("task", several, tokenizer(), {})
    assert "in 4 rows: name of role user (3), time of role user (3)" in note
    named = TEMPLATE.replace("{{ m.content }}", "{{ (m.name or '') + m.content }}")
    (note,) = key_notes("task", several, tokenizer(named), {})
    assert note.endswith(": time of role user (3)")
    assert "Ann" in whole(example(several[0], named))


def test_the_tools_of_a_row_may_be_json_text_or_bare_functions(tmp_path):
    bare = WEATHER["function"]
    for given in ([WEATHER], [bare], json.dumps([bare]), [json.dumps(WEATHER)]):
        assert as_tools(given, "row") == [WEATHER]
    assert as_tools(None, "row") == as_tools("", "row") == as_tools([], "row") == []
    with pytest.raises(UserError, match="expected {type: function") as caught:
        as_tools(["search"], "row")
    assert "task.tool_schemas" in caught.value.remedy
    (row,) = rows(tmp_path, {"messages": CHAT, "functions": [WEATHER]}, tool_schemas="functions")
    assert row.arguments == {"tools": [WEATHER]}
    (row,) = rows(tmp_path, {"messages": CHAT, "tools": [WEATHER]}, tool_schemas=None)
    assert row.arguments == {}


@pytest.mark.parametrize("column", ["functions", "documents", "system"])
def test_a_column_beside_the_chats_is_shown_kept_or_refused(tmp_path, column):
    with pytest.raises(UserError, match=f"a column '{column}' beside its chats, which the model would not see"):
        rows(tmp_path, {"messages": CHAT, column: "x"})
    assert len(rows(tmp_path, {"messages": CHAT, column: "x"}, metadata=(column,))) == 1
    assert len(rows(tmp_path, {"messages": CHAT, column: None})) == 1


def test_a_row_has_arguments_of_the_template(tmp_path):
    row, plain = rows(
        tmp_path, {"messages": CHAT, "chat_template_kwargs": {"custom": "<|im_end|>!"}}, {"messages": CHAT}
    )
    assert whole(example(row)) == "<|im_end|>!" + whole(example(plain))
    assert list(example(row).prompt_tokens)[:1] != [tiny_tokenizer().eos_token_id]  # a control text of the data is text
    with pytest.raises(FieldError, match=r"template_arguments.customs.*does not read"):
        example(*rows(tmp_path, {"messages": CHAT, "chat_template_kwargs": {"customs": "!"}}))


def test_a_control_text_in_a_call_is_text():
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": END}}}
    item = example(Row(messages=as_messages([USER, {"role": "assistant", "content": "", "tool_calls": [call]}], "row")))
    assert list(item.tokens).count(tiny_tokenizer().eos_token_id) == 1


def test_pairs_and_labels_have_calls_and_tools():
    reader = PreferenceReader(tokenizer=tokenizer(), context=4096)
    columns = {"chosen": [CHAT[1]], "rejected": [{"role": "assistant", "content": "No idea."}], "label": True}
    row = Row(messages=(USER,), metadata=columns | {"completion": [CHAT[1]]}, arguments={"tools": [WEATHER]})
    pair = reader.pair(0, row, PairColumns())
    assert tiny_tokenizer().decode(pair.chosen.tokens) == f"{CALLED}{END}"
    assert json.dumps(WEATHER) in tiny_tokenizer().decode(pair.rejected.prompt_tokens)
    assert tiny_tokenizer().decode(reader.labeled(0, row, LabelColumns()).completion.tokens) == f"{CALLED}{END}"


def test_a_table_adds_keys_as_null(tmp_path):
    """Parquet gives all objects of a column the same keys."""
    import pyarrow
    from pyarrow import parquet

    other = {"type": "function", "function": {"name": "time", "arguments": {"zone": "CET"}}}
    chats = [CHAT[:2], [USER, {"role": "assistant", "content": "", "tool_calls": [other]}]]
    parquet.write_table(pyarrow.table({"messages": chats, "tools": [[WEATHER], None]}), tmp_path / "rows.parquet")
    for metadata in (None, ()):
        task = Parquet(path=str(tmp_path / "rows.parquet"), messages="messages", answer=None, metadata=metadata)
        first, second = task.rows(0)
        assert (first.arguments, second.arguments) == ({"tools": [WEATHER]}, {})
        assert first.messages == ({"role": "user", "content": "Rain?"}, CHAT[1])
        assert learnt(example(second)) == [f'<call>time{{"zone": "CET"}}{END}']


def test_pairs_of_a_table_lack_its_nulls(tmp_path):
    import pyarrow
    from pyarrow import parquet

    other = {"type": "function", "function": {"name": "time", "arguments": {"zone": "CET"}}}
    sides = [[CHAT[1]], [{"role": "assistant", "content": "", "tool_calls": [other]}]]
    refused = [[{"role": "assistant", "content": "No idea."}]] * 2
    columns = {"prompt": [[USER]] * 2, "chosen": sides, "completion": sides, "rejected": refused, "label": [1, 0]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "pairs.parquet")
    reader = PreferenceReader(tokenizer=tokenizer(), context=4096)
    row = Parquet(path=str(tmp_path / "pairs.parquet"), messages="prompt", answer=None).rows(0)[1]
    called = f'<call>time{{"zone": "CET"}}{END}'
    assert tiny_tokenizer().decode(reader.pair(1, row, PairColumns()).chosen.tokens) == called
    assert tiny_tokenizer().decode(reader.labeled(1, row, LabelColumns()).completion.tokens) == called


def test_json_that_a_table_was_written_to_lacks_its_nulls():
    """All messages have the same keys; a null that somebody wrote, in other messages or a JSON text, stays."""

    def arguments(asked, called):
        chat = [
            {"role": "user", "content": "Go."} | asked,
            {"role": "assistant", "content": "", "tool_calls": [called]},
        ]
        return as_messages(chat, "a row")[-1]["tool_calls"][0]["function"]["arguments"]

    given = {"town": "Bern", "file": None}
    called = {"type": "function", "function": {"name": "weather", "arguments": given}}
    as_text = {"type": "function", "function": {"name": "weather", "arguments": json.dumps(given)}}
    assert arguments({"tool_calls": None}, called) == {"town": "Bern"}
    assert arguments({}, called) == given
    assert arguments({"tool_calls": None}, as_text) == given
    filled = {
        "name": "read",
        "parameters": {"type": "object", "properties": {"file": {"type": "string"}, "town": None}},
    }
    (tool,) = as_tools([filled], "a row")
    assert tool["function"]["parameters"]["properties"] == {"file": {"type": "string"}}


AS_TEXT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ '<call>' + c['function']['name'] + c['function']['arguments'] }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "template", [AS_TEXT, AS_TEXT.replace("+ c['function']['arguments']", "~ c['function']['arguments']")]
)
def test_a_template_that_writes_arguments_as_they_are_gets_json(template):
    text = tokenizer()
    text.chat_template = template
    given = {"zone": "Zürich", "days": [1, 2]}
    for arguments in (given, json.dumps(given, ensure_ascii=False)):
        call = {"type": "function", "function": {"name": "time", "arguments": arguments}}
        chat = as_messages([USER, {"role": "assistant", "content": "", "tool_calls": [call]}], "a row")
        item = ChatReader(tokenizer=text, context=4096).example(0, Row(messages=chat))
        assert learnt(item) == [f'<call>time{{"zone": "Zürich", "days": [1, 2]}}{END}']
