"""The generated tasks of the evidence: solutions checked by other code than what made them."""

import re

import pytest

from evidence.start_model import make_start_model, tokenizer
from evidence.tasks import ChainSums, Countdown, Programs, countdown_reward
from proxima.config.resolution import resolve
from proxima.data import FieldError
from proxima.task.prompts import to_prompt


def rows_of(task):
    rows = task.rows(1)
    return [(rows[i].messages[0]["content"], rows[i].metadata["solution"], rows[i].answer) for i in range(len(rows))]


@pytest.mark.parametrize("terms", [1, 3, 15, 108])
def test_a_sum_has_each_running_total(terms):
    for question, solution, answer in rows_of(ChainSums(terms=(terms,), size=5)):
        digits = [int(digit) for digit in re.findall(r"\w(\d)", question)]
        totals = [int(total) for total in re.findall(r"[^\d=]\d(\d\d)", solution)]
        assert len(digits) == terms
        assert totals == [sum(digits[: i + 1]) % 100 for i in range(terms)]
        assert solution.endswith(f"={answer}")
        assert int(answer) == totals[-1]


def test_the_terms_set_the_length():
    words = tokenizer()
    for terms, tokens in ((3, 16), (15, 64), (49, 200), (99, 400)):
        ((_, solution, _),) = rows_of(ChainSums(terms=(terms,), size=1))
        assert len(words(solution).input_ids) + 1 == tokens  # with the end


def test_a_countdown_uses_each_number_once():
    for question, solution, answer in rows_of(Countdown(size=200)):
        numbers, target = question.split(">")
        have = sorted(numbers.split(","))
        for a, sign, b, value in re.findall(r"(\d+)([-+*])(\d+)=(\d+)", solution):
            have.remove(a)
            have.remove(b)
            have.append(value)
            assert eval(f"{a}{sign}{b}") == int(value)  # digits and one sign
        assert have == [target]
        assert countdown_reward(solution, answer) == 1.0


@pytest.mark.parametrize("text", ["", "1+2=3;3+3=7", "2+3=5;5+1=6", "1+2=3", "1+2=3;3+3=6;", "6"])
def test_only_whole_solutions_are_rewarded(text):
    assert countdown_reward("1+2=3;3+3=6", "1,2,3>6") == 1.0
    assert countdown_reward(text, "1,2,3>6") == (1.0 if text == "2+3=5;5+1=6" else 0.0)


def test_a_program_is_traced():
    for question, solution, answer in rows_of(Programs(lines=(20,), size=20)):
        values = {}
        for line in question.split(";"):
            name, expression = line.split("=", 1)
            values[name] = eval(expression, {}, values) % 10
        assert solution == "".join(f"{name}{value}" for name, value in values.items()) + f"={answer}"
        assert int(answer) == [*values.values()][-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ChainSums, Countdown, Programs])
def test_no_question_is_on_both_sides(kind):
    train, test = ({question for question, _, _ in rows_of(kind(size=100, split=split))} for split in ("train", "test"))
    assert len(train) == len(test) == 100
    assert not train & test


@pytest.mark.slow
def test_too_few_questions_are_refused():
    with pytest.raises(FieldError, match="size=150"):
        ChainSums(terms=(1,), size=150, split="test").rows(1)
    with pytest.raises(FieldError, match="terms"):
        ChainSums(terms=(200,))


@pytest.mark.slow
def test_the_model_reads_and_writes_every_character(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_start_model(tmp_path / "start", hidden=32, layers=1)
    words = AutoTokenizer.from_pretrained(folder)
    for task in (ChainSums(size=3, terms=(108,)), Countdown(size=3), Programs(size=3)):
        for index in range(3):
            row = task.rows(1)[index]
            tokens = to_prompt(row, 0, words).tokens
            assert words.decode(tokens) == row.messages[0]["content"] + "\n"
            assert words.decode(words(row.metadata["solution"]).input_ids) == row.metadata["solution"]
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(words)


@pytest.mark.parametrize("recipe", ["sft", "chain"])
def test_the_recipes_resolve(recipe):
    assert resolve(f"evidence/recipes/{recipe}.yaml", [], root=None).config.train.steps > 0
