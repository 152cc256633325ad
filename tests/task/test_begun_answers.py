"""Prompts that end with a message of the assistant, whose text the answer continues."""

import pytest

from proxima.data import FieldError
from proxima.model.chat.answer import completion_tokens
from proxima.model.chat.encode import prompt_tokens
from proxima.task.example_rows import LabelColumns, PairColumns, PreferenceReader
from proxima.task.prompts import to_prompt
from proxima.task.protocol import Row
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

USER = {"role": "user", "content": "Make 24 of 3, 8, 1."}
BEGUN = {"role": "assistant", "content": "Let me think.\n<think>"}
OPEN = "<|im_start|>user\nMake 24 of 3, 8, 1.<|im_end|>\n<|im_start|>assistant\nLet me think.\n<think>"
THOUGHT = "'<think>\\n\\n</think>\\n\\n' + "  # Qwen3 writes it before a last turn without one


def with_template(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("end", ["", "\n", "  "])
def test_the_answer_continues_the_assistants_text(end):
    begun = {**BEGUN, "content": BEGUN["content"] + end}
    tokenizer = tiny_tokenizer()
    prompt = to_prompt(Row(messages=(USER, begun), chat=True), 0, tokenizer)
    assert tokenizer.decode(prompt.tokens) == OPEN + end
    assert prompt.messages == (USER, begun) and prompt.question == USER["content"]


def test_an_opened_thought_of_the_generation_prompt_is_the_rows_to_write():
    template = CHAT_TEMPLATE.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    tokens = prompt_tokens((USER, BEGUN), with_template(template))
    assert tiny_tokenizer().decode(tokens) == OPEN


def test_without_a_template_no_line_end_follows():
    tokens = prompt_tokens((USER, BEGUN), with_template(None))
    assert tiny_tokenizer().decode(tokens) == "Make 24 of 3, 8, 1.\nLet me think.\n<think>"


def test_control_texts_in_it_stay_text():
    begun = {**BEGUN, "content": "a<|im_end|>b"}
    tokens = prompt_tokens((USER, begun), tiny_tokenizer()).tolist()
    assert tiny_tokenizer().decode(tokens).endswith("assistant\na<|im_end|>b") and tokens.count(0) == 1


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim"), "changes its text"),
        (CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"), "changes its text"),
        (CHAT_TEMPLATE.replace("message['content']", "message['content'].split('think>')[-1]"), "changes its text"),
        (CHAT_TEMPLATE.replace("message['content']", f"({THOUGHT}message['content'])"), r"writes '<think>\\n\\n</th"),
    ],
    ids=["trims", "upper", "drops the thought", "adds a thought"],
)
def test_a_template_that_can_t_leave_it_open_refuses_the_row(template, why):
    begun = {**BEGUN, "content": "Let me think.\n<think>\n"}
    with pytest.raises(FieldError, match=rf"messages='Let me think.*can't be continued: the chat template {why}") as e:
        prompt_tokens((USER, begun), with_template(template))
    assert e.value.field == "messages" and "end the chat with the user's message" in e.value.remedy


def test_completions_of_a_begun_answer_are_the_rest_of_its_turn():
    tokens = completion_tokens((USER, BEGUN), " 3 * 8</think> 24", tiny_tokenizer())
    assert tiny_tokenizer().decode(tokens) == " 3 * 8</think> 24<|im_end|>"


def test_both_sides_of_a_pair_continue_it():
    row = Row(
        messages=(USER, BEGUN), metadata={"chosen": " 3 * 8", "rejected": [{"role": "assistant", "content": "?"}]}
    )
    pair = PreferenceReader(tokenizer=tiny_tokenizer(), context=256).pair(0, row, PairColumns())
    read = tiny_tokenizer().decode
    assert read(pair.chosen.prompt_tokens) == read(pair.rejected.prompt_tokens) == OPEN
    assert (read(pair.chosen.tokens), read(pair.rejected.tokens)) == (" 3 * 8<|im_end|>", "?<|im_end|>")


def test_a_chat_that_is_one_of_the_sides_is_not_begun():
    chosen = [USER, {"role": "assistant", "content": "3 * 8"}]
    reader, read = PreferenceReader(tokenizer=tiny_tokenizer(), context=256), tiny_tokenizer().decode
    for messages in (chosen, [USER, {"role": "assistant", "content": "a third answer"}]):
        row = Row(messages=tuple(messages), metadata={"chosen": chosen, "rejected": [USER, BEGUN]})
        pair = reader.pair(0, row, PairColumns())
        assert read(pair.chosen.prompt_tokens) == OPEN.removesuffix(BEGUN["content"])
        assert (read(pair.chosen.tokens), read(pair.rejected.tokens)) == (
            "3 * 8<|im_end|>",
            "Let me think.\n<think><|im_end|>",
        )
    row = Row(messages=tuple(chosen), metadata={"completion": "3 * 8", "label": True})
    assert read(reader.labeled(0, row, LabelColumns()).completion.tokens) == "3 * 8<|im_end|>"
