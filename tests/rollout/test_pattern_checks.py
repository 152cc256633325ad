"""A pattern that no answer can match is named before the run."""

import pytest

from proxima.data.errors import quoted
from proxima.engine.protocol import Sampling
from proxima.environment.call_readers import ToolFormat, read_calls
from proxima.environment.tool_calls import PARAMETERS, TRIAL, write_call
from proxima.reward.math.marked import Boxed, Gsm8kReward
from proxima.reward.math.numbers import Accuracy152
from proxima.reward.patterns import RequiredText, required_text
from proxima.reward.text import Format, Regex
from proxima.rollout.pattern_checks import AnswerTexts, call_notes
from proxima.task.prompts import to_prompt
from proxima.task.protocol import Row
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

USER = {"role": "user", "content": "3 + 4?"}


def opening(text):
    return CHAT_TEMPLATE.replace("assistant\n' }}{% endif", f"assistant\n{text}' }}}}{{% endif")


def notes(*rewards, template=CHAT_TEMPLATE, stop=(), messages=(USER,)):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    prompts = [to_prompt(Row(messages=tuple(messages), chat=True), 0, tokenizer)]
    return AnswerTexts(tokenizer=tokenizer, prompts=prompts, stop=stop, stop_tokens=(0,)).notes(rewards)


@pytest.mark.parametrize(
    ("pattern", "needed"),
    [
        (Format().pattern, RequiredText(("<think>", "</think>\n<answer>", "</answer>"), anchored=True)),
        (Regex().pattern, RequiredText(("<answer>", "</answer>"))),
        (r"\A\s*(<think>)(?:a|b)c+x?$", RequiredText(("<think>", "c"), anchored=True, after_space=True)),
        (r".*^ab", RequiredText(("ab",))),
        (r"^.*ab", RequiredText(("ab",))),
        (r"(?m)^ab", RequiredText(("ab",))),
        (r"(?i)^ab", RequiredText()),
        (r"^(?=.*x)(?!y)a\bb", RequiredText(("ab",), anchored=True)),
        (r"(?:ab){2}(?i:c)", RequiredText(("ab",))),
        (r"[ab]|c", RequiredText()),
        (r"^$", RequiredText()),
    ],
)
def test_the_texts_that_every_match_contains(pattern, needed):
    assert required_text(pattern) == needed


THOUGHT, STARTS = Format(pattern=r"^<think>"), Format(pattern=r"^\s*<answer>")
IMPOSSIBLE = {
    "another beginning": ([STARTS], {"template": opening("<think>\n")}, r"begins with '<think>\n', which is in the"),
    "a prefilled answer": (
        [Format()],
        {"messages": (USER, {"role": "assistant", "content": "Let me see."})},
        "every answer begins with 'Let me see.'",
    ),
    "a stop before the answer": ([Format()], {"stop": ("</think>",)}, "sampling.stop has '</think>'"),
    "a stop within a text": ([Format()], {"stop": ("\n",)}, r"'</think>\n<answer>' is needed whole"),
    "a stop in the last text": ([Regex()], {"stop": ("</ans",)}, "'</answer>' is needed whole"),
    "a stop at a number's tag": ([Accuracy152()], {"stop": ("<answer>",)}, "'<answer>' is needed whole"),
    "the end of the turn": ([Format(pattern="a<.im_end.>"), Format(pattern=r"<\|im_end\|>$")], {}, "ends the turn"),
    "a text that opens the thought": (
        [Format()],
        {"messages": ({"role": "user", "content": "Q: 3 + 4?\nA: <think>", "raw": True},)},
        "the prompts end with <think>",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_pattern_that_no_answer_can_match_is_named(case):
    rewards, settings, why = IMPOSSIBLE[case]
    (note,) = notes(*rewards, **settings)
    pattern = rewards[-1].text_patterns[0]
    what = f"{rewards[-1].label} can't find {quoted(pattern, 80)} in any answer"
    assert why in note and note.startswith(f"reward: {what}: ")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"template": opening("<think>\n"), "stop": ("</answer>",)},
        {"template": opening("<think>\n\n</think>\n\n")},
        {"template": None},
        {"messages": (USER, {"role": "assistant", "content": "<think>\nSev"}), "stop": ("</answer>", "\n\n")},
    ],
)
def test_nothing_is_said_of_patterns_that_can_match(settings):
    rewards = [Format(), Regex(), THOUGHT, Accuracy152(tag=None), Gsm8kReward(strict=True), Boxed()]
    assert notes(*rewards[:2], Boxed(), *rewards[3:], **settings) == []


def test_a_prefix_of_the_prompt_holds_no_stop():
    """What the prompt has is not sampled: a stop string in it ends nothing."""
    assert notes(Format(), template=opening("<think>\n"), stop=("<think>",)) == []


TOOLS = {TRIAL.name: PARAMETERS}


@pytest.mark.parametrize("tool_format", ToolFormat.__args__)
def test_a_stop_string_within_a_call_is_named(tool_format):
    call = write_call(TRIAL, tool_format, TOOLS)
    unread = read_calls(call, tool_format, TOOLS).calls != (TRIAL,)  # such a form has texts only
    for at in range(len(call) - 3):
        stop = call[at : at + 3]
        cut = call[: call.find(stop) + 3]
        readable = read_calls(cut, tool_format, TOOLS).calls == (TRIAL,)
        sampling = Sampling(stop=(stop,))
        assert (call_notes(tool_format, sampling, "episode") == []) == (readable or unread)


def test_the_closing_tag_of_a_call_may_end_it():
    assert call_notes("minimax", Sampling(stop=("</invoke>",)), "episode") == []
    (note,) = call_notes("minimax", Sampling(stop=("</parameter>",)), "episode")
    assert note == "episode: sampling.stop has '</parameter>', which ends a turn within a tool call (format minimax)"
