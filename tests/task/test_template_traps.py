"""The traps of chat templates that a run names at its start, and the clock that templates read."""

import pytest
from tokenizers import AddedToken

from proxima.data import FieldError
from proxima.model.chat.answer import TurnEnd, turn_end
from proxima.model.chat.encode import prompt_tokens
from proxima.model.chat.template_inputs import clock_notes, current_clock, fixed_clock, require_moment
from proxima.model.pretrained import stop_tokens_of
from proxima.task.protocol import Row
from proxima.task.template_traps import template_notes
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

USER = {"role": "user", "content": "Hi"}
ROWS = [Row(messages=(USER,))] * 3
START, END, TEXT_END = 1, 0, 2  # ids of the tiny tokenizer
DATED = "{{ strftime_now(FORMAT) }}: " + CHAT_TEMPLATE


def with_template(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def notes(template=CHAT_TEMPLATE, rows=ROWS, *, system=None, stops=(END,), texts=(), special=()):
    how = {"system": system, "arguments": {}, "stops": stops, "stop_texts": texts}
    tokenizer = with_template(template)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special], special_tokens=True)
    return template_notes(tokenizer, "m", rows, **how)


def ending(text):
    return CHAT_TEMPLATE.replace("<|im_end|>\n' }}{% endfor", f"{text}' }}}}{{% endfor")


def test_a_template_without_traps_has_no_note():
    assert notes() == notes(system="Be brief.") == []


# ---- where a turn ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHAT_TEMPLATE, TurnEnd("<|im_end|>", END)),
        (ending("  <|endoftext|>"), TurnEnd("<|endoftext|>", TEXT_END)),
        (ending("\n### End\n\n"), TurnEnd("### End", None)),
        (ending(""), TurnEnd("", None)),
        (None, None),
        ("{{ raise_exception('two messages') }}", None),
        (CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"), None),
    ],
    ids=["chatml", "space", "text", "nothing", "no template", "fails", "changes the text"],
)
def test_the_end_of_a_turn(template, end):
    assert turn_end(with_template(template)) == end


class Files:
    def __init__(self, eos_token_id):
        self.eos_token_id = eos_token_id


