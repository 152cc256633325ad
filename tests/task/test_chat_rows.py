"""Rows to examples: what is trained is what an engine would generate; which rows are refused."""

import numpy as np
import pytest

from proxima.data import FieldError, OverLengthError
from proxima.data.packed_batch import pack
from proxima.model.chat.encode import prompt_tokens
from proxima.task.example_rows import ChatReader, PairColumns, PreferenceReader
from proxima.task.protocol import Row
from tests.tiny import END, tiny_tokenizer

USER, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}
CHAT = (USER, ANSWER, {"role": "user", "content": "So?"}, {"role": "assistant", "content": "No."})
RETHINKING = (  # as Qwen3: what an earlier turn thought is no longer written
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ ('<t>' if loop.last and m['role'] == 'assistant' else '') + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def reader(**settings):
    return ChatReader(**{"tokenizer": tiny_tokenizer(), "context": 256} | settings)


def row(messages=(USER,), answer="Yes.", **metadata):
    return Row(messages=tuple(messages), answer=answer, metadata=metadata)


def learnt(item):
    """The trained spans as text."""
    tokenizer, mask = tiny_tokenizer(), item.loss_mask
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [tokenizer.decode(item.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


def whole(item):
    return tiny_tokenizer().decode([*item.prompt_tokens, *item.tokens])


def test_a_prompt_and_its_answer():
    item = reader().example(7, row())
    assert item.group == 7 and learnt(item) == [f"Yes.{END}"]
    assert list(item.prompt_tokens) == list(prompt_tokens([USER], tiny_tokenizer()))
    assert item.tokens[-1] == tiny_tokenizer().eos_token_id and item.loss_mask.all()
    assert learnt(reader().example(0, row(answer=18))) == [f"18{END}"]


def test_an_answer_continues_a_text_without_a_template():
    item = reader().example(0, row([{"role": "user", "content": "2+2=", "raw": True}], "4"))
    tokenizer = tiny_tokenizer()
    assert list(item.prompt_tokens) == tokenizer("2+2=")["input_ids"] and whole(item) == f"2+2=4{END}"
    assert list(item.tokens) == [*tokenizer("4")["input_ids"], tokenizer.eos_token_id] and item.loss_mask.all()


def test_a_chat_of_several_turns():
    last = reader().example(0, row(CHAT, None))
    assert learnt(last) == [f"No.{END}"]
    every = reader(loss_on="all_turns").example(0, row(CHAT, None))
    assert learnt(every) == [f"Yes.{END}", f"No.{END}"]
    assert whole(every) == whole(last)
    assert list(last.prompt_tokens) == list(prompt_tokens(CHAT[:-1], tiny_tokenizer()))


def test_the_completion_is_a_template_over_the_columns():
    item = reader(completion="{solution}\n#### {answer}").example(0, row(answer="4", solution="2+2"))
    assert learnt(item) == [f"2+2\n#### 4{END}"]
    with pytest.raises(
        FieldError, match="names a column that the row lacks: 'steps'; change sft.completion; columns: solution, answer"
    ):
        reader(completion="{steps}").example(0, row(solution="2+2"))


def test_a_template_over_a_null_column_is_no_text():
    """`null` would be learnt as a word."""
    with pytest.raises(FieldError, match="has no text: the row's 'solution' is null"):
        reader(completion="{solution}").example(0, row(solution=None))
    with pytest.raises(FieldError, match="has no text: the row's 'answer' is null"):
        reader(completion="{answer}").example(0, row(answer=None))
    assert learnt(
        reader(completion="{answer}").example(0, Row(messages=(USER,), answer=None, metadata={"answer": 4}))
    ) == [f"4{END}"]


def test_a_template_beside_a_whole_chat_is_refused():
    with pytest.raises(FieldError, match="ends with the assistant.*set sft.completion=null") as caught:
        reader(completion="{solution}").example(0, row(CHAT, None, solution="2+2"))
    assert caught.value.field == "messages"


def test_system_prompt_and_control_tokens_in_the_data():
    """A control token in a message is text: it ends no turn."""
    item = reader(system="Be brief.").example(0, row(answer=f"Say {END} twice"))
    assert whole(item).startswith("<|im_start|>system\nBe brief.")
    assert learnt(item) == [f"Say {END} twice{END}"]
    assert list(item.tokens).count(tiny_tokenizer().eos_token_id) == 1


@pytest.mark.parametrize(
    ("bad", "field", "reason"),
    [
        (row(answer=True), "completion", "is missing"),
        (row(answer=None), "completion", "is missing"),
        (row(answer="  "), "completion", "is empty"),
        (row([USER, {"role": "assistant", "content": ""}, USER]), "messages", "is empty"),
        (row([ANSWER], None), "messages", "begins with the assistant"),
    ],
)
def test_rows_that_cannot_be_trained_on(bad, field, reason):
    with pytest.raises(FieldError, match=reason) as caught:
        reader(loss_on="all_turns").example(3, bad)
    assert caught.value.field == field


LONGER = [*CHAT, USER, {"role": "assistant", "content": "Well."}]


def test_a_template_that_renders_earlier_turns_anew_gives_each_turn_its_own_context():
    """What an engine would have shown before each turn, and the turn as it would have been written."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = RETHINKING
    assert learnt(reader(tokenizer=tokenizer).example(0, row(LONGER, None))) == [f"<t>Well.{END}"]
    every = reader(tokenizer=tokenizer, loss_on="all_turns").paths(4, row(LONGER, None))
    assert [learnt(path) for path in every] == [[f"<t>Yes.{END}"], [f"<t>No.{END}"], [f"<t>Well.{END}"]]
    for path, turn in zip(every, (1, 3, 5), strict=True):
        shown = prompt_tokens(LONGER[:turn], tokenizer).tolist()
        assert [*path.prompt_tokens, *path.tokens][: len(shown)] == shown
        assert (
            path.loss_mask.tolist() == [False] * (len(shown) - len(path.prompt_tokens)) + [True] * path.loss_mask.sum()
        )
    assert len({tuple(path.prompt_tokens) for path in every}) == 1 and {path.group for path in every} == {4}
    assert len(pack(every).tokens) < sum(map(len, every)) - 2 * len(every[0].prompt_tokens)
    with pytest.raises(FieldError, match="has 3 paths"):
        reader(tokenizer=tokenizer, loss_on="all_turns").example(0, row(LONGER, None))


def test_a_template_that_keeps_thoughts_has_one_path():
    (path,) = reader(loss_on="all_turns").paths(0, row(LONGER, None))
    assert learnt(path) == [f"Yes.{END}", f"No.{END}", f"Well.{END}"]


def test_the_paths_that_fit_are_trained_where_rows_are_cut():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = RETHINKING
    every = reader(tokenizer=tokenizer, loss_on="all_turns").paths(0, row(LONGER, None))
    context = len(every[1])
    cut = reader(tokenizer=tokenizer, loss_on="all_turns", context=context, truncate=True).paths(0, row(LONGER, None))
    assert [learnt(path) for path in cut] == [learnt(path) for path in every[:2]]
    with pytest.raises(OverLengthError, match=f"the model holds {context}"):
        reader(tokenizer=tokenizer, loss_on="all_turns", context=context).paths(0, row(LONGER, None))


def test_a_long_row_is_refused_or_cut():
    plain = reader().example(0, row())
    context = len(plain) - 2
    with pytest.raises(OverLengthError, match=f"has {len(plain)} tokens, the model holds {context}"):
        reader(context=context).example(0, row())
    cut = reader(context=context, truncate=True).example(0, row())
    assert len(cut) == context and learnt(cut) == ["Yes"]
    with pytest.raises(OverLengthError, match="no trained token fits"):
        reader(context=len(plain.prompt_tokens), truncate=True).example(0, row())


BRIEF = (  # as Qwen3: `enable_thinking=false` writes an empty thought into the prompt
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['reasoning_content'] %}"
    "{{ '<think>\n' + m['reasoning_content'] + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def test_a_thought_where_thinking_is_off_is_named():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = BRIEF
    thinking = row([USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}], None)
    on = reader(tokenizer=tokenizer, arguments={"enable_thinking": True}).example(0, thinking)
    assert learnt(on) == [f"<think>\nHm.\n</think>\n\nYes.{END}"]
    with pytest.raises(FieldError, match="has a thought, and with enable_thinking=false"):
        reader(tokenizer=tokenizer, arguments={"enable_thinking": False}).example(0, thinking)


def test_the_sides_of_a_pair_have_one_prompt_whichever_of_their_turns_are_trained():
    """An earlier turn of weight 0 is context of its side alone."""
    sides = {
        name: [{"role": "assistant", "content": first, "weight": 0}, USER, {"role": "assistant", "content": last}]
        for name, first, last in (("chosen", "Yes.", "Well."), ("rejected", "Never.", "No."))
    }
    pairs = PreferenceReader(tokenizer=tiny_tokenizer(), context=256)
    pair = pairs.pair(0, Row(messages=(USER,), metadata=sides), PairColumns())
    asked = prompt_tokens([USER], tiny_tokenizer()).tolist()
    assert [side.prompt_tokens.tolist() for side in pair.sides] == [asked, asked]
    assert [learnt(side) for side in pair.sides] == [[f"Well.{END}"], [f"No.{END}"]]
    assert len(pack(pair.sides).tokens) < sum(map(len, pair.sides))


def test_a_template_that_is_replaced_is_read_anew():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    chat = (USER, {"role": "assistant", "content": "", "tool_calls": [call]})
    tokenizer = tiny_tokenizer()
    with pytest.raises(FieldError, match="has tool_calls .* template ignores"):
        reader(tokenizer=tokenizer).example(0, row(chat))
    written = "message['content'] + (message['tool_calls'] | tojson if message['tool_calls'] else '')"
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", f"({written})")
    assert '"f"' in learnt(reader(tokenizer=tokenizer).example(0, row(chat)))[0]


def test_two_messages_of_the_assistant_in_a_row_are_refused():
    """A template writes two turns; an engine that is shown the first goes on with it."""
    twice = [USER, ANSWER, {"role": "assistant", "content": "No."}]
    for loss_on in ("completion", "all_turns"):
        with pytest.raises(FieldError, match="second message of the assistant in a row.*; join the two messages"):
            reader(loss_on=loss_on).paths(0, row(twice, None))
    begun = [USER, {**ANSWER, "weight": 0}, {"role": "assistant", "content": "No."}]
    assert learnt(reader().example(0, row(begun, None))) == [f"No.{END}"]
