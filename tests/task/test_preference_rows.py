"""From rows to pairs of token sequences, and what is wrong with a row."""

import numpy as np
import pytest

from proxima.data import FieldError, OverLengthError, UserError
from proxima.model.chat.answer import completion_tokens
from proxima.model.chat.encode import prompt_tokens
from proxima.task.example_rows import LabelColumns, PairColumns, PreferenceReader
from proxima.task.local_files import Jsonl
from tests.prepare.published import write_jsonl
from tests.task.test_chat_rows import RETHINKING
from tests.tiny import END, tiny_tokenizer

ASKED = {"role": "user", "content": "2 + 2?"}
EARLIER = [ASKED, {"role": "assistant", "content": "5"}, {"role": "user", "content": "Sure?"}]


def said(text):
    return {"role": "assistant", "content": text}


def rows_of(folder, *rows, **mapping):
    path = write_jsonl(folder / "pairs.jsonl", rows)
    return Jsonl(path=str(path), answer=None, **mapping).rows(0)


def reader(**options):
    return PreferenceReader(**{"tokenizer": tiny_tokenizer(), "context": 256} | options)


def one(folder, row, columns=None, *, by=None, **mapping):
    mapping = mapping or {"question": "prompt"}
    return (by or reader()).pair(7, rows_of(folder, row, **mapping)[0], columns or PairColumns())


def read(tokens):
    return tiny_tokenizer().decode(tokens)