@pytest.mark.parametrize(("own", "stops"), [(2, (2, 0)), ([2, 7], (2, 7, 0)), (0, (0,)), (None, (0,))])
def test_a_completion_ends_where_the_template_ends_a_turn(own, stops):
    """A base model's files name its end of text alone."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    assert stop_tokens_of(None, Files(own), tokenizer) == stops
    tokenizer.chat_template = None
    assert stop_tokens_of(None, Files(own), tokenizer) == stops[: len(stops) - (own != 0)]


def test_a_turn_end_that_the_files_lack_is_named():
    (note,) = notes(stops=(TEXT_END,))
    assert "ends turns with <|im_end|>, and the model's files stop only at <|endoftext|>: here completions stop" in note
    assert note.endswith("set eos_token_id in its generation_config.json to [2, 0]")


def test_a_turn_end_of_text_can_be_a_stop_text():
    (note,) = notes(ending("\n### End\n"))
    assert "'### End', and completions go on after it" in note and note.endswith("set sampling.stop=['### End']")
    assert notes(ending("\n### End\n"), texts=("### End",)) == []
    (note,) = notes(ending(""))
    assert "writes nothing after an answer: completions end at <|im_end|> or sampling.max_tokens" in note


# ---- control tokens in the text of rows ------------------------------------------------------------------------------


def test_tags_that_are_control_tokens_are_named_where_a_row_spells_them():
    said = {"role": "assistant", "content": "<think>a</think><answer>7</answer><|endoftext|><note>"}
    rows = [ROWS[0], Row(messages=(USER, said))]
    (note,) = notes(rows=rows, special=("<answer>", "</answer>", "<tool_call>"))
    spelt = "<answer> (1 of 2 rows read), </answer> (1 of 2 rows read); <answer> becomes 8 ordinary tokens"
    assert f"control tokens of the tokenizer are spelt out in the text of messages: {spelt}" in note
    assert notes(rows=rows) == notes(special=("<answer>",)) == []


# ---- rows that were rendered before ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mark", ["<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "[INST]", "<｜User｜>", "<|im_end|>"]
)
def test_rows_that_hold_a_rendered_chat_are_named(mark):
    rendered = Row(messages=({"role": "user", "content": f"{mark}user\nHi\n"},))
    (note,) = notes(rows=[ROWS[0], rendered, rendered])
    assert f"2 of 3 rows read hold the control token {mark} in their text: it is plain text there" in note
    assert "name their column in task.prompt" in note
    raw = Row(messages=({**rendered.messages[0], "raw": True},))
    assert notes(rows=[raw]) == notes(None, rows=[raw]) == []  # read as they are


def test_without_a_template_rows_may_be_rendered_too():
    rendered = Row(messages=({"role": "user", "content": "[INST] Hi"},))
    first, second = notes(None, rows=[rendered])
    assert first.startswith("m has no chat template") and "1 of 1 rows read hold" in second


# ---- system prompts --------------------------------------------------------------------------------------------------

DROPS = CHAT_TEMPLATE.replace("in messages %}", "in messages if message['role'] != 'system' %}")
MERGES = (
    "{% for m in messages %}{% if m.role != 'system' %}<start>{{ m.role }}\n{% if loop.index0 == 1 and "
    "messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "why"),
    [(DROPS, "drops the system prompt: the model never sees it; set data.system=null"), (MERGES, "no system role")],
)
def test_a_template_without_a_system_role_is_named_where_rows_have_one(template, why):
    own = Row(messages=({"role": "system", "content": "Sing."}, USER))
    for found in (notes(template, system="Be brief."), notes(template, rows=[*ROWS, own])):
        assert len(found) == 1 and why in found[0]
    assert notes(template) == []


def test_a_template_that_fails_for_a_system_prompt_says_what_to_do():
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT_TEMPLATE
    with pytest.raises(ValueError, match="TemplateError: no system role; repair .* set data.system=null, and put"):
        prompt_tokens(({"role": "system", "content": "Sing."}, USER), with_template(refuses))


# ---- the clock -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "written", "shown"),
    [
        ("2024-07-26", "%d %b %Y", "26 Jul 2024"),
        ("2024-07-26", "%Y-%m-%d %H:%M", "2024-07-26 00:00"),
        ("2024-07-26T18:30", "%B %d, %Y %H:%M:%S", "July 26, 2024 18:30:00"),
    ],
)
def test_a_template_reads_the_given_moment(moment, written, shown):
    tokenizer = with_template(DATED.replace("FORMAT", f"'{written}'"))
    with fixed_clock(moment) as clock:
        tokens = prompt_tokens((USER,), tokenizer)
        assert current_clock() is clock and clock.named and clock.read
    assert tokenizer.decode(tokens).startswith(f"{shown}: <|im_start|>")
    assert current_clock() is None
    assert not tokenizer.decode(prompt_tokens((USER,), tokenizer)).startswith(f"{shown}: ")  # the machine's


def test_what_is_said_of_the_clock():
    dated = with_template(DATED.replace("FORMAT", "'%d'"))
    unread = with_template("{% if date_string is defined %}{{ strftime_now('%d') }}{% endif %}" + CHAT_TEMPLATE)
    for tokenizer, named, read in ((dated, True, True), (unread, True, False), (tiny_tokenizer(), False, False)):
        with fixed_clock("2024-07-26") as clock:
            prompt_tokens((USER,), tokenizer)
        assert (clock.named, clock.read) == (named, read)
        assert len(clock_notes(clock, None)) == read and len(clock_notes(clock, "2024-07-26")) == (not named)
    assert clock_notes(None, None) == []


@pytest.mark.parametrize("moment", ["today", "26 Jul 2024", "2024-13-01", ""])
def test_a_moment_is_a_date(moment):
    if not moment:
        return require_moment(None)
    with pytest.raises(FieldError, match="template_date='.*' must be a date, or date and time, of ISO 8601"):
        require_moment(moment)
