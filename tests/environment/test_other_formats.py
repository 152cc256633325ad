"""Calls in another format than the one that is read are unreadable, and named."""

from typing import get_args

import pytest

from proxima.data.episode import Episode, Span, ToolCall
from proxima.environment.call_readers import OPENINGS, READERS, UNMISTAKABLE, ToolFormat, call_start, read_calls
from proxima.environment.tool_calls import before_calls, write_call
from proxima.rollout.episodes.figures import episode_metrics, other_format_notes

FORMATS = get_args(ToolFormat)
TOOLS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}}}
CALL = ToolCall(name="add", arguments={"a": 1, "text": "one"})
PAIRS = [(written, read) for written in FORMATS for read in FORMATS if written != read and written != "code"]


@pytest.mark.parametrize(("written", "read"), PAIRS)
def test_a_call_in_another_format_is_unreadable(written, read):
    text = write_call(CALL, written, TOOLS)
    message = read_calls(text, read, TOOLS)
    assert (message.calls, message.written_as) == ((), written)
    assert message.unreadable == (f"a call is written as {written}, and read as {read}",)
    assert read_calls(f"<think>{text}</think>It is 2.", read, TOOLS).written_as == ""  # a thought calls nothing


@pytest.mark.parametrize("read", FORMATS)
def test_a_call_that_is_read_is_as_before(read):
    text = write_call(CALL, read, TOOLS)
    assert read_calls(text, read, TOOLS).written_as == "" and read_calls(text, read, TOOLS).calls
    both = f"{text}\n{write_call(CALL, 'xml' if read != 'xml' else 'hermes', TOOLS)}"
    assert read_calls(both, read, TOOLS).written_as == "" or read == "llama"  # of JSON and nothing else


@pytest.mark.parametrize("read", FORMATS)
@pytest.mark.parametrize(
    "answer",
    [
        "The sum is 2.",
        "```python\nadd(1)\n```",
        "```add\n1\n```",
        "Use `add`.",
        '{"answer": 2}',
        'The call {"name": "add"} is not one.',
        "a < b and function = 3",
        "f(x) = {x}",
        "",
    ],
)
def test_an_answer_is_an_answer(answer, read):
    assert read_calls(answer, read, TOOLS).written_as == ""


@pytest.mark.parametrize(
    ("text", "read", "written"),
    [
        ('<tool_call>{"name": "add", "argum', "xml", "hermes"),  # cut off
        ('Let me see. <tool_call>\n{"name": "add", "arguments": {}}', "xml", "hermes"),
        ("<tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</tool_call>", "hermes", "xml"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "glm", "hermes"),
        ('<|python_tag|>{"name": "add"', "xml", "llama"),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', "xml", "hermes"),  # a tool that there is not
    ],
)
def test_broken_calls_are_named_too(text, read, written):
    assert read_calls(text, read, TOOLS).written_as == written


def test_one_table_has_the_openings_of_every_format():
    assert {*OPENINGS, "mistral"} == set(READERS) == set(FORMATS) == {*UNMISTAKABLE, "code"}
    for name in FORMATS:
        text = f"I add. {write_call(CALL, name, TOOLS)}"
        assert before_calls(text, name, TOOLS) == "I add." and call_start("I add.", name, TOOLS) == -1


def test_a_call_in_a_thought_does_not_end_the_message():
    for name in FORMATS:
        call = write_call(CALL, name, TOOLS)
        text = f"<think>\n{call}\n</think>I add. {call}"
        assert before_calls(text, name, TOOLS) == f"<think>\n{call}\n</think>I add."


def test_the_figures_and_the_warning_name_the_format():
    from proxima.data.flow import Completion

    why = "a call is written as hermes, and read as xml"
    spans = [Span(role="assistant", tokens=1, sampled=True, unreadable=(why,), written_as="hermes")] * 2
    spans += [Span(role="assistant", tokens=1, sampled=True)]
    episode = Episode(spans=tuple(spans))
    completion = Completion(
        prompt_uid=0,
        sample=0,
        tokens=[1, 2, 3],
        text="",
        sampled_log_prob=0.0,
        untruncated_log_prob=0.0,
        policy_version=0,
        finish_reason="stop",
        temperature=1.0,
        episode=episode,
    )
    figures = episode_metrics([completion])
    assert figures["episode/unreadable"] == figures["episode/unreadable/hermes"] == 2
    (note,) = other_format_notes([completion])
    assert note.startswith(f"in 2 of 3 messages of the model {why}") and "set episode.tool_format=hermes" in note
    assert Episode.from_json(episode.to_json()) == episode
    assert "written_as" not in Episode(spans=(Span(role="user", tokens=1),)).to_json()  # stored where it is set