@pytest.mark.parametrize(
    ("row", "mapping"),
    [
        ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, {"question": "prompt"}),
        ({"prompt": [ASKED], "chosen": "4", "rejected": [said("5")]}, {"messages": "prompt"}),
        ({"prompt": "2 + 2?", "chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]}, {"question": "prompt"}),
        ({"chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]}, {"messages": "chosen"}),
        ({"chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]}, {"messages": "rejected"}),
    ],
)
def test_every_shape_of_row_makes_the_same_pair(tmp_path, row, mapping):
    pair = one(tmp_path, row, **mapping)
    assert read(pair.chosen.prompt_tokens) == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert (read(pair.chosen.tokens), read(pair.rejected.tokens)) == ("4<|im_end|>", "5<|im_end|>")
    assert (pair.row, pair.margin, pair.chosen.group, pair.rejected.group) == (7, None, 7, 7)
    assert (pair.chosen.sample, pair.rejected.sample) == (0, 1)
    assert np.array_equal(pair.chosen.prompt_tokens, pair.rejected.prompt_tokens)


SURE = {"role": "user", "content": "Sure?"}


@pytest.mark.parametrize(
    ("row", "mapping"),
    [
        ({"prompt": [ASKED], "chosen": [said("4"), SURE, said("Yes")]}, {"messages": "prompt"}),
        ({"prompt": "2 + 2?", "chosen": [ASKED, said("4"), SURE, said("Yes")]}, {"question": "prompt"}),
        ({"chosen": [ASKED, said("4"), SURE, said("Yes")]}, {"messages": "chosen"}),
        ({"chosen": [ASKED, said("4"), SURE, said("Yes")]}, {"messages": "rejected"}),
    ],
)
@pytest.mark.parametrize("rejected", [[said("5")], [said("5"), SURE, said("No")]])
def test_of_several_turns_those_of_the_assistant_are_trained(tmp_path, row, mapping, rejected):
    before = row["chosen"][:1] if row["chosen"][0] == ASKED else []
    pair = one(tmp_path, row | {"rejected": before + rejected}, **mapping)
    assert read(pair.chosen.prompt_tokens) == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert np.array_equal(pair.chosen.prompt_tokens, pair.rejected.prompt_tokens)
    between = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert read(pair.chosen.tokens) == f"4<|im_end|>{between}Yes<|im_end|>"
    assert read(pair.chosen.tokens[pair.chosen.loss_mask]) == "4<|im_end|>Yes<|im_end|>"
    if len(rejected) > 1:
        assert read(pair.rejected.tokens[pair.rejected.loss_mask]) == "5<|im_end|>No<|im_end|>"


def test_sides_that_part_within_the_conversation_have_a_longer_prompt(tmp_path):
    begun = [ASKED, said("4"), SURE]
    row = {"chosen": [*begun, said("Yes")], "rejected": [*begun, said("No"), ASKED, said("5")]}
    pair = one(tmp_path, row, messages="chosen")
    assert read(pair.chosen.prompt_tokens).endswith("Sure?<|im_end|>\n<|im_start|>assistant\n")
    assert read(pair.chosen.tokens) == "Yes<|im_end|>"
    assert read(pair.rejected.tokens[pair.rejected.loss_mask]) == "No<|im_end|>5<|im_end|>"


def test_a_template_that_drops_earlier_thoughts_gives_each_turn_its_own_path(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = RETHINKING
    row = {"prompt": [ASKED], "chosen": [said("4"), SURE, said("Yes")], "rejected": [said("5")]}
    pair = one(tmp_path, row, by=reader(tokenizer=tokenizer), messages="prompt")
    first, second = pair.chosen.paths
    asked = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    for path in pair.sides:
        assert read(path.prompt_tokens) == asked and path.group == 7
    assert [(path.sample, path.turn) for path in pair.sides] == [(0, 0), (0, 1), (1, 0)]
    assert read(first.tokens) == "<t>4<|im_end|>" and first.loss_mask.all()
    between = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert read(second.tokens) == f"4<|im_end|>{between}<t>Yes<|im_end|>"
    assert read(second.tokens[second.loss_mask]) == "<t>Yes<|im_end|>"
    assert read(pair.rejected.tokens) == "<t>5<|im_end|>"
    row = {"prompt": [ASKED], "completion": row["chosen"], "label": True}
    good = reader(tokenizer=tokenizer).labeled(0, rows_of(tmp_path, row, messages="prompt")[0], LabelColumns())
    assert [read(path.tokens) for path in good.completion.paths] == [read(first.tokens), read(second.tokens)]


def test_two_messages_of_a_side_in_a_row_are_refused(tmp_path):
    row = {"prompt": [ASKED], "chosen": [said("4"), said("Yes")], "rejected": [said("5")]}
    with pytest.raises(FieldError, match="chosen='Yes' is the second message of the assistant in a row"):
        one(tmp_path, row, messages="prompt")


def test_a_labelled_conversation(tmp_path):
    row = {"prompt": [ASKED], "completion": [said("4"), SURE, said("Yes") | {"weight": 0}], "label": True}
    good = reader().labeled(0, rows_of(tmp_path, row, messages="prompt")[0], LabelColumns())
    assert read(good.completion.tokens[good.completion.loss_mask]) == "4<|im_end|>" and good.good


def test_the_prompt_is_that_of_rl(tmp_path):
    row = {"chosen": [*EARLIER, said("4")], "rejected": [*EARLIER, said("6")]}
    pair = one(tmp_path, row, messages="chosen", by=reader(system="Be brief."))
    chat = [{"role": "system", "content": "Be brief."}, *EARLIER]
    assert pair.chosen.prompt_tokens.tolist() == prompt_tokens(chat, tiny_tokenizer()).tolist()


def test_columns_have_the_names_that_the_recipe_gives(tmp_path):
    row = {"prompt": "2 + 2?", "answers": {"best": "4", "worst": "5"}, "gap": 2}
    columns = PairColumns(chosen="answers.best", rejected="answers.worst", margin="gap")
    pair = one(tmp_path, row, columns)
    assert (read(pair.chosen.tokens), read(pair.rejected.tokens), pair.margin) == ("4<|im_end|>", "5<|im_end|>", 2.0)


@pytest.mark.parametrize(("label", "good"), [(True, True), (1, True), (False, False), (0, False)])
def test_completions_with_a_label(tmp_path, label, good):
    (row,) = rows_of(tmp_path, {"prompt": "2 + 2?", "completion": "4", "label": label}, question="prompt")
    labeled = reader().labeled(3, row, LabelColumns())
    assert (labeled.row, labeled.good, read(labeled.completion.tokens)) == (3, good, "4<|im_end|>")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": "  "}, "chosen='  ' is empty"),
        ({"rejected": "4"}, "rejected='4' equals chosen: the pair says nothing"),
        (
            {"rejected": "5" * 300},
            r"rejected='5{57}\.\.\.' does not fit: with its prompt it has 326 tokens, the model holds 256; shorten it",
        ),
        ({"chosen": [ASKED]}, r"chosen=.* must end with a message of the assistant"),
        ({"chosen": 4}, r"chosen='4' is not a chat: column 'chosen' holds 4, expected a list of \{role, content\}"),
        (
            {"chosen": [{"role": "user", "content": "3 + 3?"}, said("6")]},
            "chosen=.* begins with another prompt than its row; map task.question or task.messages to the prompt",
        ),
        ({"margin": "much"}, "margin='much' must be a finite number of float32"),
        ({"margin": True}, "margin=True must be a finite number of float32"),
        ({"margin": float("nan")}, "margin=None must be a finite number of float32"),
        ({"margin": 10**300}, "margin=10+ … 0+ \\(301 characters\\) must be a finite number of float32"),
    ],
)
def test_a_bad_row_names_its_field(tmp_path, change, message):
    row = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "margin": 1.0} | change
    with pytest.raises(FieldError, match=f"^{message}") as caught:
        one(tmp_path, row, PairColumns(margin="margin"))
    assert isinstance(caught.value, OverLengthError) == ("does not fit" in message)


def test_more_bad_rows(tmp_path):
    row = {"prompt": "2 + 2?", "chosen": "4"}
    with pytest.raises(
        FieldError, match="rejected='rejected' names a column that the row lacks: 'rejected'; map it to another column"
    ):
        one(tmp_path, row)
    with pytest.raises(FieldError, match="chosen='4' follows no prompt; map task.question to the prompt"):
        one(tmp_path, {"chosen": [said("4")], "rejected": [said("5")]}, messages="chosen")
    for label in (2, "yes", None, 1.0):
        (labeled,) = rows_of(tmp_path, row | {"completion": "4", "label": label}, question="prompt")
        with pytest.raises(FieldError, match="label=.* must be true, false, 1 or 0"):
            reader().labeled(0, labeled, LabelColumns())


def test_a_completion_ends_where_the_engine_would_stop(tmp_path):
    tokenizer = tiny_tokenizer()
    assert read(completion_tokens([ASKED], "4", tokenizer)) == "4" + END
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    with pytest.raises(
        FieldError, match="chosen='4' can't be used: no end-of-turn token follows the answer, .*; repair the chat temp"
    ):
        one(tmp_path, {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, by=reader(tokenizer=tokenizer))
    tokenizer.chat_template = None  # a base model: the tokenizer's EOS
    pair = one(tmp_path, {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, by=reader(tokenizer=tokenizer))
    assert (read(pair.chosen.prompt_tokens), read(pair.chosen.tokens)) == ("2 + 2?\n", "4" + END)


def test_a_template_that_changes_the_prompt_before_an_answer_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if not add_generation_prompt %}Chat: {% endif %}" + tokenizer.chat_template
    with pytest.raises(
        UserError, match="the tokens of the chat with this answer do not begin with those of its prompt"
    ):
        completion_tokens([ASKED], "4", tokenizer)
